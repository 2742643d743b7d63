"""The control channel of a daemon that has no tables yet: ranks register, and nothing is pushed to them."""

from __future__ import annotations

import time

from flexd.control.daemon.coordinator_types import ControlOptions, channel_server
from flexd.control.daemon.membership import Membership, ProposedTables
from flexd.control.daemon.message_receiver import MessageReceiver
from flexd.control.daemon.rank_channels import RankChannels, RankDisconnected
from flexd.control.protocol.messages import DaemonNotice
from flexd.control.protocol.network import new_token
from flexd.core.supervision import Supervisor

_MESSAGES_PER_TICK = 4096
_STOP_SECONDS = 2.0


class TableLearner:
    """Receives the tables of the ranks. Belongs to the daemon's loop, which ticks it.

    Raises:
        ControlError: the address cannot be bound.

    Attributes:
        members: the ranks, and the tables that they propose. With a ``problem`` they are refused.
    """

    def __init__(self, options: ControlOptions, supervisor: Supervisor) -> None:
        instance = new_token()
        self.members = Membership(options.job, None, options.timeout_seconds, max_ranks=options.max_ranks)
        self._server = channel_server(options, options.listen_port, supervisor)
        notice = DaemonNotice(options.job, instance, "")
        self._channels = RankChannels(self._server, notice, options.timeout_seconds)
        self._messages = MessageReceiver(self._channels, instance, self.members, lambda *_, **__: None)
        self.port = self._server.port

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """Close all connections; the ranks connect again."""
        self._server.stop(_STOP_SECONDS)

    def tick(self) -> ProposedTables | None:
        """Receive what has arrived. Returns the tables of an attempt whose ranks have all registered."""
        now = time.monotonic()
        for event in self._channels.receive(_MESSAGES_PER_TICK, 0.0):
            if isinstance(event, RankDisconnected):
                self.members.mark_disconnected(event.hello, now)
            else:
                self._messages.receive(event, now)
        self.members.expire(now)
        self._channels.send_heartbeats(now)
        return self.members.tables.proposed(now)

    def reason(self) -> str:
        """Return what the daemon waits for, in words."""
        return self.members.problem or self.members.tables.waits_for(time.monotonic())
