"""The tests in which the condition of each alert of deploy/prometheus really occurs.

``LIVE`` alerts fire in tests/e2e/test_ops_alerts.py: a daemon is brought into the condition, and a real Prometheus
scrapes it. The conditions of ``ELSEWHERE`` need hours, or a load that would starve the other daemons of that test: they
occur in a test of their own, without Prometheus.
"""

from __future__ import annotations

from typing import NamedTuple


class Live(NamedTuple):
    """The scenario of tests/support/alarming.py, the daemon of which the alert tells, and what happens to it."""

    scenario: str
    daemon: str
    condition: str


class Elsewhere(NamedTuple):
    """The test, and the condition that occurs in it."""

    test: str
    condition: str


LIVE: dict[str, Live] = {
    "FlexdDown": Live("churns", "churns", "it is killed"),
    "FlexdUnhealthy": Live("disk", "disk", "a write into the state directory does not return"),
    "FlexdNotReady": Live("missing", "missing", "one of four ranks does not register"),
    "FlexdRestarts": Live("restarts", "restarts", "it is killed again and again"),
    "FlexdThreadFails": Live("proposes", "proposes", "the drift thread raises"),
    "FlexdMessagesLost": Live("stream", "stream", "records of the log are damaged"),
    "FlexdStreamUnreachable": Live("disk", "disk", "no broker listens"),
    "FlexdStreamSilent": Live("idle", "idle", "ranks train and nothing is published"),
    "FlexdRejectsMessages": Live("stream", "stream", "messages of another program"),
    "FlexdRejectsAccesses": Live("stream", "stream", "row ids beyond the table"),
    "FlexdAccessesMisdated": Live("stream", "stream", "a publisher whose clock is a day ahead"),
    "FlexdOffsetsSkipped": Live("restarts", "restarts", "it is killed twice while it counts the same message"),
    "FlexdProfileStale": Live("proposes", "proposes", "no profile for some seconds"),
    "FlexdPlanStale": Live("moves", "moves", "planner.interval_seconds is an hour"),
    "FlexdPlansRefused": Live("stream", "stream", "planner.min_samples is out of reach"),
    "FlexdProposalsWait": Live("proposes", "proposes", "planner.auto is false"),
    "FlexdPausedLong": Live("disk", "disk", "it is paused"),
    "FlexdMigrationStuck": Live("moves", "moves", "training makes no step in a migration"),
    "FlexdMigrationsFail": Live("fails", "fails", "ranks cannot prepare chunks"),
    "FlexdDigestMismatch": Live("moves", "moves", "a rank reports another digest"),
    "FlexdPlacementDistrusted": Live("moves", "moves", "the rank does so again"),
    "FlexdRanksDisagree": Live("moves", "moves", "the reports of one rank stop while chunks are applied"),
    "FlexdApplySlow": Live("proposes", "proposes", "ranks report half of the step time for chunks"),
    "FlexdRanksMissing": Live("missing", "missing", "one of four ranks does not register"),
    "FlexdAttemptWaits": Live("idle", "idle", "a second launch says hello"),
    "FlexdControlMessagesRefused": Live("idle", "idle", "a proven peer sends what is no message"),
    "FlexdNoneProvesItself": Live("disk", "disk", "peers with another secret connect"),
    "FlexdVersionRefused": Live("disk", "disk", "peers of another version connect"),
    "FlexdEpochsChurn": Live("churns", "churns", "the ranks' connections are cut every second"),
    "FlexdSnapshotsFail": Live("stream", "stream", "the directory of the snapshots is a file"),
    "FlexdSnapshotOld": Live("idle", "idle", "no snapshot for some seconds"),
    "FlexdDecisionsFail": Live("disk", "disk", "decisions.json cannot be written"),
}

ELSEWHERE: dict[str, Elsewhere] = {
    "FlexdLagGrows": Elsewhere(
        "tests/stream/file_log/test_partition_reader.py::test_lag_counts_across_segments",
        "messages are appended and not read",
    ),
    "FlexdDrift": Elsewhere(
        "tests/operations/test_drift.py::test_a_live_daemon_plans_once_for_a_stream_that_moved",
        "the popular rows change under a running daemon",
    ),
    "FlexdPlansDoNotWin": Elsewhere(
        "tests/operations/test_verification.py::test_a_slower_plan_is_rolled_back_with_its_figure_and_its_kind_is_held_back",
        "copies of a plan make the steps slower",
    ),
    "FlexdSlowMemoryStalls": Elsewhere(
        "tests/embedding/test_connect_slow_memory.py::test_the_daemon_sees_what_slow_memory_did",
        "the rows of a batch do not fit into fast memory",
    ),
    "FlexdProfileThin": Elsewhere(
        "tests/api/test_sketch.py::test_rows_that_noise_hides_explain_nothing_for_certain",
        "uniform accesses to 10^9 rows are counted within 1 MiB",
    ),
    "FlexdThrottled": Elsewhere(
        "tests/control/daemon/test_throttled_channel.py::test_slower_steps_slow_the_migration_down",
        "steps become slower while chunks are applied",
    ),
}
