"""Settings of ``flexd demo``: those of its user, and those of one training of it, which every process reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import TypeAdapter

from flexd.stream.sample_kinds import BatchOptions, SampleKind, SampleLengths

JOB = "flexd-demo"
HISTORY = 32
DIM = 16
LEARNING_RATE = 0.05
CONTENT = "_content"
"""After the name of a trained table: the read-only table of its rows' content vectors."""
CONTENT_DIM = 64
"""Encoders of texts and images give more numbers than a table trains."""
LEAST_BATCH_SIZE = 2
"""The model tells a sample's next item from those of the others."""
SamplesOption = Annotated[
    SampleKind,
    typer.Option(
        "--samples",
        help="How a trace becomes samples: pieces of histories that do not overlap, at most one of a user in a step "
        "(sequences), or a sample for every event, given to the ranks in turn (impressions).",
    ),
]
LengthsOption = Annotated[
    SampleLengths,
    typer.Option(
        "--lengths",
        help="Only samples with a full history (fixed), or samples as long as the histories of their users (real).",
    ),
]


class ExchangeStrategy(StrEnum):
    """Ways in which a training exchanges rows: ``PLANS`` beside a daemon, the others without one."""

    ROW_WISE = "row_wise"
    CHAIN = "chain"
    DEFAULT = "default"
    PLANS = "plans"


@dataclass(frozen=True)
class EmulatedCluster:
    """The cluster that ``flexd demo`` emulates on one machine, with its options on the command line."""

    nodes: Annotated[int, typer.Option("--nodes", help="Emulated nodes.", min=1, max=16)] = 2
    local_ranks: Annotated[int, typer.Option("--local-ranks", help="Ranks in each node.", min=1, max=16)] = 2
    link_mbit: Annotated[
        float,
        typer.Option(
            "--link-mbit",
            help="Emulated link of each node and direction, Mbit/s; 0: none, and no step times of peers.",
            min=0,
            max=1e6,
        ),
    ] = 100.0

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_ranks

    @property
    def has_link(self) -> bool:
        """True if the link between nodes is emulated, and other strategies are trained beside the plans."""
        return self.link_mbit > 0 and self.nodes > 1


@dataclass(frozen=True)
class DemoBatches:
    """The batches that ``flexd demo`` trains on, with its options on the command line."""

    steps: Annotated[int, typer.Option("--steps", help="Training steps.", min=20, max=1_000_000)] = 300
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", help="Forward and backward passes of each step.", min=1, max=64)
    ] = 1
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Samples of each rank in a step. [default: 512, or what the trace has]",
            min=LEAST_BATCH_SIZE,
            max=65_536,
        ),
    ] = None
    samples: SamplesOption = SampleKind.SEQUENCES
    lengths: LengthsOption = SampleLengths.FIXED

    def options(self) -> BatchOptions:
        """Return how a trace becomes these batches."""
        return BatchOptions(HISTORY, self.batch_size, self.steps, self.samples, self.lengths, self.micro_batches)


@dataclass(frozen=True)
class DemoOptions:
    """Settings of a demo, with its options on the command line."""

    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.npz",
            exists=True,
            dir_okay=False,
            help="Accesses to train on; default: drifting Zipf.",
        ),
    ] = None
    cluster: EmulatedCluster = EmulatedCluster()
    batches: DemoBatches = DemoBatches()
    kafka: Annotated[
        str | None,
        typer.Option("--kafka", metavar="BOOTSTRAP", help="Stream over this broker (host:port) instead of a file log."),
    ] = None
    tap: Annotated[
        bool,
        typer.Option("--tap", help="Use no log: ranks count their accesses and send the counts."),
    ] = False
    dtype: Annotated[Literal["float64", "float32"], typer.Option("--dtype", help="Type of the rows.")] = "float64"
    seed: Annotated[int, typer.Option("--seed", help="Seed of data and initial rows.")] = 0
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep logs, stream and snapshots in this folder.")
    ] = None

    @property
    def kinds(self) -> tuple[tuple[str, int, str], ...]:
        """End of the name, dim and dtype of trained tables and of those of content vectors."""
        return (("", DIM, self.dtype), (CONTENT, CONTENT_DIM, "float32"))


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
        return self.options.batches.steps

    def save(self) -> None:
        self.file.write_bytes(_SETUP.dump_json(self))

    @staticmethod
    def load(path: Path) -> RunSetup:
        return _SETUP.validate_json(path.read_bytes())


_SETUP = TypeAdapter(RunSetup)
