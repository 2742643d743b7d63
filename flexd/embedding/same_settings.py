"""Compares what ranks construct a collection with: differences would deadlock, or make copies of a row differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.core.errors import TopologyError
from flexd.core.mistakes import MISTAKES, MistakeKind
from flexd.embedding.exchange.collectives import Peers

_NAMED_TABLES = 5


@dataclass(frozen=True)
class Setting:
    """Something that is equal on all ranks.

    Attributes:
        subject: what it is, in the plural.
        value: whose ``repr`` is compared.
        kind: of the mistake, if it is one that is counted.
        here: this rank's value, for the error.
    """

    subject: str
    value: object
    kind: MistakeKind | None = None
    here: str = ""


def rows_of_tables(rows: Sequence[tuple[str, int]]) -> Setting:
    """Return the setting of the names of tables and their numbers of rows."""
    more = f" and {len(rows) - _NAMED_TABLES} more" if len(rows) > _NAMED_TABLES else ""
    shown = ", ".join(f"{name!r} with {number} rows" for name, number in rows[:_NAMED_TABLES])
    return Setting("names or row counts of tables", list(rows), MistakeKind.ROW_COUNTS, shown + more)


def seed_of_tables(seed: int) -> Setting:
    """Return the setting of the seed of initial values."""
    return Setting("seeds", seed, MistakeKind.DIFFERING_SEEDS, f"seed={seed}")


def check_same_settings(world: Peers, settings: Sequence[Setting], device: torch.device) -> None:
    """Collective. Compare settings by digest, in their order.

    Raises:
        TopologyError: on every rank: the first that differs, and the ranks whose setting is not rank 0's.
    """
    digests = [int(hashlib.sha256(repr(one.value).encode()).hexdigest()[:15], 16) for one in settings]
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    for one, everyone in zip(settings, world.all_gather(mine).T.tolist(), strict=True):
        odd = [rank for rank, digest in enumerate(everyone) if digest != everyone[0]]
        if odd:
            text = f"ranks {odd} have other {one.subject} than rank 0" + (f", here {one.here}" if one.here else "")
            if one.kind is not None:
                MISTAKES.note(one.kind, text)
            raise TopologyError(text, remedy="construct the collection with the same arguments on every rank")
