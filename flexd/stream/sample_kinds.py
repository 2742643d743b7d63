"""Ways to make and batch samples; commands have it as options, so no library is imported here."""

from dataclasses import dataclass
from enum import StrEnum


class SampleKind(StrEnum):
    """Ways to make samples and give them to ranks."""

    # Pieces of a history that do not overlap, at most one of a user in a global batch, given to the ranks in turn.
    SEQUENCES = "sequences"
    # A sample for every event, with the history before it; consecutive samples are given to the ranks in turn.
    IMPRESSIONS = "impressions"


class SampleLengths(StrEnum):
    """Events of a sample."""

    # All samples have a full history; shorter ones are left out.
    FIXED = "fixed"
    # Samples are as long as the histories of their users, up to the full length.
    REAL = "real"


@dataclass(frozen=True)
class BatchOptions:
    """Batches of a trace.

    Attributes:
        history: events that a sample looks up, besides the one that it predicts; with real lengths, the most.
        batch_size: samples of a rank and micro-batch; None: as many as the trace has for that many steps, at most 512.
        steps: None: as many as the trace has samples for, none left out between two.
    """

    history: int
    batch_size: int | None = None
    steps: int | None = None
    kind: SampleKind = SampleKind.SEQUENCES
    lengths: SampleLengths = SampleLengths.FIXED
    micro_batches: int = 1
