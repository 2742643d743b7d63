"""Read a Kafka topic in a consumer group, from positions that the caller keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka import KafkaConsumer
from kafka.consumer.subscription_state import AsyncConsumerRebalanceListener
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    LogTruncationError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
)
from kafka.structs import OffsetAndMetadata, TopicPartition

from flexd.stream.kafka.bounded_fetcher import BatchLimits, EmptyOffsets, Item, bounded_consumer, check_client
from flexd.stream.kafka.sink import Connector, checked_options
from flexd.stream.types import Losses, OffsetsInWork, Positions, RefusedMessages, Source, StreamMessage

if TYPE_CHECKING:
    from flexd.config.sections import KafkaSourceConfig


_log = logging.getLogger(__name__)

# Offsets missing for so long are taken to hold no message.
GAP_SECONDS = 0.25
# After so many lasting gaps a partition is known to have them (compaction), and no gap delays it.
TRUSTED_GAPS = 8


class GroupPositions:
    """Positions by partition name (``topic/number``). Belongs to the polling thread, except ``next``.

    Args:
        name: of the source, for messages.
        clock: monotonic seconds.

    Attributes:
        next: offset of the next message of each partition, and None for the beginning. Any thread may read it.
        losses: messages known to have existed between a lost position and the first message read after it, and
            positions that the broker no longer had.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self.next: Positions = {}
        self._lost_at: Positions = {}
        self._clock = clock
        # By partition: the first missing offset, and when it was first seen missing.
        self._gaps: dict[str, tuple[int, float]] = {}
        self._lasting_gaps: Counter[str] = Counter()
        self.losses = Losses()

    def restore(self, positions: Mapping[str, int]) -> None:
        """Replace all positions."""
        self.next, self._lost_at, self._gaps = dict(positions), {}, {}

    def count_to_gap(self, key: str, offsets: Sequence[int]) -> int:
        """Count the fetched messages that can be delivered now; the others must be fetched again.

        Kafka leaves offsets out where all of a batch was compacted. A broker that shows a message before one with a
        lower offset (tansu 0.6 does, with several producers) looks the same, and the message with the lower offset
        would be lost for good. So missing offsets are fetched again for ``GAP_SECONDS``.

        Args:
            offsets: rising, none below the position.
        """
        expected = self.next.get(key, offsets[0])
        count, gap = 0, self._gaps.pop(key, None)
        if offsets[-1] - expected == len(offsets) - 1 or self._lasting_gaps[key] >= TRUSTED_GAPS:
            return len(offsets)
        for offset in offsets:
            if offset != expected:
                break
            count, expected = count + 1, expected + 1
        since = self._clock() if gap is None or gap[0] != expected else gap[1]
        if self._clock() - since < GAP_SECONDS:
            self._gaps[key] = (expected, since)
            return count
        self._lasting_gaps[key] += 1
        log = _log.info if self._lasting_gaps[key] == 1 else _log.debug
        log("%s: %s: no messages at offsets %d to %d", self._name, key, expected, offsets[count] - 1)
        # A further gap behind this one is examined once its first offset is the expected one.
        behind = offsets[count]
        return count + next(
            (n for n, offset in enumerate(offsets[count:]) if offset != behind + n), len(offsets) - count
        )

    def accept(self, key: str, first_offset: int, last_offset: int) -> None:
        """Move the position past delivered messages."""
        position = self.next.get(key, 0)
        if last_offset >= position:
            lost_at = self._lost_at.pop(key, None)
            if lost_at is not None:
                self.losses.add(key, lost_at, max(first_offset, position), "retention")
            self.next[key] = last_offset + 1

    def lose(self, keys: Iterable[str], reason: str, cause: str) -> None:
        """Drop positions that the broker no longer has: reading continues at the earliest messages.

        Args:
            reason: one of ``POSITION_REASONS``.
        """
        for key in keys:
            self._lost_at[key] = self.next.pop(key, 0)
            self.losses.add_position(reason)
            _log.warning("%s: position %d of %s is lost: %s", self._name, self._lost_at[key], key, cause)


_CLOSE_SECONDS = 5.0
# Time without messages after which a source sends a request, to tell a quiet topic from a dead broker.
SILENT_SECONDS = 2.0
# Deadline of the answer. A broker answers the requests of a connection in order, so it comes after that of the fetch
# before it, which the broker holds back for half a second when nothing is new.
ANSWER_SECONDS = 3.0
# Time between two looks at what the group has assigned.
ASSIGNMENT_SECONDS = 1.0


