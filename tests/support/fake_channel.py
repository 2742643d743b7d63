"""A coordinator as pacing observes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FakeChannel:
    """A channel to ``world_size`` ranks with a given number of outstanding chunks."""

    def __init__(self, world_size: int, outstanding: Callable[[], int] = lambda: 0) -> None:
        self._world_size = world_size
        self._outstanding = outstanding

    @property
    def outstanding_chunks(self) -> int:
        return self._outstanding()

    def live(self) -> Any:
        return SimpleNamespace(layout=SimpleNamespace(world_size=self._world_size))
