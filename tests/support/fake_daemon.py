"""A daemon made of plain attributes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from flexd.api.base import ProbeResult
from flexd.api.migration import (
    AbortPreview,
    AbortResult,
    MigrationList,
    ReplanResult,
    RollbackPreview,
    RollbackResult,
    ThrottleStatus,
)
from flexd.api.plan import (
    AccessRange,
    Explanation,
    PlanReport,
    ReplicationReport,
    RowReport,
    ShareRangeReport,
    ThresholdReport,
    UserNodePage,
)
from flexd.api.planning import ProposalList, ProposalReport
from flexd.api.rank import RankPage, RankReport
from flexd.api.routes import Operation
from flexd.api.status import ConfigReport, DaemonStatus, KeyChange, PauseState, ReloadReport
from flexd.api.stream import HotRow, HotRowPage, StreamStatus, TableOrder, TablePage, TableReport
from flexd.api.training import Timeline, TrafficSample
from flexd.control.daemon.migration import (
    ActionRecord,
    GateReport,
    MigrationRecord,
    MigrationState,
    Transition,
    VerificationReport,
)
from flexd.core.errors import ApiError

OK = ProbeResult(ok=True)
RELOADED = ReloadReport(
    file="flexd.yaml", applied=("log.level",), pending=("tables",),
    changes=(
        KeyChange(key="log.level", before="info", after="debug"),
        KeyChange(
            key="tables", before=[{"name": "items", "rows": 100}],
            after=[{"name": "items", "rows": 200}, {"name": "users", "rows": 50}], needs_restart=True,
        ),
    ),
)  # fmt: skip
STATUS = DaemonStatus(job="job", version="1.2.3", started_unix_seconds=1.0, stream=StreamStatus(source="file_log"))

STRANGE = '<img src=x onerror="boom()">'
"""A table may be called anything."""
ENDED = MigrationRecord(
    migration_id="p7", plan_id="p7", parent_plan_id="p6", trigger="drift", requested_by="flexd",
    reason="drift 1.20 > 1.05",
    state="committed", rows=4000, rows_pushed=4000, rows_applied=4000, chunks_pushed=4, chunks_applied=4,
    copied_bytes=2_048_000, pushed_bytes=40_000, base_version=12, last_version=16, created_unix_seconds=1_700_000_000.0,
    started_unix_seconds=1_700_000_000.5, ended_unix_seconds=1_700_000_012.0, settled=True,
    predicted_saving_seconds=2e-3,
    verification=VerificationReport(
        migration_id="p7", state="slower", change=0.015, low=0.004, high=0.026, pairs=12, steps=640,
        message="1.5 % slower (95 % interval +0.4 % to +2.6 %, 12 pairs of blocks)",
    ),
)  # fmt: skip
STOPPED = MigrationRecord(
    migration_id="p8", plan_id="p8", parent_plan_id="p7", trigger="manual", requested_by="ada@host", reason="campaign",
    state="aborted", problem="aborted by ada@host: too slow: stopped at version 18, 2,000 of 9,000 rows applied",
    rows=9000, rows_pushed=2000, rows_applied=2000, chunks_pushed=2, chunks_applied=2, copied_bytes=1_024_000,
    pushed_bytes=20_000, base_version=16, last_version=18, created_unix_seconds=1_700_000_100.0,
    started_unix_seconds=1_700_000_100.0, ended_unix_seconds=1_700_000_103.5, settled=True,
    predicted_saving_seconds=4e-4,
)  # fmt: skip
PAUSED = ActionRecord(unix_seconds=1_700_000_050.0, kind="pause", requested_by="bob@host", reason="maintenance")
FORCED = ActionRecord(
    unix_seconds=1_700_000_060.0, kind="override", requested_by="ada@host", reason="campaign",
    detail="plan p8 in spite of samples",
)  # fmt: skip
KEPT = ProposalReport(
    plan_id="p7", created_unix_seconds=1_700_000_000.0, trigger="drift", reason="drift 1.20 > 1.05 (table items)",
    promotions=3, demotions=1, migration_bytes=4096, saved_seconds=0.001,
)  # fmt: skip
SEEN = ProposalReport(
    plan_id="p6", trigger="manual", reason="dry run", dry_run=True, promotions=2, closed_gates=("samples",),
    outdated="the ranks have changed",
)  # fmt: skip
THROTTLE = ThrottleStatus(bytes_per_step=1 << 20)
USERS = (-4, 1, 5, 8, 9, 40, 2**62)


@dataclass
class FakeDaemon:
    """Set ``error`` to make every verb raise it; ``hold`` keeps ``replan`` waiting until it is set."""

    error: Exception | None = None
    healthy: ProbeResult = OK
    useful: ProbeResult = OK
    outcome: str = "committed"
    paused: bool = False
    calls: list[tuple[object, ...]] = field(default_factory=list)
    hold: threading.Event | None = None
    shown: DaemonStatus = STATUS
    kept_throttle: ThrottleStatus = THROTTLE

    def call(self, route: Operation[Any], **given: Any) -> Any:
        """Call its own method: the parts of a daemon are one here. Recorded with its arguments in their order."""
        name = route.handler.rpartition(".")[2]
        method = getattr(self, name)
        if name != "status":
            self._enter(name, *(given[each] for each in signature(method).parameters if each in given))
        return method(**given)

    def _enter(self, *call: object) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def status(self) -> DaemonStatus:
        """Recorded here, as the metrics page calls it too."""
        self._enter("status")
        return self.shown.model_copy(update={"paused": self.paused})

    def plan(self) -> PlanReport:
        return PlanReport(plan_id="p2", replication=ReplicationReport(messages=("because",)))

    def explain(self, table: str, row: int | None, hottest: int) -> Explanation:
        seconds = {"HOME": 2e-9, "NODE": 1e-9}
        accesses = AccessRange(estimate=3.0)
        rows = (RowReport(row=7 if row is None else row, accesses=accesses, seconds=seconds, planned="NODE"),)
        node = ThresholdReport(tier="NODE", slots=1, slot_seconds=1e-10, promote_accesses=2.0, demote_accesses=1.5)
        return Explanation(table=table, rows=100, thresholds=(node,), explained=rows if hottest or row else ())

    def replan(self, reason: str, wait_seconds: float, *, force: bool = False, requested_by: str = "") -> ReplanResult:
        if self.hold is not None:
            self.hold.wait(20)
        migration = MigrationRecord(migration_id="m1", plan_id="p2", state="committed")
        return ReplanResult(outcome=self.outcome, plan=PlanReport(plan_id="p2"), migration=migration)

    def pause(self, reason: str, requested_by: str = "") -> PauseState:
        changed, self.paused = not self.paused, True
        return PauseState(paused=True, reason=reason, changed=changed)

    def resume(self, reason: str = "", requested_by: str = "") -> PauseState:
        changed, self.paused = self.paused, False
        return PauseState(paused=False, changed=changed)

    def reload(self, reason: str = "", requested_by: str = "") -> ReloadReport:
        return RELOADED

    def preview_reload(self) -> ReloadReport:
        return RELOADED.model_copy(update={"dry_run": True})

    def health(self) -> ProbeResult:
        if self.error is not None:
            raise self.error
        return self.healthy

    def ready(self) -> ProbeResult:
        return self.useful

    def config(self) -> ConfigReport:
        return ConfigReport(version="1.2.3", config={"job": "job", "tables": [{"name": "items", "rows": 100}]})

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        items = TableReport(
            table="items", rows=1000, dim=64, dtype="float32", optimizer="rowwise_adagrad", group=0, accesses=900_000,
            share=0.9, placed_rows={"HOME": 980, "NODE": 15, "DEVICE": 5}, counter="dense", counter_bytes=4000,
            distinct_rows=740.0, coverage=1.0, drift_ratio=1.08,
        )  # fmt: skip
        other = TableReport(
            table=STRANGE, rows=5_000_000, dim=16, dtype="float16", optimizer="sgd", group=1, accesses=100_000,
            share=0.1, placed_rows={"HOME": 5_000_000, "NODE": 0, "DEVICE": 0}, counter="count_min",
            counter_bytes=1_048_576,
        )  # fmt: skip
        return TablePage(total=2, offset=offset, tables=(items, other)[offset : offset + limit])

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        tiers = ("DEVICE", "NODE", "HOME")
        hottest = tuple(
            HotRow(place=i + 1, row=10 * i, key=10 * i, share=0.2 / (i + 1), share_lower=0.19 / (i + 1),
                   share_upper=0.21 / (i + 1), tier=tiers[min(i, 2)], home_rank=10 * i % 4)
            for i in range(12)
        )  # fmt: skip
        return HotRowPage(
            table=table, rows=1000, total=12, offset=offset, weight=900_000.0,
            placed_rows={"HOME": 998, "NODE": 1, "DEVICE": 1}, hottest=hottest[offset : offset + limit],
        )  # fmt: skip

    def ranks(self, offset: int, limit: int) -> RankPage:
        ranks = [
            RankReport(
                rank=rank, node=rank // 2, local_rank=rank % 2, placement_version=7, behind=0, step=120 + rank,
                report_age_seconds=0.5, step_seconds=0.025, accesses_per_step=4096.0, replica_share=0.75,
                intra_node_bytes_per_step=2e6, inter_node_bytes_per_step=1e6 * (rank + 1),
            )
            for rank in range(3)
        ]  # fmt: skip
        return RankPage(
            generation=2, attempt="a1", nodes=2, local_ranks=2, ready=False, problem="3 of 4 ranks are here",
            replica_slots=(512, 64), cluster="azure-a100-200g", placement_version=7, imbalance=1.5, total=4,
            offset=offset, ranks=(*ranks, RankReport(rank=3, node=1, local_rank=1))[offset : offset + limit],
        )  # fmt: skip

    def timeline(self) -> Timeline:
        samples = tuple(
            TrafficSample(
                unix_seconds=1_700_000_000.0 + 5 * i, steps=20, accesses={"HOME": 3000 - 40 * i, "NODE": 20 * i,
                "DEVICE": 20 * i}, inter_node_bytes=4e5 - 6e3 * i,
                all_to_all_inter_node_bytes=4e5 - 8e3 * i, sync_inter_node_bytes=2e3 * i,
                intra_node_bytes=5e5, migration_bytes=1e3, row_wise_inter_node_bytes=1.5e6, step_seconds=0.02,
            )
            for i in range(40)
        )  # fmt: skip
        plan = MigrationRecord(
            migration_id="p1", plan_id="p1", reason=f"drift {STRANGE}", created_unix_seconds=1_700_000_100.0,
            state=MigrationState.COMMITTED,
            promotions=120, demotions=3, rows_applied=123, predicted_saving_seconds=2e-3,
            verification=ENDED.verification,
        )  # fmt: skip
        return Timeline(interval_seconds=5.0, samples=samples, plans=(plan,))

    def migrations(self, limit: int, state: MigrationState | None) -> MigrationList:
        kept = [entry for entry in (STOPPED, ENDED) if state in (None, entry.state)]
        actions = (FORCED, PAUSED) if state is None else ()
        return MigrationList(migrations=tuple(kept[:limit]), actions=actions[:limit])

    def migration(self, migration_id: str) -> MigrationRecord:
        if migration_id not in ("latest", "p8"):
            raise ApiError(f"no migration {migration_id!r} is kept", status=404, remedy="flexd get history shows those")
        submitted = Transition(number=0, unix_seconds=1_700_000_100.0, after="pending", reason="campaign")
        stopped = Transition(
            number=3, unix_seconds=1_700_000_103.5, event="stopped", before="aborting", after="aborted",
            rows_pushed=2000, rows_applied=2000, version=18,
        )  # fmt: skip
        return STOPPED.model_copy(update={"transitions": (submitted, stopped)})

    def preview_abort(self, *, rollback: bool) -> AbortPreview:
        running = MigrationRecord(
            migration_id="p8", plan_id="p8", state="pushing", rows=9000, rows_applied=1000,
            rows_pushed=2000, chunks_pushed=2, chunks_applied=1, base_version=16, last_version=18,
        )  # fmt: skip
        back = RollbackPreview(to_version=16, promotions=300, demotions=1700, bytes=153_600)
        return AbortPreview(migration=running, waiting=("p9",), rollback=back if rollback else None)

    def abort(self, *, rollback: bool, reason: str, wait_seconds: float, requested_by: str) -> AbortResult:
        outcome = self.outcome
        if outcome == "committed":
            outcome = "rolled_back" if rollback else "stopped"
        stopped = MigrationRecord(
            migration_id="p8", plan_id="p8", state="aborted", rows=9000, rows_applied=2000,
            base_version=16, last_version=18,
        )  # fmt: skip
        back = MigrationRecord(migration_id="p8.rollback", plan_id="p8.rollback", state="committed")
        return AbortResult(
            outcome=outcome, migration=stopped, rollback=back if rollback else None, placement_version=18,
            message="migration p8 is aborted: 2,000 of 9,000 rows applied, placement version 18",
        )  # fmt: skip

    def preview_rollback(self, *, migration_id: str, to_version: int | None) -> RollbackPreview:
        return RollbackPreview(to_version=to_version or 16, demotions=9000, takes_back=(migration_id,))

    def rollback(
        self, *, migration_id: str, to_version: int | None, reason: str, wait_seconds: float, requested_by: str
    ) -> RollbackResult:
        back = MigrationRecord(migration_id="p8.rollback", plan_id="p8.rollback", state="committed")
        outcome = "rolled_back" if self.outcome == "committed" else "timed_out"
        return RollbackResult(outcome=outcome, migration=back, takes_back=("p8",), placement_version=18)

    def proposals(self) -> ProposalList:
        return ProposalList(proposals=(KEPT, SEEN))

    def proposal(self, plan_id: str) -> PlanReport:
        if plan_id not in ("latest", "p7"):
            raise ApiError(f"no proposal {plan_id!r}", status=404, remedy="proposals: p6, p7")
        gate = GateReport(
            gate="samples", key="planner.min_samples", measured=10, required=20, open=False, message="thin"
        )
        return PlanReport(plan_id="p7", trigger="drift", requested_by="flexd", gates=(gate,))

    def apply(self, plan_id: str, reason: str, wait_seconds: float, *, force: bool, requested_by: str) -> ReplanResult:
        return ReplanResult(outcome=self.outcome, plan=self.proposal(plan_id))

    def user_nodes(self, offset: int, limit: int) -> UserNodePage:
        """Return three users at most."""
        page = slice(offset, offset + min(limit, 3))
        return UserNodePage(
            learnt=1, nodes=2, users=7, ids=USERS[page], nodes_of=tuple(user % 2 for user in USERS[page]),
            by_user=ShareRangeReport(expected=0.9, low=0.8, high=1.0),
        )  # fmt: skip

    def throttle(self) -> ThrottleStatus:
        return self.kept_throttle

    def set_throttle(
        self, bytes_per_step: int | None, bytes_per_second: int | None, *, reason: str = "", requested_by: str = ""
    ) -> ThrottleStatus:
        asked = {"bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second}
        changes = {name: value or None for name, value in asked.items() if value is not None}
        self.kept_throttle = self.kept_throttle.model_copy(update=changes)
        return self.kept_throttle
