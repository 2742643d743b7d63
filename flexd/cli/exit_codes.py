"""Exit statuses of the commands."""

from __future__ import annotations

from enum import IntEnum

from flexd.core.errors import ApiError, ConfigError, FlexdError, StateLockedError, StreamError, TopologyError


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    """An error that has no code of its own."""
    USAGE = 2
    """The command line or a configuration value is wrong."""
    UNREACHABLE = 3
    """No daemon answers at the address."""
    REFUSED = 4
    """The daemon answered that it cannot or will not do it, the migration failed, or the stream did not take what was
    to be sent."""
    TIMED_OUT = 5
    """The daemon did not answer, or the migration did not end, within the deadline."""
    STATE_LOCKED = 6
    """Another daemon uses the state directory."""
    FOUND = 7
    """``config diff`` found differences, ``doctor`` faults."""
    INTERRUPTED = 130
    """Control-C."""
    UNREAD = 141
    """The reader of the pipe has gone away, as for any program that SIGPIPE ends (128 + 13)."""


class DaemonUnreachableError(ApiError):
    """Nothing that speaks the admin API is at the address."""


class DaemonRefusedError(ApiError):
    """The daemon answered with an error; ``status`` is the HTTP status."""


class DaemonTimeoutError(ApiError):
    """The daemon took the request but did not answer within the deadline."""


class NotDeliveredError(StreamError):
    """The broker or the file log did not take what a command was to send."""


_CODES: tuple[tuple[type[FlexdError], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (TopologyError, ExitCode.USAGE),
    (DaemonUnreachableError, ExitCode.UNREACHABLE),
    (DaemonRefusedError, ExitCode.REFUSED),
    (DaemonTimeoutError, ExitCode.TIMED_OUT),
    (NotDeliveredError, ExitCode.REFUSED),
    (StateLockedError, ExitCode.STATE_LOCKED),
)


def exit_code_of(error: FlexdError) -> ExitCode:
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
