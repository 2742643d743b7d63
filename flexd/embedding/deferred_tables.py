"""Modules that may be constructed on the ``meta`` device and get their tables from ``to_empty``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import nn

from flexd.core.errors import EmbeddingError
from flexd.embedding.devices import allocated_device


class DeferredTables(nn.Module):
    """Makes tables at once, or when ``to_empty`` moves the module from ``meta`` to the device of the tables.

    Attributes:
        device: of the tables; ``meta`` until they are made.
    """

    made_with_tables: ClassVar[frozenset[str]] = frozenset()
    """Attributes that do not exist on ``meta``."""

    def __init__(self, device: torch.device | str | None) -> None:
        super().__init__()
        self.device = allocated_device(device)
        self._make: Callable[[], None] | None = None

    @property
    def has_tables(self) -> bool:
        """False until the tables are made."""
        return self._make is None

    def make_or_defer(self, make: Callable[[], None]) -> None:
        """Collective if the device is not ``meta``. Call ``make``, which makes the tables on ``self.device``."""
        self._make = make
        if self.device.type != "meta":
            self._make_now(make)

    def _make_now(self, make: Callable[[], None]) -> None:
        # The innermost of such contexts holds: no other tensor is made on the caller's default device.
        with torch.device("cpu"):
            make()
        self._make = None

    def __getattr__(self, name: str) -> Any:
        if name in self.made_with_tables and self.__dict__.get("_make") is not None:
            raise EmbeddingError(
                "the tables are on meta, without values", remedy="call to_empty(device=...) on every rank"
            )
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Make tables that are on ``meta`` on the device of ``to_empty``, and refuse every other move at once.

        ``model.half()`` does not change the tables, which have their own dtype.
        """
        try:
            target = fn(torch.empty(0, dtype=torch.int64, device=self.device)).device
        except NotImplementedError as error:
            raise EmbeddingError(
                "the tables are on meta, without values", remedy="call to_empty(device=...) instead of to(device)"
            ) from error
        if target != self.device:
            if self._make is None:
                raise EmbeddingError(
                    f"the tables are on {self.device} and cannot be moved to {target}",
                    remedy="construct the collection with device=",
                )
            self.device = target
            try:
                self._make_now(self._make)
            except BaseException:
                self.device = torch.device("meta")
                raise
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self
