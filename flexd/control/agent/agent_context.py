"""What a rank's agent keeps from one connection to the daemon to the next."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.agent.inbox import ChunkInbox
from flexd.control.agent.tap_outbox import TapOutbox
from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.network import new_token
from flexd.control.protocol.report import PendingReports, RankIdentity

PlacementLists = Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]


@dataclass
class AgentContext:
    """State that a rank keeps from one connection to the next. Shared by the agent's callers and its thread.

    Attributes:
        address: host and port of the daemon's control channel; the host is resolved at every connection.
        session: identifies this process; no two launches of a rank have the same.
        sequence: of the newest message sent, in the whole session.
        state: the present activity or problem, in words.
        last_logged: the newest failure, which is not logged twice.
        client: the connection in use, if any.
        lost_at: when the daemon was lost that this rank was connected to; None while there is one.
        warned_of_loss: a warning of it was logged.
    """

    inbox: ChunkInbox
    identity: RankIdentity
    address: tuple[str, int]
    credentials: ChannelCredentials
    timeout_seconds: float
    lists: PlacementLists
    outbox: TapOutbox | None
    reports: PendingReports = field(default_factory=PendingReports)
    stopping: threading.Event = field(default_factory=threading.Event)
    counters: Counter[str] = field(default_factory=Counter)
    session: str = field(default_factory=new_token)
    sequence: int = 0
    state: str = "not started"
    last_logged: str = ""
    client: ChannelClient | None = None
    lost_at: float | None = None
    warned_of_loss: bool = False

    def count(self, what: str, by: int = 1) -> None:
        self.counters[what] += by

    def wake(self) -> None:
        """Make the agent's thread look for something to do. From any thread; never waits."""
        client = self.client
        if client is not None:
            client.wake()
