"""Names of the store's keys, and the hint that ranks poll."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.core.errors import ControlError


@dataclass(frozen=True)
class Hint:
    """The one key that ranks poll: the current epoch, whether to join its group now, and its number of commands.

    It is unsigned: a false hint makes a rank look for messages that it then does not find or does not accept.
    """

    epoch: int = 0
    go: bool = False
    commands: int = 0

    def text(self) -> str:
        return f"{self.epoch}:{int(self.go)}:{self.commands}"

    @staticmethod
    def parse(data: bytes) -> Hint:
        """Raises ControlError."""
        parts = data.split(b":")
        if len(data) > 64 or len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ControlError("the daemon's hint cannot be read")
        return Hint(int(parts[0]), parts[1] != b"0", int(parts[2]))


class Keys:
    """Names of the store's keys, under the job's prefix."""

    HINT = "hint"
    NOTICE = "daemon"
    EPOCH = "epoch"
    INBOUND = "inbound"
    """The queue that all ranks push to."""
    POLLS = "polls"
    """Number of times that the daemon has polled that queue. Ranks read this instead of the queue's length: torch 2.13
    holds the GIL in ``queue_len``, so a stopped daemon would stop the training of a rank that calls it."""

    @staticmethod
    def prefix(job: str) -> str:
        return f"flexd/{job}"

    @staticmethod
    def refused(nonce: str) -> str:
        return f"refused/{nonce}"

    @staticmethod
    def command(epoch: int, command: int) -> str:
        return f"command/{epoch}/{command}"

    @staticmethod
    def group(epoch: int) -> str:
        return f"group/{epoch}"

    @staticmethod
    def taps(epoch: int) -> str:
        """Return the prefix of all tap keys of an epoch."""
        return f"tap/{epoch}/"

    @staticmethod
    def tap_state(epoch: int, rank: int) -> str:
        return f"{Keys.taps(epoch)}{rank}/state"

    @staticmethod
    def tap_piece(epoch: int, rank: int, grant: int, piece: int) -> str:
        return f"{Keys.taps(epoch)}{rank}/{grant}/{piece}"
