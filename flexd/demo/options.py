"""Options of ``flexd demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexd.core.errors import ConfigError
from flexd.stream.sample_kinds import SampleKind, SampleLengths

LEAST_BATCH_SIZE = 2
"""The model tells a sample's next item from those of the others."""


@dataclass(frozen=True)
class DemoOptions:
    """``flexd demo --help`` explains each; ``replica_budget`` is a fraction of all rows, per rank. Without a
    batch size, it is what the trace has samples for. ``link_mbit`` of 0 emulates no link.

    Raises:
        ConfigError: a value is out of range, or two options contradict each other.
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

    def __post_init__(self) -> None:
        checks: dict[str, tuple[float, float, float]] = {
            "--nodes": (self.nodes, 1, 16),
            "--local-ranks": (self.local_ranks, 1, 16),
            "--steps": (self.steps, 20, 1_000_000),
            "--micro-batches": (self.micro_batches, 1, 64),
            "--replica-budget": (self.replica_budget, 0.0, 1.0),
            "--link-mbit": (self.link_mbit, 0.0, 1e6),
        }
        if self.batch_size is not None:
            checks["--batch-size"] = (self.batch_size, LEAST_BATCH_SIZE, 65_536)
        for name, (value, lowest, highest) in checks.items():
            if not lowest <= value <= highest:
                raise ConfigError(f"{name} {value}", remedy=f"{lowest} to {highest}")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"--dtype {self.dtype}", remedy="float32 or float64")
        if self.tap and self.kafka is not None:
            raise ConfigError(
                "--tap with --kafka", remedy="ranks that count their look-ups need no broker: give one of the two"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks

    @property
    def has_link(self) -> bool:
        """True if the link between nodes is emulated, and other strategies are trained beside the plans."""
        return self.link_mbit > 0 and self.nodes > 1
