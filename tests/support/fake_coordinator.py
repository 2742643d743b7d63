"""A coordinator without ranks, for the planning of the daemon; the test moves its migrations."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from flexd.control.daemon.channel_events import ChannelCounters
from flexd.control.daemon.epoch_manager import ControlStatus, LiveTopology
from flexd.control.daemon.membership import RankPresence
from flexd.control.daemon.migration import Migration, MigrationEvent, MigrationRecord, TransitionEvent
from flexd.core.placement import Placement, RankLayout
from flexd.planner.plan import Plan


class FakeCoordinator:
    """A coordinator with or without ranks, whose migrations the test executes.

    Args:
        obedient: execute every migration in ``migrate``.
    """

    port = 0
    failure = ""
    divergence = ""
    priced_exchange = ""
    journal = SimpleNamespace(newest_migration=None)

    def __init__(self, *, obedient: bool = False) -> None:
        self.topology: LiveTopology | None = LiveTopology(1, "a", RankLayout(2, 2), (200,), True, "")
        self.now = Placement.empty()
        self.migrations: list[Migration] = []
        self.ended: deque[MigrationEvent] = deque()
        self.on_migration: Callable[[MigrationEvent], None] = self.ended.append
        self.chunk_rows = 16
        self.obedient = obedient

    def listen(self) -> None:
        """Bind no address."""

    def live(self) -> LiveTopology | None:
        return self.topology

    def status(self) -> ControlStatus:
        return ControlStatus(
            epochs=1,
            generation=1,
            presence=RankPresence("a", 4, 4),
            reason="" if self.topology else "no rank is registered",
        )

    def channel_counters(self) -> ChannelCounters:
        return ChannelCounters()

    def placement(self) -> Placement:
        return self.now

    def next_event(self) -> MigrationEvent | None:
        return self.ended.popleft() if self.ended else None

    def migrate(self, record: MigrationRecord, target: Placement, plan: Plan | None = None) -> Migration:
        migration = Migration(record, target, plan)
        self.migrations.append(migration)
        if self.obedient:
            self.execute(migration)
        return migration

    def execute(self, migration: Migration, chunks: int = 1_000, end: TransitionEvent | None = None) -> None:
        """Apply this number of chunks, then end the migration as the coordinator does."""
        migration.start_from(self.now)
        migration.fire(TransitionEvent.START)
        whole = self.now.delta_to(migration.target)
        copied = np.zeros(len(whole) + 1, np.int64)
        copied[-1:] = migration.record.bytes_to_copy
        migration.set_delta(whole, copied)
        for delta in list(whole.chunks(self.chunk_rows))[:chunks]:
            self.now = self.now.apply(delta)
            migration.count(
                chunks_pushed=1, rows_pushed=len(delta), chunks_applied=1, rows_applied=len(delta),
                last_version=self.now.version,
            )  # fmt: skip
        if end is None:
            migration.count(copied_bytes=migration.record.bytes_to_copy)
            migration.fire(TransitionEvent.EXHAUSTED)
            end = TransitionEvent.APPLIED
        migration.fire(end, "" if end is TransitionEvent.APPLIED else "by the test")
        migration.settle()
        self.on_migration(MigrationEvent(migration, None))

    def limit_chunks(self, rows: int, nbytes: int) -> None:
        self.chunk_rows = rows

    def start(self) -> None:
        """Start no thread."""

    def stop(self, timeout_seconds: float) -> bool:
        return True

    def pause(self) -> None:
        """Pause nothing: migrations end before they could be paused."""

    def resume(self) -> None:
        """Resume nothing."""
