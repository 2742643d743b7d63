"""Words of the reports of ranks: the parts of a training step, and why a rank uses its exchange."""

from enum import StrEnum


class ExchangeReason(StrEnum):
    """Why a rank uses its exchange.

    Attributes:
        CONFIGURED: the trainer names it.
        START: ``auto``, before prices or measurements.
        PRICED: ``auto``: the daemon prices it lower.
        MEASURED: ``auto``: its steps took less time.
        TRIAL: ``auto``: its steps are being measured.
    """

    CONFIGURED = "configured"
    START = "start"
    PRICED = "priced"
    MEASURED = "measured"
    TRIAL = "trial"


class StepPhase(StrEnum):
    """The parts of a training step, in the order in which a report lists them.

    Attributes:
        IDS: finding where the rows of a look-up are: ids to the ranks that hold them.
        ROWS: row values on their way back.
        DENSE: everything outside flexd: forward and backward pass of the dense model, loading batches.
        PUSH: gradients on their way to the rows.
        SYNC: agreement on touched replicas, and the sums of their gradients.
        UPDATE: the optimizer's update of the rows.
        APPLY: applying chunks of migrations.
    """

    IDS = "ids"
    ROWS = "rows"
    DENSE = "dense"
    PUSH = "push"
    SYNC = "sync"
    UPDATE = "update"
    APPLY = "apply"
