"""Exit statuses of the commands."""

from __future__ import annotations

from enum import IntEnum

from flexd.core.errors import (
    ApiError,
    ConfigError,
    FlexdError,
    StateLockedError,
    StateVersionError,
    TopologyError,
    UnusableStateError,
)  # fmt: skip
from flexd.core.supervision import EXIT_UNSAFE_STATE


class ExitCode(IntEnum):
    """Exit status of a command. ``MEANINGS`` explains each in ``flexd --help`` and docs/command-line.md."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    TIMED_OUT = 5
    STATE_LOCKED = 6
    FOUND = 7
    UNSAFE_STATE = EXIT_UNSAFE_STATE
    STATE_UNUSABLE = 9
    INTERRUPTED = 130
    UNREAD = 141
    """128 + SIGPIPE, as for any program that SIGPIPE ends."""


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.FAILED: "an error without a code of its own, or a question answered with no",
    ExitCode.USAGE: "wrong usage or configuration",
    ExitCode.UNREACHABLE: "no daemon at the address",
    ExitCode.REFUSED: "the daemon refused, or the migration failed",
    ExitCode.TIMED_OUT: "a deadline passed",
    ExitCode.STATE_LOCKED: "another daemon uses the state directory",
    ExitCode.FOUND: "doctor found a fault",
    ExitCode.UNSAFE_STATE: "the daemon ended in order because it could not trust its counters; start it again",
    ExitCode.STATE_UNUSABLE: "the saved state cannot be continued from",
    ExitCode.INTERRUPTED: "Control-C",
    ExitCode.UNREAD: "the reader of the output closed the pipe",
}


class DaemonUnreachableError(ApiError):
    """The address has no program with the admin API."""


class DaemonRefusedError(ApiError):
    """The daemon answered with an error; ``status`` is the HTTP status."""


class DaemonTimeoutError(ApiError):
    """The daemon did not respond to a request within the deadline."""


_CODES: tuple[tuple[type[FlexdError], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (TopologyError, ExitCode.USAGE),
    (DaemonUnreachableError, ExitCode.UNREACHABLE),
    (DaemonRefusedError, ExitCode.REFUSED),
    (DaemonTimeoutError, ExitCode.TIMED_OUT),
    (StateLockedError, ExitCode.STATE_LOCKED),
    (UnusableStateError, ExitCode.STATE_UNUSABLE),
    (StateVersionError, ExitCode.STATE_UNUSABLE),
)


def exit_code_of(error: FlexdError) -> ExitCode:
    """Return the exit status of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


_OUTCOMES: dict[str, ExitCode] = {
    "timed_out": ExitCode.TIMED_OUT,
    "failed": ExitCode.REFUSED,
    "aborted": ExitCode.REFUSED,
    "superseded": ExitCode.REFUSED,
    "ended": ExitCode.REFUSED,
    "rollback_failed": ExitCode.REFUSED,
}


def exit_code_of_outcome(outcome: str) -> ExitCode:
    """Return the exit status of a ``ReplanResult`` or an ``AbortResult``."""
    return _OUTCOMES.get(outcome, ExitCode.OK)
