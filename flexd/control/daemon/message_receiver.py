"""Receiving of the ranks' messages: parsed, checked, and refused by kind if they are not in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from flexd.control.daemon.epoch import Epoch, EpochFailedError
from flexd.control.daemon.membership import Membership
from flexd.control.daemon.rank_channels import RankChannels, Received
from flexd.control.protocol.bodies import Bytes
from flexd.control.protocol.messages import (
    EpochMessage,
    Hello,
    HelloRefused,
    MalformedReportError,
    TableList,
    decode,
)
from flexd.core.errors import ControlError, StaleMessageError, TopologyError, UnknownMessageError
from flexd.core.fault_points import fault_point
from flexd.core.log_fields import is_power_of_two

REFUSED_KINDS = ("stale", "malformed", "identity", "unknown")
"""stale: of another attempt, generation, epoch or connection. malformed: no message that belongs here, or one whose
report is not in order. identity: of a rank that contradicts the daemon or its peers. unknown: of a kind that a newer
version may have; ignored."""


class MessageReceiver:
    """Checks and dispatches messages of ranks; belongs to the coordinator's thread.

    Args:
        members: registers the ranks whose hello is in order.
        on_event: called with (name, fields) of each log line.

    Attributes:
        refused: number of refused messages by kind, see ``REFUSED_KINDS``.
        malformed_reports: number of refused reports by the field that was not in order.
    """

    def __init__(
        self, channels: RankChannels, instance: str, members: Membership, on_event: Callable[..., None]
    ) -> None:
        self._channels = channels
        self._instance = instance
        self._members = members
        self._event = on_event
        self.refused: Counter[str] = Counter()
        self.malformed_reports: Counter[str] = Counter()

    def receive(
        self,
        received: Received,
        now: float,
        epoch: Epoch | None = None,
        act: Callable[[Epoch, int, EpochMessage, Bytes], None] | None = None,
    ) -> None:
        """Check one message and pass those of the epoch to ``act``, with their rank. A bad one is only counted, and of
        one with a bad report the rest acts.

        Raises:
            EpochFailedError: the message is in order, but ends the epoch.
        """
        malformed: MalformedReportError | None = None
        try:
            try:
                message = decode(received.message)
            except MalformedReportError as error:
                message, malformed = error.rest, error
            if isinstance(message, Hello):
                self._receive_hello(received.peer, message, now)
            elif isinstance(message, TableList):
                self._members.tables.record_tables(message, received.body)
            elif isinstance(message, EpochMessage):
                if epoch is None or act is None:
                    raise StaleMessageError(f"a {message.kind} message outside of any epoch")
                rank = epoch.rank_of(message, received.peer)
                if malformed is not None:
                    self._refuse_report(rank, malformed)
                # A message that ``act`` refuses is no sign of life.
                act(epoch, rank, message, received.body)
                self._members.mark_heard(message.fence.attempt, rank, now)
            else:
                raise ControlError(f"a {message.kind} message from a rank")
        except EpochFailedError:
            raise
        except StaleMessageError:
            self._refuse("stale")
        except UnknownMessageError:
            self._refuse("unknown")
        except ControlError:
            self._refuse("malformed")

    def _receive_hello(self, peer: int, hello: Hello, now: float) -> None:
        if hello.instance != self._instance:
            raise StaleMessageError("a hello to another daemon")
        attempt, rank = hello.identity.attempt, hello.identity.rank
        self._channels.check_sender(peer, hello)
        try:
            if self._members.accept(hello, now):
                fault_point("hello.accepted")
                self._event("rank_hello", attempt=attempt, rank=rank, version=hello.agreed.version)
        except TopologyError as error:
            self._refuse("identity")
            if not self._members.refusal_is_known:  # It registers again every two seconds.
                self._event("rank_refused", attempt=attempt, rank=rank, reason=str(error))
            self._channels.send([peer], HelloRefused(hello.nonce, error.message[:2000], error.remedy))
        else:
            self._channels.register(peer, hello)

    def _refuse(self, kind: str) -> None:
        self.refused[kind] += 1
        # Anyone who can connect can send invalid messages.
        if is_power_of_two(self.refused[kind]):
            self._event("message_refused", kind=kind, count=self.refused[kind])

    def _refuse_report(self, rank: int, error: MalformedReportError) -> None:
        self.refused["malformed"] += 1
        self.malformed_reports[error.field] += 1
        if is_power_of_two(self.malformed_reports[error.field]):
            self._event(
                "report_refused", rank=rank, field=error.field, reason=error.message,
                count=self.malformed_reports[error.field],
            )  # fmt: skip
