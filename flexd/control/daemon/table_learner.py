"""The control channel of a daemon that has no tables yet: ranks register, and nothing is pushed to them."""

from __future__ import annotations

import time

from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.channel_types import ChannelOptions
from flexd.control.daemon.coordinator_types import ControlOptions
from flexd.control.daemon.rank_channels import RankChannels, RankDisconnected
from flexd.control.daemon.table_proposals import ProposedTables, TableProposals
from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.messages import DaemonNotice, Hello, HelloRefused, TableList, decode
from flexd.control.protocol.network import new_token
from flexd.control.protocol.rows import Bytes
from flexd.core.errors import FlexdError
from flexd.core.supervision import Supervisor

_MESSAGES_PER_TICK = 4096
_STOP_SECONDS = 2.0


class TableLearner:
    """Receives the tables of the ranks. Belongs to the daemon's loop, which ticks it.

    Raises:
        ControlError: the address cannot be bound.

    Attributes:
        problem: why the tables of the ranks cannot be taken over; ranks are refused with it. Empty if there is none.
    """

    def __init__(self, options: ControlOptions, supervisor: Supervisor) -> None:
        self._options = options
        self._instance = new_token()
        self.problem = ""
        self._proposals = TableProposals(options.timeout_seconds)
        self._server = ChannelServer(
            ChannelOptions(
                options.listen_host,
                options.listen_port,
                timeout_seconds=options.timeout_seconds,
                max_peers=options.max_ranks,
            ),
            ChannelCredentials(options.secret, options.tls),
            supervisor,
        )
        notice = DaemonNotice(options.job, self._instance, "")
        self._channels = RankChannels(self._server, notice, options.timeout_seconds)

    @property
    def port(self) -> int:
        return self._server.port

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """Close all connections; the ranks connect again."""
        self._server.stop(_STOP_SECONDS)

    def tick(self) -> ProposedTables | None:
        """Receive what has arrived. Returns the tables of an attempt whose ranks have all registered."""
        now = time.monotonic()
        for event in self._channels.receive(_MESSAGES_PER_TICK, 0.0):
            if not isinstance(event, RankDisconnected):
                self._receive(event.peer, event.message, event.body, now)
        self._channels.send_heartbeats(now)
        return self._proposals.proposed(now)

    def reason(self) -> str:
        """Return what the daemon waits for, in words."""
        return self.problem or self._proposals.waits_for(time.monotonic())

    def _receive(self, peer: int, data: Bytes, body: Bytes, now: float) -> None:
        try:
            message = decode(bytes(data))
            if isinstance(message, TableList) and message.instance == self._instance:
                self._proposals.record_tables(message, body)
            elif isinstance(message, Hello) and message.instance == self._instance:
                self._receive_hello(peer, message, now)
        except FlexdError:
            return  # A message that cannot be read, as in an epoch.

    def _receive_hello(self, peer: int, hello: Hello, now: float) -> None:
        self._channels.check_sender(peer, hello)
        refusal = self.problem
        if hello.job != self._options.job:
            refusal = f"the daemon serves job {self._options.job!r}, not {hello.job!r}"
        elif not 0 < hello.world_size <= self._options.max_ranks or not 0 <= hello.rank < hello.world_size:
            refusal = (
                f"rank {hello.rank} of {hello.world_size}, and the daemon serves {self._options.max_ranks} at most"
            )
        self._channels.register(peer, hello)
        if not refusal or refusal == self.problem:
            self._proposals.record_hello(hello, now)
        if refusal:
            self._channels.send(
                [peer],
                HelloRefused(
                    self._options.job, self._instance, hello.nonce, refusal[:2000],
                    "correct the daemon's configuration and run flexd reload",
                ),
            )  # fmt: skip
