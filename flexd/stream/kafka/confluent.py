"""The consumer-group source on librdkafka (``pip install flexd[confluent]``): it fetches in threads of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from flexd.core.errors import PositionLostError, StreamError
from flexd.stream.file_log.partition_reader import OnPositionLost
from flexd.stream.kafka.broker_probe import ANSWER_SECONDS, SILENT_SECONDS, BrokerProbe
from flexd.stream.kafka.connector import Connector
from flexd.stream.kafka.group_positions import GroupPositions
from flexd.stream.kafka.handover import Handover, OnPartitions, PositionOf
from flexd.stream.kafka.librdkafka_options import consumer_options
from flexd.stream.kafka.options import ClientOption
from flexd.stream.types import Message, Positions

try:
    from confluent_kafka import (
        OFFSET_BEGINNING,
        OFFSET_END,
        Consumer,
        KafkaError,
        KafkaException,
        TopicPartition,
    )
except ImportError as error:
    raise StreamError(
        f"stream.source.client: confluent: confluent-kafka cannot be imported ({error})",
        remedy="pip install 'flexd[confluent]', or use client: kafka-python",
    ) from error

_log = logging.getLogger(__name__)

_LOST = frozenset((KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION))
_CLOSE_SECONDS = 5.0
_SUSPECT_SECONDS = 1.0
_TAKE_MESSAGES = 256


class ConfluentSource:
    """Reads a topic in a consumer group, as ``flexd.stream.kafka.source.KafkaSource`` does and by the same rules:
    positions are ours, never the broker's; a lost one follows ``on_position_lost``; partitions are
    handed over as ``Handover`` says. See ``Source`` for the contract.

    Args:
        client_options: passed to librdkafka as they are (``security.protocol`` ...), over our defaults.
        max_poll_bytes: what the client may hold fetched and not yet returned.

    Raises:
        StreamError: ``client_options`` sets what is ours to set.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        group_id: str,
        *,
        on_position_lost: OnPositionLost = "earliest",
        connect_timeout_seconds: float = 15.0,
        session_timeout_seconds: float = 10.0,
        client_options: Mapping[str, ClientOption] | None = None,
        max_poll_bytes: int = 32 * 2**20,
        position_of: PositionOf | None = None,
        on_revoked: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
    ) -> None:
        self._topic = topic
        self._name = f"Kafka topic {topic!r} at {bootstrap_servers}"
        self._options: dict[str, Any] = {
            **consumer_options(
                bootstrap_servers,
                group_id,
                client_options,
                session_timeout_seconds=session_timeout_seconds,
                max_poll_bytes=max_poll_bytes,
            ),
            "error_cb": self._note_error,
            "on_commit": self._note_commit,
            "logger": logging.getLogger("flexd.stream.librdkafka"),
        }
        self._connector: Connector[Consumer] = Connector(
            self._name,
            self._connect,
            self._disconnect,
            timeout_seconds=connect_timeout_seconds,
            fatal=(KafkaException, ValueError, TypeError),
        )
        # A rebalance waits inside ``poll`` for the callback itself: there is nothing to time.
        self._handover = Handover(position_of, on_revoked, on_lost, wait_seconds=max(session_timeout_seconds, 5.0))
        self._book = GroupPositions(self._name, on_position_lost)
        self._probe: BrokerProbe[Positions] = BrokerProbe((KafkaException,))
        self._assigned: dict[str, TopicPartition] = {}
        self._stale_highwater: dict[str, int | None] = {}
        self._rewound: set[str] = set()
        """Partitions whose last message is being fetched again."""
        self._verified: Positions = {}
        """Positions whose message before is known to be in the log."""
        self._suspects: dict[str, float] = {}
        """Since when a partition's log seems to end before the position."""
        self._last_answer = time.monotonic()
        self._problem: str | None = None
        self._commit_problem: str | None = None
        self._closed = False
        self.commits_failed = 0

    @property
    def problem(self) -> str | None:
        return self._connector.problem or self._problem or self._handover.problem or self._commit_problem

    @property
    def messages_lost(self) -> int:
        return self._book.messages_lost

    @property
    def positions_lost(self) -> int:
        return self._book.positions_lost

    def poll(self, timeout_seconds: float) -> list[Message]:
        deadline = time.monotonic() + timeout_seconds
        consumer = self._connector.get(timeout_seconds)
        if consumer is None:
            return []
        self._handover.tell()
        keys, answer = self._handover.ask()
        if keys:
            self._book.move(answer)
            self._rewound -= keys
            self._assign(consumer)
        self._probe_if_silent(consumer)
        try:
            # The second call would wait for the full number until the deadline: it asks for one message.
            got = consumer.consume(_TAKE_MESSAGES, 0) or consumer.consume(1, max(0.0, deadline - time.monotonic()))
        except (KafkaException, RuntimeError) as error:
            self._problem = f"{self._name}: {error}"
            time.sleep(max(0.0, min(0.1, deadline - time.monotonic())))
            return []
        messages = self._accept(consumer, got)
        if messages:
            self._last_answer = time.monotonic()
            self._problem = None
        elif not got:
            self._check_highwater(consumer)
        return messages

    def restore(self, positions: Mapping[str, int]) -> None:
        self._book.restore(positions)
        self._rewound, self._verified = set(), {}
        # What a probe learns meanwhile is of the positions before.
        self._last_answer = time.monotonic()
        consumer = self._connector.get(0.0)
        if consumer is not None:
            self._assign(consumer)

    def positions(self) -> Positions:
        return self._book.all()

    def lag(self) -> int:
        """Over the partitions assigned here, from the high-water marks of the last answers."""
        consumer = None if self._closed else self._connector.get(0.0)
        if consumer is None:
            return 0
        highwaters = {key: _highwater(consumer, partition) for key, partition in self._assigned.items()}
        return sum(max(0, end - (self._book.get(key) or 0)) for key, end in highwaters.items() if end is not None)

    def commit(self, positions: Mapping[str, int]) -> str | None:
        """Sends the positions and returns; what became of the last ones is reported by the next call."""
        consumer = self._connector.get(0.0)
        if consumer is None:
            return self._connector.problem
        offsets = [
            TopicPartition(partition.topic, partition.partition, positions[key])
            for key, partition in self._assigned.items()
            if key in positions
        ]
        failed, self._commit_problem = self._commit_problem, None
        if offsets:
            try:
                consumer.commit(offsets=offsets, asynchronous=True)
            except KafkaException as error:
                self.commits_failed += 1
                failed = self._commit_problem = f"{self._name}: commit failed: {error}"
        return failed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handover.announce_revoked(sorted(self._assigned))
            self._handover.tell()
        self._connector.close(_CLOSE_SECONDS)

    def _disconnect(self, consumer: Consumer) -> None:
        # A client must not be closed while another thread is in it. One that came too late is disposed of here too,
        # while the source goes on with another: the probe outlives it.
        self._probe.finish()
        consumer.close()

    def _connect(self) -> Consumer:
        consumer = Consumer(self._options)
        consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost_partitions
        )
        return consumer

    # The client calls these in the polling thread, inside ``consume`` (or ``close``).

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned = {_key(partition): partition for partition in partitions}
        # What was asked of the log before says nothing about where the partitions stand now.
        self._rewound, self._verified = set(), {}
        self._last_answer = time.monotonic()
        self._handover.assigned(sorted(self._assigned))
        self._assign(consumer)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if not self._closed:
            self._handover.announce_revoked([_key(partition) for partition in partitions])
            self._handover.tell()
        self._assigned = {}
        consumer.unassign()

    def _on_lost_partitions(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._handover.announce_lost([_key(partition) for partition in partitions])
        self._assigned = {}
        consumer.unassign()

    def _note_error(self, error: KafkaError) -> None:
        self._problem = f"{self._name}: {error.name()}: {error.str()}"

    def _note_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        if error is not None:
            # Rebalance in progress, session expired, broker away: the next commit covers it.
            self.commits_failed += 1
            self._commit_problem = f"{self._name}: commit failed: {error.name()}: {error.str()}"

    def _assign(self, consumer: Consumer) -> None:
        """Reads every assigned partition from where it belongs, but those whose position has not been told yet.

        The client drops what it had fetched for an earlier assignment.
        """
        self._suspects = {}
        waiting = self._handover.unanswered(self._assigned)
        assignment = []
        for key, partition in self._assigned.items():
            self._stale_highwater[key] = _highwater(consumer, partition)
            if key not in waiting:
                start = self._book.start(key)
                if isinstance(start, int) and start > 0 and key in self._rewound:
                    start -= 1
                offset = start if isinstance(start, int) else OFFSET_END if start == "end" else OFFSET_BEGINNING
                assignment.append(TopicPartition(partition.topic, partition.partition, offset))
        try:
            consumer.assign(assignment)
        except KafkaException as error:
            self._problem = f"{self._name}: {error}"

    def _accept(self, consumer: Consumer, got: list[Any]) -> list[Message]:
        parts: dict[str, list[Any]] = {}
        lost: dict[str, KafkaError] = {}
        for record in got:
            error = record.error()
            key = f"{record.topic()}/{record.partition()}"
            if error is None:
                parts.setdefault(key, []).append(record)
            elif error.code() in _LOST:
                # Without a position it is an answer to the one that was lost before.
                if key in self._assigned and self._book.get(key) is not None:
                    lost[key] = error
            else:
                self._note_error(error)
        messages: list[Message] = []
        skips = False
        unanswered = self._handover.unanswered(parts)
        for key, records in parts.items():
            if key not in self._assigned or key in unanswered:
                continue
            position = self._book.get(key) or 0
            if key in self._rewound and records[0].offset() == position - 1:
                self._rewound.discard(key)
                self._verified[key] = position
            records = [record for record in records if record.offset() >= position]
            taken = self._book.up_to_gap(key, [record.offset() for record in records]) if records else 0
            skips |= taken < len(records)
            if taken:
                self._book.accept(key, records[0].offset(), records[taken - 1].offset())
            messages += [Message(key, record.offset(), record.value() or b"") for record in records[:taken]]
        if lost:
            self._lose(consumer, lost, "the broker no longer has it")
        elif skips:
            self._assign(consumer)
        return messages

    def _lose(self, consumer: Consumer, keys: Mapping[str, object], cause: str, ends: Positions | None = None) -> None:
        try:
            self._book.lose(keys, cause, ends)
        except PositionLostError as error:
            self._problem = error.message
            raise
        self._assign(consumer)

    def _check_highwater(self, consumer: Consumer) -> None:
        """A broker that lost its memory may answer nothing instead of saying so.

        Only marks that came with fetched data count, and only once they have stood for a while: a partition that comes
        back from another member may still show an old one.
        """
        now = time.monotonic()
        ends: Positions = {}
        suspects: dict[str, float] = {}
        unanswered = self._handover.unanswered(self._assigned)
        for key, partition in self._assigned.items():
            highwater, position = _highwater(consumer, partition), self._book.get(key)
            # A mark from before the last assignment says nothing about the position after it.
            if highwater is None or position is None or highwater == self._stale_highwater.get(key):
                continue
            if key not in unanswered and position > highwater:
                suspects[key] = self._suspects.get(key, now)
                if now - suspects[key] >= _SUSPECT_SECONDS:
                    ends[key] = highwater
        self._suspects = suspects
        if ends:
            self._lose(consumer, ends, "the broker's log ends before it", ends)

    def _probe_if_silent(self, consumer: Consumer) -> None:
        outcome = self._probe.take()
        if outcome is not None and outcome.began > self._last_answer:
            if outcome.answer is None:
                self._problem = f"{self._name}: broker does not answer ({_reason(outcome.error)})"
            else:
                self._problem = None
                self._last_answer = time.monotonic()
                for key, end in outcome.answer.items():
                    self._check_end(consumer, key, end)
        if time.monotonic() - self._last_answer < SILENT_SECONDS:
            return
        if self._assigned:
            partitions = sorted(self._assigned.items())
            self._probe.begin(lambda deadline: _ends(consumer, partitions, deadline))
        else:
            self._problem = (
                f"{self._name}: no partition assigned (topic missing, group joining, or more members than partitions)"
            )

    def _check_end(self, consumer: Consumer, key: str, end: int) -> None:
        """Compares the end of the log, as the broker tells it, with the position.

        tansu 0.6 tells the base offset of its last batch plus one, so an end before the position is no proof: the last
        message that was read is fetched again. If it comes, the position stands; if it has not come by the next time,
        the log lost it.
        """
        position = self._book.get(key)
        if position is None or position <= end or position == self._verified.get(key):
            self._rewound.discard(key)
        elif not self._handover.unanswered([key]):
            if key in self._rewound:
                self._rewound.discard(key)
                self._lose(consumer, {key: None}, "the broker's log ends before it", {key: end})
            else:
                self._rewound.add(key)
                self._assign(consumer)


def _key(partition: TopicPartition) -> str:
    return f"{partition.topic}/{partition.partition}"


def _ends(consumer: Consumer, partitions: list[tuple[str, TopicPartition]], deadline: float) -> Positions:
    """Where the broker says that the logs end."""
    return {
        key: consumer.get_watermark_offsets(partition, timeout=max(0.001, deadline - time.monotonic()))[1]
        for key, partition in partitions
    }


def _reason(error: Exception | None) -> str:
    code = error.args[0] if isinstance(error, KafkaException) else None
    if code is not None and code.code() == KafkaError._TIMED_OUT:
        return f"nothing within {ANSWER_SECONDS:g} s"
    return str(code.name() if code is not None else error)


def _highwater(consumer: Consumer, partition: TopicPartition) -> int | None:
    """None if the partition has not been fetched yet."""
    try:
        answer = consumer.get_watermark_offsets(partition, cached=True)
    except (KafkaException, RuntimeError):
        return None
    return answer[1] if answer is not None and answer[1] >= 0 else None
