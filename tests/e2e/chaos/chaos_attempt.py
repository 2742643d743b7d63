"""Records of the training ranks of one launch, as the ranks write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.chaos.chaos_processes import Child


@dataclass(frozen=True)
class Step:
    """Record of one step of one rank; ``at`` is CLOCK_MONOTONIC, which all processes of a machine share."""

    step: int
    loss: float
    version: int
    digest: int
    bit_equal: bool
    seconds: float
    at: float
    agent: str


class Attempt:
    """One launch of the training ranks."""

    def __init__(self, name: str, first_step: int, children: list[Child], directory: Path) -> None:
        self.name = name
        self.first_step = first_step
        self.children = children
        self.steps: list[list[Step]] = [[] for _ in children]
        """By rank."""
        self._files = [directory / f"{name}-{rank}.jsonl" for rank in range(len(children))]
        self._read = [0] * len(children)

    def follow(self) -> None:
        """Reads on what the ranks have written; half a line is left for the next time."""
        for rank, path in enumerate(self._files):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[rank] += len(whole) + 1
                self.steps[rank] += [Step(**json.loads(line)) for line in whole.splitlines()]

    @property
    def done(self) -> int:
        """Steps that every rank has done."""
        self.follow()
        return min(len(steps) for steps in self.steps)

    @property
    def version(self) -> int:
        """Placement version after the newest step that every rank has done."""
        return min((steps[self.done - 1].version for steps in self.steps), default=0) if self.done else 0
