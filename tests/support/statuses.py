"""Complete statuses of a daemon in typical conditions, without times that change."""

from flexd.api.plan import PlanReport
from flexd.api.planning import DriftStatus, PlacementStatus
from flexd.api.rank import TopologyStatus
from flexd.api.status import DaemonStatus, SnapshotStatus
from flexd.api.stream import ProfileStatus, SketchStatus, StreamStatus, TableSketchStatus
from flexd.api.training import IdsStatus, IdsTableStatus, SlowMemoryStatus, SlowTableStatus
from flexd.control.daemon.migration import MigrationRecord, MigrationState
from flexd.core.stream_ids import IdsOfStream

_PLAN = PlanReport(plan_id="p7", reason="drift", promotions=1200, demotions=300)
_COMMITTED = MigrationRecord(
    migration_id="m7", plan_id="p7", trigger="drift", requested_by="flexd", reason="drift",
    state=MigrationState.COMMITTED,
    rows=1500, rows_applied=1500, chunks_pushed=3, chunks_applied=3, bytes_to_copy=614_400, copied_bytes=614_400,
    base_version=9, last_version=12,
)  # fmt: skip
HEALTHY = DaemonStatus(
    job="shop",
    version="1.2.3",
    uptime_seconds=7300.0,
    ready=True,
    stream=StreamStatus(
        source="kafka", lag_messages=3, messages_per_second=1200.0, accesses_per_second=1.25e6, messages=500_000,
        accesses=10**9, newest_event_unix_seconds=1.7e9,
    ),
    sketch=SketchStatus(
        bytes=48 * 2**20,
        tables=(
            TableSketchStatus(table="items", kind="dense", bytes=40 * 2**20),
            TableSketchStatus(table="users", kind="count_min", bytes=8 * 2**20, error_bound=0.001),
        ),
        profile=ProfileStatus(age_seconds=12.0, coverage=0.97, samples=10**8),
    ),
    drift=DriftStatus(ratio=1.02, threshold=1.1),
    topology=TopologyStatus(generation=2, attempt="a1", nodes=2, local_ranks=4, ready=True, cluster="azure-a100-200g"),
    placement=PlacementStatus(version=12, rows={"HOME": 99_000, "NODE": 800, "DEVICE": 200}, digest="00ff00ff00ff00ff"),
    last_plan=_PLAN,
    migration=_COMMITTED,
    snapshot=SnapshotStatus(age_seconds=8.0, written=40),
)  # fmt: skip
DEGRADED_STREAM = HEALTHY.model_copy(
    update={
        "ready": False,
        "reasons": ("stream: broker unreachable",),
        "stream": HEALTHY.stream.model_copy(
            update={
                "lag_messages": 12_345_678,
                "accesses_per_second": 0.0,
                "messages_per_second": 0.0,
                "rejected_messages": {"corrupt": 2, "bad_step": 1},
                "rejected_accesses": {"negative_row": 3},
                "problem": "broker unreachable",
            }
        ),
        "snapshot": SnapshotStatus(age_seconds=900.0, written=40, failures=2, problem="disk full"),
    }
)
MIGRATING = HEALTHY.model_copy(
    update={
        "migration": _COMMITTED.model_copy(
            update={
                "state": MigrationState.PUSHING,
                "rows_pushed": 750,
                "eta_seconds": 30.0,
                "rows_applied": 375,
                "chunks_pushed": 2,
                "chunks_applied": 1,
                "copied_bytes": 153_600,
            }
        )
    }
)
PAUSED = HEALTHY.model_copy(update={"paused": True, "pause_reason": "the night of the sale"})
NO_RANKS = DaemonStatus(
    job="shop",
    version="1.2.3",
    uptime_seconds=75.0,
    reasons=("no ranks have registered",),
    stream=StreamStatus(source="file_log"),
)

SLOW_MEMORY = HEALTHY.model_copy(
    update={
        "slow_memory": SlowMemoryStatus(
            used=4_000_000, missed=300_000, evicted=290_000, written=250_000, bytes_read=4_915_200_000,
            bytes_written=3_072_000_000, wait_seconds=812.5, wait_share=0.125,
            tables=(
                *(SlowTableStatus(table=f"t{at}", used=400_000, missed=30_000 - at, evicted=29_000, written=25_000)
                  for at in range(9)),
                SlowTableStatus(table="other", used=400_000, missed=0, evicted=0, written=0),
            ),
        )
    }
)  # fmt: skip


UNBOUNDED_IDS = HEALTHY.model_copy(
    update={
        "unbounded_ids": IdsStatus(
            tables=(
                IdsTableStatus(
                    table="users", rows=50_000_000, rows_used=49_812_345, look_ups=9_000_000_000, own=8_100_000_000,
                    admitted=70_000_000, evicted=20_187_655, own_share=0.9, own_share_of_half_the_rows=0.84,
                    own_share_of_twice_the_rows=0.93, evictions_per_1000=2.24,
                ),
                IdsTableStatus(table="crosses", rows=1_000_000),
            ),
            of_stream=(
                IdsOfStream(
                    table="sessions", rows=2_000_000, look_ups=70_000_000, distinct=31_457_280.0,
                    new_per_hour=2_400_000.0, once_share=0.61, own_share_of_half_the_rows=0.32, own_share=0.43,
                    own_share_of_twice_the_rows=0.51, evictions_per_1000=412.5,
                ),
            ),
        )
    }
)  # fmt: skip


STATUSES = {
    "status-unbounded-ids": UNBOUNDED_IDS,
    "status-slow-memory": SLOW_MEMORY,
    "status-healthy": HEALTHY,
    "status-degraded-stream": DEGRADED_STREAM,
    "status-migrating": MIGRATING,
    "status-paused": PAUSED,
    "status-no-ranks": NO_RANKS,
}
