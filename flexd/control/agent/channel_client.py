"""The ranks' end of the control channel: one blocking connection to the daemon, used by one thread."""

from __future__ import annotations

from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.frames import Body, Frame


class ChannelClient:
    """A proven connection to the daemon. All but ``wake`` is for one thread.

    Attributes:
        version: of the protocol, agreed with the daemon.
        features: that both ends have.
        local_address: this end's address of the connection.
    """

    version: int
    features: frozenset[str]
    local_address: str

    @staticmethod
    def connect(host: str, port: int, credentials: ChannelCredentials, timeout_seconds: float) -> ChannelClient:
        """Connect and prove.

        Raises:
            ControlError: unreachable, no answer in time, refused because the daemon has too many connections.
            AuthenticationError: the two ends do not have the same secret, or a certificate is not valid.
            IncompatibleError: no common protocol version.
        """
        raise NotImplementedError

    def send(self, message: bytes, body: Body = b"") -> None:
        """Send one frame. Raises ControlError: closed by the daemon, or not sent within ``timeout_seconds``."""
        raise NotImplementedError

    def receive(self, timeout_seconds: float) -> Frame | None:
        """Return the next frame; None after the timeout, or at once after ``wake``.

        Raises:
            ControlError: the connection is closed; the text has the daemon's reason, if it gave one.
            AuthenticationError: a frame is not authentic.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Let the running call of ``receive``, or else the next one, return None at once. From any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection; idempotent. Frames sent before arrive."""
        raise NotImplementedError
