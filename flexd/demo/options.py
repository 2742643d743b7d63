"""Options of ``flexd demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexd.stream.sample_kinds import SampleKind, SampleLengths

LEAST_BATCH_SIZE = 2
"""The model tells a sample's next item from those of the others."""


@dataclass(frozen=True)
class DemoOptions:
    """``flexd demo --help`` explains each; ``replica_budget`` is a fraction of all rows, per rank. Without a
    batch size, it is what the trace has samples for. ``link_mbit`` of 0 emulates no link.
    """

    trace: Path | None = None
    nodes: int = 2
    local_ranks: int = 2
    link_mbit: float = 100.0
    steps: int = 300
    micro_batches: int = 1
    kafka: str | None = None
    tap: bool = False
    replica_budget: float = 0.05
    dtype: str = "float64"
    batch_size: int | None = None
    samples: SampleKind = SampleKind.SEQUENCES
    lengths: SampleLengths = SampleLengths.FIXED
    seed: int = 0
    out_dir: Path | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks

    @property
    def has_link(self) -> bool:
        """True if the link between nodes is emulated, and other strategies are trained beside the plans."""
        return self.link_mbit > 0 and self.nodes > 1
