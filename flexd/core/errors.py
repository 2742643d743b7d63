"""The exception hierarchy of flexd. An error states what was wrong, where, and what to do about it."""


class FlexdError(Exception):
    """Base of all flexd errors.

    Args:
        message: what was wrong and where (names the table, row, file, rank, key path ...).
        remedy: an action for the reader; appended to the text after a dash.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message} - {remedy}" if remedy else message)


class ConfigError(FlexdError):
    """A configuration value is missing, malformed or contradicts another."""


class MissingExtraError(ConfigError, ImportError):
    """A package of an optional extra is not installed."""


class StreamError(FlexdError):
    """A stream source or publisher cannot fulfil a request (unreachable broker, corrupt segment)."""


class CodecError(StreamError):
    """One message cannot be decoded. ``reason`` is a bounded label for metrics."""

    def __init__(self, message: str, *, reason: str, remedy: str = "") -> None:
        self.reason = reason
        super().__init__(message, remedy=remedy)


class SketchError(FlexdError):
    """Values do not fit a sketch, or two sketches cannot be merged."""


class SnapshotError(FlexdError):
    """A snapshot or journal is corrupt, of another format, or cannot be written."""


class StateVersionError(SnapshotError, SketchError):
    """A file of the state directory was written by a newer flexd."""


class UnusableStateError(SnapshotError):
    """The state directory has state that this daemon cannot continue from, and it may not start without it."""


class StateLockedError(SnapshotError):
    """Another daemon uses the state directory."""


class TopologyError(FlexdError):
    """The cluster description is malformed or contradicts the live ranks."""


class PlanError(FlexdError):
    """No plan can be made from the input."""


class PlacementError(FlexdError):
    """A delta or chunk does not fit the placement it is applied to."""


class ControlError(FlexdError):
    """The control channel failed: unreachable peer, broken epoch, deadline passed."""


class AuthenticationError(ControlError):
    """A control message is not signed with the shared secret."""


class IncompatibleError(ControlError):
    """Daemon and trainer have no common version of the control protocol."""


class UnknownMessageError(ControlError):
    """A control message is authentic, but of a kind that this version does not know. It is ignored and counted."""


class StaleMessageError(ControlError):
    """A control message belongs to another job attempt, topology generation or epoch."""


class IllegalTransitionError(ControlError):
    """The state table of a migration has no such transition: a fault of flexd."""


class ChunkRefusedError(PlacementError):
    """A rank refused a whole chunk; the placement is unchanged. ``version`` is the chunk's, 0 if not known."""

    def __init__(self, message: str, *, remedy: str = "", version: int = 0) -> None:
        self.version = version
        super().__init__(message, remedy=remedy)


class EmbeddingError(FlexdError):
    """The trainer passed input that cannot be looked up or trained: row out of range, wrong dtype, unknown feature."""


class CheckpointError(EmbeddingError):
    """A checkpoint is incomplete, or of other tables than the collection it is loaded into."""


class SlowMemoryError(EmbeddingError):
    """Rows cannot be read from slow memory or written to it (disk full, file cut, removed or damaged)."""


class CollectiveError(FlexdError, RuntimeError):
    """A collective among the training ranks failed or passed its deadline. Also a RuntimeError, as in torch."""


class ApiError(FlexdError):
    """The admin API refused a request or cannot be reached. ``status`` is the HTTP status, 0 if none."""

    def __init__(self, message: str, *, status: int = 0, remedy: str = "") -> None:
        self.status = status
        super().__init__(message, remedy=remedy)


def first_line(error: BaseException) -> str:
    """Return the first line of an error: some libraries append stack traces to theirs."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def named_error(error: BaseException) -> str:
    """Return the type and the first line of an error; at most 600 characters."""
    line = first_line(error) if str(error) else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
