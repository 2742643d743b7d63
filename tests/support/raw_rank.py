"""A connection with the secret and no rank behind it, which sends what a test wants."""

from __future__ import annotations

from types import TracebackType

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.protocol.messages import ControlMessage, DaemonNotice, decode, encode
from flexd.control.protocol.network import ChannelCredentials
from flexd.core.secrets import Secret
from tests.support.ranks_in_threads import SECRET


class RawRank:
    """A proven connection to a daemon; ``notice`` is the daemon's first message."""

    def __init__(self, port: int, secret: Secret = SECRET, timeout_seconds: float = 30.0) -> None:
        self._timeout = timeout_seconds
        self.client = ChannelClient.connect("127.0.0.1", port, ChannelCredentials(secret), timeout_seconds)
        frame = self.client.receive(timeout_seconds)
        assert frame is not None, "no notice"
        notice = decode(frame.message)
        assert isinstance(notice, DaemonNotice)
        self.notice = notice

    def __enter__(self) -> RawRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def send(self, message: ControlMessage | bytes, body: bytes = b"") -> None:
        self.client.send(message if isinstance(message, bytes) else encode(message), body)

    def receive(self) -> ControlMessage:
        frame = self.client.receive(self._timeout)
        assert frame is not None, "no message"
        return decode(frame.message)
