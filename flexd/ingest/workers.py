"""Threads that count: partitions are dealt to them once and for all, and the reader waits when they fall behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from flexd.ingest.shard import Shard
from flexd.stream.types import Message

MAX_WAITING = 2
"""Lists of messages (one a poll) that a thread may have before it: one to work on while the next is read."""
_CHECK_SECONDS = 1.0


class Workers:
    """Deals messages to one thread a shard. With a single shard the caller's thread counts and there is no other.

    A partition stays with the thread that got its first message, so that its messages are counted in order.
    Belongs to the thread that polls.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._workers = [_Worker(shard, i) for i, shard in enumerate(shards)] if len(shards) > 1 else []
        self._owner: dict[str, int] = {}

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def deal(self, messages: list[Message]) -> None:
        """Hands messages over; waits while a thread has ``MAX_WAITING`` lists of them before it."""
        if not self._workers:
            take = self._shards[0].take
            for message in messages:
                take(message)
            return
        parts: list[list[Message]] = [[] for _ in self._workers]
        for message in messages:
            parts[self._owner_of(message.partition)].append(message)
        for worker, part in zip(self._workers, parts, strict=True):
            if part:
                worker.put(part)

    def settle(self) -> None:
        """Returns when everything dealt has been counted."""
        for worker in self._workers:
            worker.settle()

    def stop(self) -> None:
        """Ends the threads once they have counted what they were dealt."""
        for worker in self._workers:
            worker.stop()

    def _owner_of(self, partition: str) -> int:
        owner = self._owner.get(partition)
        if owner is None:
            partitions = [0] * len(self._workers)
            for other in self._owner.values():
                partitions[other] += 1
            owner = self._owner[partition] = partitions.index(min(partitions))
        return owner


class _Worker:
    """One thread and what waits for it. What ends its thread early is raised in the one that deals."""

    def __init__(self, shard: Shard, number: int) -> None:
        self._shard = shard
        self._waiting: deque[list[Message]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._ending = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"flexd-count-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, messages: list[Message]) -> None:
        with self._changed:
            self._wait_until(lambda: len(self._waiting) < MAX_WAITING)
            self._waiting.append(messages)
            self._changed.notify_all()

    def settle(self) -> None:
        with self._changed:
            self._wait_until(lambda: not self._waiting and not self._busy)

    def stop(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Counting a list always ends, so this does; a dead thread is noticed instead of waited for."""
        while not self._changed.wait_for(lambda: condition() or self._failure is not None, _CHECK_SECONDS):
            if not self._thread.is_alive():
                raise RuntimeError(f"thread {self._thread.name} has ended")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._waiting:
                        if self._ending:
                            return
                        self._changed.wait(_CHECK_SECONDS)
                    messages = self._waiting.popleft()
                    self._busy = True
                    self._changed.notify_all()
                take = self._shard.take
                for message in messages:
                    take(message)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
