"""Executions over a real coordinator and journal, for tests with ranks in threads."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flexd.api.migration_commands import MigrationCommands
from flexd.config.links import ControlConfig
from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.throttle import Throttle
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.operations.decisions import DecisionFile
from flexd.operations.executions import Execution, Executions
from flexd.operations.history.history import MigrationHistory
from flexd.operations.plan_log import PlanLog
from flexd.operations.rollback_recovery import RollbackRecovery
from flexd.operations.triggers import Trigger, TriggerKind
from flexd.planner.solver.limits import SlotBudgets
from tests.support.ranks_in_threads import SECRET, TABLES
from tests.support.until import until

LAYOUT = RankLayout(2, 1)
SECONDS = 30.0


class Setting:
    """Executions over a coordinator, with ranks in threads; plans are made of placements alone."""

    def __init__(self, directory: Path, port: int = 0, throttle: Throttle | None = None) -> None:
        self.history = MigrationHistory(directory / "migrations.sqlite", 100)
        self.history.start()
        self.journal = PlacementJournal(directory / "placement")
        options = ControlOptions(
            "job", listen_port=port, secret=SECRET, timeout_seconds=4.0, tick_seconds=0.005, window_chunks=1
        )
        self.coordinator = Coordinator(
            options, TABLES, self.journal, on_migration=self.history.record_migration, throttle=throttle
        )
        self.coordinator.start()
        self.log = PlanLog(directory / "plans.jsonl")
        self.executions = Executions(
            ControlConfig(chunk_rows=10, chunk_bytes=2**30), TABLES, self.coordinator, self.log
        )
        self.record_manual_plan: list[bool] = []
        auto: Any = SimpleNamespace(record_manual_plan=lambda executed: self.record_manual_plan.append(executed))
        self.stopping = threading.Event()
        self.decisions = DecisionFile(directory / "decisions.json")
        self.late = RollbackRecovery(self.executions, self.log, self.history, self.coordinator, self.decisions)
        self.commands = MigrationCommands(
            self.executions, self.history, self.coordinator, auto, self.stopping, self.late, self.decisions
        )

    def end(self) -> None:
        self.coordinator.stop(15)
        self.journal.close()
        assert self.history.stop(15)

    def ready(self) -> bool:
        live = self.coordinator.live()
        return live is not None and live.ready

    def start(self, name: str, wanted: Placement, who: str = "ada") -> Execution:
        live = self.coordinator.live()
        assert live is not None
        plan: Any = SimpleNamespace(
            plan_id=name, parent_id="before", target=wanted, gains=np.ones(len(wanted)), topology_generation=1,
            budgets=SlotBudgets(TABLES, LAYOUT, live.replica_slots), delta=range(len(wanted)), migration_bytes=0,
            created_unix_seconds=1.0, profile_generation=1, promotions=len(wanted), demotions=0,
            summary=lambda: {"replication": {"words": []}},
        )  # fmt: skip
        return self.executions.start(plan, Trigger(TriggerKind.MANUAL, f"reason of {name}", who), (), live)

    def some_applied(self, execution: Execution) -> None:
        until(lambda: execution.migration.progress.chunks_applied > 3, SECONDS)

    def states(self, migration_id: str) -> list[str]:
        return [each.after for each in self.commands.migration(migration_id).transitions]
