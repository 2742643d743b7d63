"""Executions over a real coordinator and journal, for tests with ranks in threads; a throttle that counts chunks."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.api.migration_commands import MigrationCommands
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration import Migration
from flexd.control.daemon.pusher import ChunkLimits, Throttle
from flexd.core.placement import Placement, RankLayout
from flexd.operations.decisions import NAME, DecisionFile, StateDatabase
from flexd.operations.executions import Executions, Trigger, TriggerKind
from flexd.operations.history import MigrationHistory
from flexd.operations.planning import Proposal
from flexd.planner.plan import PlanOrigin
from tests.support.ranks_in_threads import SECRET, TABLES
from tests.support.until import until

LAYOUT = RankLayout(2, 1)
SECONDS = 30.0


class ChunkGate(Throttle):
    """Release at most ``permits`` chunks, so that a migration does not complete before an abort on a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = 1_000_000
        self.unlimited: Callable[[], bool] = lambda: False
        """Lifts the limit from when it returns True."""
        self._open = threading.Event()
        self._open.set()
        self._pusher_waits = threading.Event()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the pusher before its next chunk: no migration begins, ends or is superseded meanwhile."""
        self._pusher_waits.clear()
        self._open.clear()
        assert self._pusher_waits.wait(SECONDS)
        try:
            yield
        finally:
            self._open.set()

    def release(self, row_bytes: npt.NDArray, outstanding_bytes: int, *, settled: bool = True) -> int:  # type: ignore[type-arg]
        if not self._open.is_set():
            self._pusher_waits.set()
            assert self._open.wait(SECONDS)
        if not self.unlimited():
            if self.permits == 0:
                return 0
            self.permits -= 1
        return super().release(row_bytes, outstanding_bytes, settled=settled)


class ExecutionsHarness:
    """Executions over a coordinator, with ranks in threads; plans are made of placements alone."""

    def __init__(self, directory: Path, port: int = 0, timeout_seconds: float = 4.0) -> None:
        self.gate = ChunkGate()
        self.file = StateDatabase(directory / NAME)
        self.history = MigrationHistory(self.file, 100)
        self.journal = PlacementJournal(directory / "placement")
        options = ControlOptions(
            "job", listen_port=port, secret=SECRET, timeout_seconds=timeout_seconds, tick_seconds=0.005,
            chunks=ChunkLimits(window=1, rows=10, bytes=2**30),
        )  # fmt: skip
        self.coordinator = Coordinator(options, TABLES, self.journal, throttle=self.gate)
        self.coordinator.start()
        self.decisions = DecisionFile(self.file)
        self.executions = Executions(TABLES, self.coordinator, self.history, self.decisions)
        self.record_manual_plan: list[bool] = []
        auto: Any = SimpleNamespace(
            verifier=None, record_manual_plan=lambda executed: self.record_manual_plan.append(executed)
        )
        self.stopping = threading.Event()
        self.commands = MigrationCommands(
            self.executions, self.history, self.coordinator, auto, self.stopping, self.decisions,
        )  # fmt: skip

        self._ended = threading.Event()
        self._recorder = threading.Thread(target=self._record, daemon=True)
        self._recorder.start()

    def _record(self) -> None:
        """Take the place of the daemon's loop."""
        ended = False
        while not ended:
            ended = self._ended.wait(0.002)
            for event in iter(self.coordinator.next_event, None):
                self.history.record_migration(event.migration.record)
                self.executions.on_migration(event)
            self.history.write()

    def stop(self) -> None:
        self.coordinator.stop(15)
        self._ended.set()
        self._recorder.join(15)
        self.journal.close()
        self.history.write()
        self.file.close()

    def ready(self) -> bool:
        live = self.coordinator.live()
        return live is not None and live.ready

    def start(self, name: str, wanted: Placement, requested_by: str = "ada") -> Migration:
        now = self.coordinator.placement()
        wanted = replace(wanted, version=now.version)
        delta = now.delta_to(wanted)
        plan: Any = SimpleNamespace(
            plan_id=name, origin=PlanOrigin(name, "before", 1, "", 1.0), target=wanted, gains=np.ones(len(wanted)),
            delta=delta, row_bytes=np.zeros(len(delta), np.int64), migration_bytes=0, saved_seconds=0.002,
            promotions=len(wanted), demotions=0, costs=SimpleNamespace(messages=list),
        )  # fmt: skip
        trigger = Trigger(TriggerKind.MANUAL, f"reason of {name}", requested_by)
        return self.executions.start(Proposal(plan, now, (), trigger).record(trigger), wanted, plan)

    def wait_until_some_applied(self, migration: Migration) -> None:
        until(lambda: migration.record.chunks_applied > 3, SECONDS)

    def states(self, migration_id: str) -> list[str]:
        return [each.after.name for each in self.commands.migration(migration_id).transitions]
