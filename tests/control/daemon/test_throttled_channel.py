"""The throttle with real connections and agents: bytes that each rank applies at each step."""

from __future__ import annotations

import time
from pathlib import Path

from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration_states import MigrationState
from flexd.control.daemon.throttle import Throttle, ThrottleLimits
from flexd.planner.delta import moved_bytes
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks, step_report, target
from tests.support.until import until

LIMIT = 4_096


class MeasuredRanks(Ranks):
    """Apply all agreed chunks at every step, and record the copied bytes of each step."""

    def __init__(self, port: int) -> None:
        self.copied: list[list[int]] = []
        """Copied bytes of each rank, by step."""
        super().__init__(port)

    def _train(self) -> None:
        while not self._stop.is_set():
            announced = [rank.inbox.begin_exchange() for rank in self.ranks]
            for rank in self.ranks:
                rank.inbox.end_exchange(min(announced))
            copied = []
            for rank in self.ranks:
                chunks = rank.inbox.poll_agreed(1 << 40, lambda delta: 8 * len(delta))
                for version, delta in chunks:
                    rank.placement = rank.placement.apply(delta)
                    rank.inbox.applied(version)
                copied.append(sum(int(moved_bytes(delta, TABLES, self.layout).sum()) for _, delta in chunks))
            self.copied.append(copied)
            self.steps += 1
            for rank in self.ranks:
                rank.agent.report(step_report(self.steps, rank.placement))
            time.sleep(0.002)


def test_no_step_copies_more_than_the_limit_until_it_is_lifted(tmp_path: Path) -> None:
    throttle, journal = Throttle(ThrottleLimits(bytes_per_step=LIMIT)), PlacementJournal(tmp_path)
    options = ControlOptions("job", listen_port=0, timeout_seconds=4.0, tick_seconds=0.005, secret=SECRET)
    coordinator = Coordinator(options, TABLES, journal, throttle=throttle)
    coordinator.start()
    planned = target(2, 20_000)
    try:
        with MeasuredRanks(coordinator.port) as ranks:
            migration = coordinator.migrate("p", lambda p: p.delta_to(planned).chunks(500))
            until(lambda: sum(step[0] > 0 for step in ranks.copied) >= 5, what=ranks.state())
            assert migration.state is MigrationState.PUSHING
            assert max(step[0] for step in ranks.copied) <= LIMIT
            throttle.set_limits(ThrottleLimits())
            assert migration.wait(30) is MigrationState.COMMITTED, (migration.record, ranks.state())
            until(lambda: ranks.all_at(planned))
        assert all(len(set(step)) == 1 for step in ranks.copied)
    finally:
        coordinator.stop(15)
        journal.close()