class KafkaSource(Source):
    """Read a topic in a consumer group. See ``Source`` for the contract; partitions are named ``topic/number``.

    The broker never decides the positions: a newly assigned partition starts at its restored position, at the position
    already reached here, or at the earliest message. So a lost commit or a rebalance repeats nothing.

    With a ``share`` below 1 only some partitions are read (``sampled_partitions``); the others are assigned and paused.
    What another member of the group is assigned is not read here: it is named in ``missing_partitions``.

    A position is lost if the broker reports so (retention, truncation), or if in a silence the partition ends before it
    by two answers and by the high-water mark of the fetches (a broker that lost its log). The earliest message is next
    then. All positions are lost if the topic was deleted and created anew: brokers since 2.8 give it a new id, which is
    saved among the positions.

    While the broker cannot be reached, ``poll`` returns nothing, and ``problem`` is set after about five seconds. A
    poll of a silent topic may take ``ANSWER_SECONDS`` longer than its deadline.

    Batches are read within bounds (``BatchLimits``); what exceeds them is returned as ``RefusedMessages`` in its place.
    Messages of aborted transactions are not returned, those of open ones are once they are committed.

    Args:
        config: the topic, and how it is read.
        job: name of the job; jobs on one topic read different samples of it.
        limits: of what is read.
        work: records the batch that is being read.

    Raises:
        ConfigError: a client option file cannot be read.
        StreamError: ``client_options`` sets an option that is reserved for flexd, or the installed kafka-python cannot
            be bounded.
    """

    def __init__(
        self,
        config: KafkaSourceConfig,
        *,
        job: str = "",
        limits: BatchLimits | None = None,
        work: OffsetsInWork | None = None,
    ) -> None:
        check_client()
        self._config = config
        self._job = job
        self._limits = limits or BatchLimits()
        self._work = work or OffsetsInWork()
        self.read_share = config.share
        self._unread: frozenset[TopicPartition] = frozenset()
        self._name = f"Kafka topic {config.topic!r} at {config.bootstrap_servers}"
        session_ms = int(config.session_timeout_seconds * 1000)
        self._options: dict[str, Any] = {
            "bootstrap_servers": [server.strip() for server in config.bootstrap_servers.split(",")],
            "group_id": config.group_id,
            "enable_auto_commit": False,
            # A reset is counted: the client must raise instead.
            "auto_offset_reset": "none",
            "allow_auto_create_topics": False,
            "bootstrap_timeout_ms": int(config.connect_timeout_seconds * 1000),
            "session_timeout_ms": session_ms,
            "heartbeat_interval_ms": max(session_ms // 3, 1),
            "fetch_max_bytes": self._limits.max_poll_bytes,
            "max_partition_fetch_bytes": self._limits.max_poll_bytes // 2,
            "receive_message_max_bytes": 128 * 2**20,
            "metadata_max_age_ms": 10_000,
            "reconnect_backoff_max_ms": 2_000,
            "metrics_enabled": False,
            **checked_options(config.resolved_client_options()),
        }
        self._connector: Connector[KafkaConsumer] = Connector(
            self._name, self._connect, _disconnect, timeout_seconds=config.connect_timeout_seconds
        )
        self._positions = GroupPositions(self._name)
        # Partitions that ended before their positions at the last probe. A new leader may know the end late, a mark may
        # be from before a seek, and tansu 0.6 takes the first message of the last batch for the end.
        self._ends_before: set[TopicPartition] = set()
        # Of the topic that the positions belong to; None until a broker tells it.
        self._topic_id: uuid.UUID | None = None
        self._last_answer = self._probed_at = self._assignment_at = time.monotonic()
        self._problem: str | None = None
        self._commit_problem: str | None = None

    @property
    def problem(self) -> str | None:
        return self._connector.problem or self._problem or self._commit_problem

    def losses(self) -> Losses:
        return self._positions.losses

    def poll(self, timeout_seconds: float) -> list[StreamMessage | RefusedMessages]:
        deadline = time.monotonic() + timeout_seconds
        consumer = self._connector.get(timeout_seconds)
        if consumer is None:
            return []
        self._probe_if_silent(consumer)
        try:
            records = consumer.poll(
                timeout_ms=max(0, int((deadline - time.monotonic()) * 1000)), max_records=self._limits.max_poll_messages
            )
        except OffsetOutOfRangeError as error:
            self._lose_positions(consumer, error.args[0], "out_of_range", "the broker no longer has it")
            return []
        except LogTruncationError as error:
            self._lose_positions(consumer, error.divergent_offsets, "truncated", "the broker's log was truncated")
            return []
        except NoOffsetForPartitionError:
            self._seek(consumer, consumer.assignment())
            return []
        except (KafkaError, OSError) as error:
            self._problem = f"{self._name}: {type(error).__name__}: {error}"
            time.sleep(max(0.0, min(0.1, deadline - time.monotonic())))
            return []
        if self._is_another_topic(consumer):
            # These messages may have been read at positions of the old one. Also those of a partition that the old one
            # lacked are fetched again.
            self._positions.lose(list(self._positions.next), "recreated", "the topic was deleted and created anew")
            self._seek(consumer, consumer.assignment())
            return []
        messages = [message for part, got in records.items() for message in self._accept(consumer, part, got)]
        if records:
            self._last_answer = time.monotonic()
            self._problem = None
        self._find_missing(consumer)
        return messages

    def restore(self, positions: Mapping[str, int]) -> None:
        consumer = self._connector.client
        # No name of a topic has an at sign.
        ids = [key.partition("@")[2] for key in positions if key.startswith(f"{self._config.topic}@")]
        self._topic_id = uuid.UUID(ids[0]) if ids else None
        self._positions.restore({key: offset for key, offset in positions.items() if "/" in key})
        if consumer is not None:
            self._seek(consumer, consumer.assignment())

    def positions(self) -> Positions:
        known = {} if self._topic_id is None else {f"{self._config.topic}@{self._topic_id}": 0}
        return {**self._positions.next, **known}

    def lag(self) -> int:
        """Sum over the partitions that are read, by the high-water marks of the last fetches: with what waits for an
        open transaction."""
        consumer = self._connector.client
        if consumer is None:
            return 0
        total = 0
        for partition in consumer.assignment() - self._unread:
            highwater = _highwater(consumer, partition)
            if highwater is not None:
                position = self._positions.next.get(self._key(partition))
                total += max(0, highwater - (_beginning(consumer, partition) if position is None else position))
        return total

    def commit(self, positions: Mapping[str, int]) -> str | None:
        consumer = self._connector.client
        if consumer is None:
            return self._connector.problem
        offsets = {
            partition: OffsetAndMetadata(positions[key], "", -1)
            for partition in consumer.assignment()
            if (key := self._key(partition)) in positions
        }
        self._commit_problem = None
        if offsets:
            try:
                consumer.commit(offsets, timeout_ms=int(min(self._config.session_timeout_seconds, 5.0) * 1000))
            except KafkaError as error:
                # Rebalance in progress, session expired, broker away: the next commit covers it.
                self._commit_problem = f"{self._name}: commit failed: {type(error).__name__}: {error}"
        return self._commit_problem

    def close(self) -> None:
        self._connector.close(_CLOSE_SECONDS)

    def _connect(self) -> KafkaConsumer:
        consumer = bounded_consumer(self._options, self._limits, self._work)
        consumer.subscribe([self._config.topic], listener=_Rebalance(self, consumer))
        return consumer

    def _key(self, partition: TopicPartition) -> str:
        return f"{partition.topic}/{partition.partition}"

    def _seek(self, consumer: KafkaConsumer, partitions: Iterable[TopicPartition]) -> None:
        """Seek each partition to its start. Also called on the client's thread: must not wait for the broker."""
        for partition in partitions:
            # A partition that is being revoked may come back later, through the listener.
            with contextlib.suppress(KafkaError, ValueError, KeyError):
                start = self._positions.next.get(self._key(partition))
                if partition in self._unread:
                    # Without a position the client would raise on every poll.
                    consumer.pause(partition)
                    consumer.seek(partition, start or 0)
                elif start is None:
                    consumer.seek_to_beginning(partition)
                else:
                    consumer.seek(partition, start)

    def _choose(self, consumer: KafkaConsumer, assigned: set[TopicPartition]) -> set[TopicPartition]:
        """Choose the partitions to read after an assignment. Return those to seek: ``assigned``, and with a share all,
        because the choice may have changed."""
        if self._config.share >= 1:
            return assigned
        every: set[TopicPartition] = consumer.assignment() | assigned
        numbers = [each.partition for each in every]
        chosen = sampled_partitions(self._job, self._config.topic, numbers, self._config.share)
        self._unread = frozenset(each for each in every if each.partition not in chosen)
        self.read_share = len(chosen) / len(every) if every else self._config.share
        for partition in every - self._unread:
            with contextlib.suppress(KafkaError, ValueError, KeyError):
                consumer.resume(partition)
        return every

    def _accept(
        self, consumer: KafkaConsumer, partition: TopicPartition, items: list[Item]
    ) -> list[StreamMessage | RefusedMessages]:
        key = self._key(partition)
        accepted: list[StreamMessage | RefusedMessages] = []
        at = 0
        while at < len(items):
            # Ranges are accepted one by one, since each has more than one offset.
            end = at + 1
            if isinstance(items[at], StreamMessage):
                while end < len(items) and isinstance(items[end], StreamMessage):
                    end += 1
            run = self._from_position(key, items[at:end])
            count = self._positions.count_to_gap(key, [item.offset for item in run]) if run else 0
            if count:
                self._positions.accept(key, run[0].offset, run[count - 1].last_offset)
                accepted += [item for item in run[:count] if not isinstance(item, EmptyOffsets)]
            if count < len(run):
                self._seek(consumer, [partition])
                break
            at = end
        return accepted

    def _from_position(self, key: str, items: list[Item]) -> list[Item]:
        position = self._positions.next.get(key)
        if position is None or items[0].offset >= position:
            return items
        later = [item for item in items if item.last_offset >= position]
        if later and not isinstance(later[0], StreamMessage) and later[0].offset < position:
            later[0] = dataclasses.replace(later[0], offset=position)
        return later

    def _is_another_topic(self, consumer: KafkaConsumer) -> bool:
        found = consumer._cluster.topic_id(self._config.topic)
        before = self._topic_id
        # Brokers without ids send zeros.
        if not found or not found.int or found == before:
            return False
        self._topic_id = found
        return before is not None

    def _lose_positions(
        self, consumer: KafkaConsumer, lost: Collection[TopicPartition], reason: str, cause: str
    ) -> None:
        self._positions.lose(map(self._key, lost), reason, cause)
        self._seek(consumer, lost)

    def _is_beyond(self, consumer: KafkaConsumer, partition: TopicPartition, end: int) -> bool:
        position, highwater = self._positions.next.get(self._key(partition)), _highwater(consumer, partition)
        return position is not None and highwater is not None and position > max(end, highwater)

    def _find_missing(self, consumer: KafkaConsumer) -> None:
        # The consumer's own method may wait for the broker for ever; this is what it knows of its subscription.
        if time.monotonic() - self._assignment_at < ASSIGNMENT_SECONDS:
            return
        self._assignment_at, now = time.monotonic(), time.time()
        numbers = consumer._cluster.partitions_for_topic(self._config.topic) or ()
        every = {TopicPartition(self._config.topic, number) for number in numbers}
        missing = sorted(every - consumer.assignment())
        before = self.missing_partitions
        self.missing_partitions = {(key := self._key(each)): before.get(key, now) for each in missing}

    def _probe_if_silent(self, consumer: KafkaConsumer) -> None:
        # Ask for the ends of the partitions after a silent while: the client hides that a broker is unreachable, and
        # waits for ever at a position behind the end.
        if time.monotonic() - max(self._last_answer, self._probed_at) < SILENT_SECONDS:
            return
        assignment = sorted(consumer.assignment() - self._unread)
        if not assignment:
            self._problem = (
                f"{self._name}: no partition assigned (topic missing, group joining, or more members than partitions)"
            )
            return
        try:
            ends = consumer.end_offsets(assignment, timeout_ms=int(1000 * ANSWER_SECONDS))
            self._problem, self._last_answer = None, time.monotonic()
            before = {each for each, end in ends.items() if self._is_beyond(consumer, each, end)}
            lost, self._ends_before = before & self._ends_before, before
            if lost:
                self._lose_positions(consumer, lost, "truncated", "the broker's log ends before it")
        except (KafkaError, OSError) as error:
            timed_out = isinstance(error, KafkaTimeoutError)
            reason = f"nothing within {ANSWER_SECONDS:g} s" if timed_out else type(error).__name__
            self._problem = f"{self._name}: broker does not answer ({reason})"
        self._probed_at = time.monotonic()


class _Rebalance(AsyncConsumerRebalanceListener):  # type: ignore[misc]
    """Sets the positions of newly assigned partitions, on the client's own thread."""

    def __init__(self, source: KafkaSource, consumer: KafkaConsumer) -> None:
        self._source = source
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        pass

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._source._seek(self._consumer, self._source._choose(self._consumer, assigned))


def _disconnect(consumer: KafkaConsumer) -> None:
    consumer.close(autocommit=False, timeout_ms=int(_CLOSE_SECONDS * 500))


def _highwater(consumer: KafkaConsumer, partition: TopicPartition) -> int | None:
    # Return the high-water mark, None if the partition is being revoked or has not been fetched yet.
    try:
        highwater: int | None = consumer.highwater(partition)
    except (KafkaError, KeyError):
        return None
    return highwater


def _beginning(consumer: KafkaConsumer, partition: TopicPartition) -> int:
    # Return where the client reads a partition of which nothing was delivered yet; 0 if it does not know.
    try:
        return int(consumer.position(partition, timeout_ms=0) or 0)
    except (KafkaError, KeyError):
        return 0


def sampled_partitions(job: str, topic: str, partitions: Collection[int], share: float) -> frozenset[int]:
    """Return the partitions to read: those of the lowest hashes, ``share`` of all and at least one.

    They are the same at every start. A partition that is added to the topic takes the place of at most one other.
    """
    number = max(1, round(share * len(partitions)))

    def drawn(partition: int) -> bytes:
        return hashlib.blake2b(f"{job}/{topic}/{partition}".encode(), digest_size=8).digest()

    return frozenset(sorted(partitions, key=drawn)[:number])
