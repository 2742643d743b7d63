"""Settings of ``flexd demo``: those of its user, and those of one training of it, which every process reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from flexd.stream.sample_kinds import BatchOptions

JOB = "flexd-demo"
HISTORY = 32
DIM = 16
LEARNING_RATE = 0.05
LEAST_BATCH_SIZE = 2
"""The model tells a sample's next item from those of the others."""
BATCHES = BatchOptions(HISTORY, steps=300)


class ExchangeStrategy(StrEnum):
    """Ways in which a training exchanges rows: ``PLANS`` beside a daemon, the others without one."""

    ROW_WISE = "row_wise"
    CHAIN = "chain"
    DEFAULT = "default"
    PLANS = "plans"


@dataclass(frozen=True)
class EmulatedCluster:
    """Nodes on one machine. ``link_mbit``: of a node in each direction; 0 emulates no link."""

    nodes: int = 2
    local_ranks: int = 2
    link_mbit: float = 100.0

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks

    @property
    def has_link(self) -> bool:
        """True if the link between nodes is emulated, and other strategies are trained beside the plans."""
        return self.link_mbit > 0 and self.nodes > 1


@dataclass(frozen=True)
class DemoOptions:
    """``flexd demo --help`` explains each; ``replica_budget`` is a fraction of all rows, per rank."""

    trace: Path | None = None
    cluster: EmulatedCluster = EmulatedCluster()
    batches: BatchOptions = BATCHES
    kafka: str | None = None
    tap: bool = False
    replica_budget: float = 0.05
    dtype: str = "float64"
    seed: int = 0
    out_dir: Path | None = None


@dataclass(frozen=True)
class RunSetup:
    """One training.

    Attributes:
        options: with the batch size and the number of steps that the trace has samples for.
        trace: file of the accesses.
        directory: of this training's records.
        stream: directory of the file log.
        topic: of a run over a broker.
        store_port: where the ranks meet.
        control: address of the daemon.
    """

    options: DemoOptions
    trace: Path
    directory: Path
    stream: Path
    topic: str
    store_port: int
    control: str
    strategy: ExchangeStrategy = ExchangeStrategy.PLANS

    @property
    def file(self) -> Path:
        return self.directory / "setup.json"

    @property
    def steps(self) -> int:
        return self.options.batches.steps or 0

    def save(self) -> None:
        self.file.write_bytes(_SETUP.dump_json(self))

    @staticmethod
    def load(path: Path) -> RunSetup:
        return _SETUP.validate_json(path.read_bytes())


_SETUP = TypeAdapter(RunSetup)
