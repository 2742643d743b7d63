"""Bytes and accesses counted where they happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum


class Kind(StrEnum):
    ALL_TO_ALL = "all_to_all"
    SYNC = "sync"
    MIGRATION = "migration"


@dataclass
class Traffic:
    """Running totals of one rank: payload bytes sent to other ranks, by link class, and lookups by tier.

    An all-reduce of n bytes over m ranks is counted as the 2 n (m-1)/m bytes each rank sends in it and an all-gather
    as the n (m-1) it forwards; gloo's wire counters agree (``tools/check_collective_bytes.py``).
    """

    all_to_all_intra_bytes: int = 0
    all_to_all_inter_bytes: int = 0
    sync_intra_bytes: int = 0
    sync_inter_bytes: int = 0
    migration_intra_bytes: int = 0
    migration_inter_bytes: int = 0
    home_accesses: int = 0
    node_accesses: int = 0
    device_accesses: int = 0
    _kind: Kind = field(default=Kind.ALL_TO_ALL, repr=False)

    @property
    def kind_now(self) -> Kind:
        """Of what is sent at the moment."""
        return self._kind

    @contextmanager
    def kind(self, kind: Kind) -> Iterator[None]:
        """Bytes sent inside are of this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Collectives inside are not the training's own (checks, exports)."""
        before = self.totals()
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def sent(self, intra_bytes: int, inter_bytes: int, kind: Kind | None = None) -> None:
        """``kind``: default what ``kind()`` says."""
        intra, inter = f"{kind or self._kind}_intra_bytes", f"{kind or self._kind}_inter_bytes"
        setattr(self, intra, getattr(self, intra) + intra_bytes)
        setattr(self, inter, getattr(self, inter) + inter_bytes)

    def move_to(self, other: Traffic) -> None:
        """Adds everything to ``other`` and begins anew."""
        for name, value in self.totals().items():
            setattr(other, name, getattr(other, name) + value)
            setattr(self, name, 0)

    def totals(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}
