"""The admin API through a real uvicorn."""

import threading

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from flexd.api.base import ErrorBody, ProbeResult
from flexd.api.migration import MigrationCounts
from flexd.api.plan import CostReport, PlanReport, UserNodePage
from flexd.api.planning import PlacementStatus, PlanningStatus
from flexd.api.rank import ChannelStatus, TopologyStatus
from flexd.api.status import DaemonStatus, SnapshotStatus
from flexd.api.stream import (
    MAX_PAGE_ENTRIES,
    HotRowPage,
    ProfileStatus,
    SketchStatus,
    StreamStatus,
    TablePage,
    TableSketchStatus,
)
from flexd.api.training import TrainingStatus
from flexd.control.daemon.migration import MigrationRecord, MigrationState
from flexd.core.errors import ApiError, ConfigError, ControlError, EmbeddingError, PlanError
from flexd.core.model import MAX_LABEL_VALUES
from flexd.server.app import MAX_SLOW_CALLS, Metrics, SlowCalls
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.fake_daemon import USERS, FakeDaemon
from tests.support.until import until


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError("paused", status=409, remedy="resume first"), 409),
        (ApiError("odd", status=0), 500),
        (PlanError("profile is thin", remedy="wait for accesses"), 409),
        (ConfigError("not a number"), 422),
        (ControlError("no ranks"), 503),
        (EmbeddingError("not from here"), 500),
    ],
)
def test_flexd_errors_keep_type_message_and_remedy(client, daemon, error, status):
    daemon.error = error
    answer = client.post("/v1/replan", json={})
    assert answer.status_code == status
    detail = ErrorBody.model_validate(answer.json()).error
    assert (detail.type, detail.message, detail.remedy) == (type(error).__name__, error.message, error.remedy)


def test_a_fault_of_the_daemon_is_a_500_without_its_text(client, daemon):
    daemon.error = ValueError("the secret is hunter2")
    answer = client.get("/v1/status")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalError"
    assert "hunter2" not in answer.text


def test_probes(client, daemon):
    assert (client.get("/healthz").status_code, client.get("/readyz").status_code) == (200, 200)
    daemon.useful = ProbeResult(ok=False, reasons=("no ranks",))
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ok": False, "reasons": ["no ranks"]}
    daemon.error = RuntimeError("boom")
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["RuntimeError: boom"]


def test_metrics_listener_reads_only(server, daemon):
    with httpx.Client(base_url=server._listeners[1].address, timeout=10) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/healthz").status_code == 200
        # Prometheus addresses a pod by its IP address, under any name.
        assert client.get("/readyz", headers={"host": "10.0.0.7:9465"}).status_code == 200
        for path in ("/v1/status", "/v1/plan", "/v1/config", "/v1/tables", "/openapi.json", "/"):
            assert client.get(path).status_code == 404
        for path in ("/v1/pause", "/v1/replan", "/v1/resume"):
            assert client.post(path, json={}).status_code == 403
            assert client.post(path, json={}, headers=COMMAND_HEADERS).status_code == 404
    assert daemon.calls == [("status",), ("ranks", 0, MAX_LABEL_VALUES)], "the scrape alone"


def test_pages_have_the_requested_offset_and_limit(client, daemon):
    tables = TablePage.model_validate(client.get("/v1/tables", params={"offset": 1, "limit": 5}).json())
    assert (tables.total, tables.offset, len(tables.tables)) == (2, 1, 1)
    rows = HotRowPage.model_validate(client.post("/v1/rows", json={"table": "a b/c", "limit": 3}).json())
    assert (rows.table, [row.place for row in rows.hottest]) == ("a b/c", [1, 2, 3])
    assert client.get("/v1/topology", params={"offset": 3}).json()["ranks"][0]["step_seconds"] is None
    users = UserNodePage.model_validate(client.get("/v1/affinity/users", params={"offset": 2, "limit": 2}).json())
    assert users.ids == USERS[2:4]
    assert daemon.calls == [
        ("tables", 1, 5, "accesses"), ("rows", "a b/c", 0, 3), ("ranks", 3, 100), ("user_nodes", 2, 2),
    ]  # fmt: skip
    for path, asked in (("affinity/users", {"offset": -1}), ("tables", {"limit": MAX_PAGE_ENTRIES + 1})):
        assert client.get(f"/v1/{path}", params=asked).status_code == 422


def test_waits_are_bounded_and_probes_answer_meanwhile(client, daemon, server):
    daemon.hold = threading.Event()
    statuses: list[int] = []

    def wait() -> None:
        answer = httpx.post(
            f"{server.address}/v1/replan", json={"wait_seconds": 20}, headers=COMMAND_HEADERS, timeout=30
        )
        statuses.append(answer.status_code)

    waiting = [threading.Thread(target=wait) for _ in range(MAX_SLOW_CALLS)]
    for thread in waiting:
        thread.start()
    until(lambda: len(daemon.calls) >= MAX_SLOW_CALLS, 10)
    assert client.post("/v1/replan", json={}).status_code == 429
    assert client.post("/v1/plan").status_code == 429
    assert client.get("/healthz").status_code == 200
    assert client.get("/v1/status").status_code == 200
    daemon.hold.set()
    for thread in waiting:
        thread.join(10)
    assert statuses == [200] * MAX_SLOW_CALLS
    assert client.post("/v1/plan").status_code == 200


def test_a_call_that_fails_frees_its_place() -> None:
    slow = SlowCalls(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), slow.one():
            raise ValueError("broken")
    with slow.one(), pytest.raises(ApiError, match="1 plans or waits are running already") as refused, slow.one():
        pass
    assert refused.value.status == 429


FULL = DaemonStatus(
    job="job",
    version="1.2.3",
    started_unix_seconds=1700000000.0,
    ready=True,
    paused=True,
    stream=StreamStatus(
        source="kafka", messages=10, accesses=1000, bytes=9999,
        rejected_messages={"corrupt": 3, 'odd "reason"\n': 1}, rejected_accesses={"negative_row": 7},
        adjusted_accesses={"late": 4}, lag_messages=5, dead_letters=4, newest_event_unix_seconds=1700000001.5,
        messages_lost={"retention": 11},
    ),
    sketch=SketchStatus(
        tables=(TableSketchStatus(table="items", kind="dense", bytes=4096, error_bound=0.0),),
        profile=ProfileStatus(age_seconds=1.5, coverage=0.99, samples=1000, generation=8),
    ),
    last_plan=PlanReport(
        plan_id="p", created_unix_seconds=1700000000.0, before=CostReport(exposed_seconds=0.004),
        after=CostReport(exposed_seconds=0.002),
    ),
    planning=PlanningStatus(plans={"changed": 2, "refused": 1}, planning_seconds=0.75),
    migration=MigrationRecord(migration_id="m", plan_id="p", state=MigrationState.PUSHING, rows=4, rows_applied=2),
    migrations=MigrationCounts(ended={"committed": 2}, rows=300, bytes=4096, chunks=6),
    placement=PlacementStatus(version=6, rows={"HOME": 90, "NODE": 7, "DEVICE": 3}),
    training=TrainingStatus(
        accesses={"HOME": 60, "NODE": 30, "DEVICE": 10},
        sent_bytes={"all_to_all": {"inter": 123}, "sync": {"intra": 45}},
        steps=40, step_seconds=8.5, apply_seconds=0.1, newest_step=21,
    ),
    topology=TopologyStatus(
        epochs=3, generation=2, ranks=4, ranks_ready=3,
        channel=ChannelStatus(refused_messages={"stale": 1}, queued_bytes=70_000, unread_bytes=512),
    ),
    snapshot=SnapshotStatus(age_seconds=12.0, written=9, failures=1, bytes=5000, pause_seconds=0.25),
)  # fmt: skip
NEW = DaemonStatus(job="j", version="1", stream=StreamStatus(source="kafka"))


def samples(status: DaemonStatus) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    daemon = FakeDaemon(shown=status, paused=status.paused)
    page, _ = Metrics(daemon).render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_every_number_is_on_the_page():
    found = samples(FULL)
    expected = {
        ("flexd_build_info", (("training_job", "job"), ("version", "1.2.3"))): 1,
        ("flexd_paused", ()): 1,
        ("flexd_ingest_accesses_total", ()): 1000,
        ("flexd_ingest_rejected_messages_total", (("reason", "corrupt"),)): 3,
        ("flexd_ingest_rejected_messages_total", (("reason", 'odd "reason"\n'),)): 1,
        ("flexd_ingest_rejected_accesses_total", (("reason", "negative_row"),)): 7,
        ("flexd_ingest_adjusted_accesses_total", (("rule", "late"),)): 4,
        ("flexd_ingest_lag_messages", ()): 5,
        ("flexd_sketch_bytes", (("table", "items"),)): 4096,
        ("flexd_profile_coverage_ratio", ()): 0.99,
        ("flexd_plans_total", (("outcome", "changed"),)): 2,
        ("flexd_plan_duration_seconds_count", ()): 3,
        ("flexd_plan_duration_seconds_sum", ()): 0.75,
        ("flexd_plan_predicted_step_communication_seconds", (("placement", "after"),)): 0.002,
        ("flexd_migration_bytes_total", ()): 4096,
        ("flexd_migration_progress_ratio", ()): 0.5,
        ("flexd_rank_placement_version", (("rank", "0"),)): 7,
        ("flexd_placement_rows", (("tier", "device"),)): 3,
        ("flexd_training_accesses_total", (("tier", "node"),)): 30,
        ("flexd_training_sent_bytes_total", (("kind", "all_to_all"), ("link", "inter"))): 123,
        ("flexd_training_sent_bytes_total", (("kind", "sync"), ("link", "intra"))): 45,
        ("flexd_training_sent_bytes_total", (("kind", "migration"), ("link", "inter"))): 0,
        ("flexd_training_step_duration_seconds_count", ()): 40,
        ("flexd_control_refused_messages_total", (("kind", "stale"),)): 1,
        ("flexd_control_queued_bytes", ()): 70_000,
        ("flexd_control_unread_bytes", ()): 512,
        ("flexd_snapshot_failures_total", ()): 1,
        ("flexd_ingest_lost_messages_total", (("reason", "retention"),)): 11,
        ("flexd_rank_step_seconds", (("rank", "2"),)): 0.025,
        ("flexd_rank_step_seconds", (("rank", "3"),)): None,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_label_sets_stay_bounded():
    many = {f"reason{i}": 1 for i in range(MAX_LABEL_VALUES + 100)}
    status = NEW.model_copy(update={"stream": StreamStatus(source="kafka", rejected_messages=many)})
    found = {key: v for key, v in samples(status).items() if key[0] == "flexd_ingest_rejected_messages_total"}
    assert len(found) == MAX_LABEL_VALUES + 1
    assert sum(found.values()) == len(many)


@pytest.mark.parametrize("accept", ["", "text/plain;version=0.0.4", "application/openmetrics-text; version=1.0.0"])
def test_over_http_in_both_formats(server, daemon, accept):
    daemon.shown = FULL
    answer = httpx.get(f"{server.address}/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    openmetrics = accept.startswith("application/openmetrics")
    assert answer.headers["content-type"].startswith(
        "application/openmetrics-text" if openmetrics else "text/plain; version="
    )
    assert answer.headers["content-type"].count("charset") == 1
    families = {f.name for f in (parse_openmetrics if openmetrics else text_string_to_metric_families)(answer.text)}
    assert "flexd_ingest_lag_messages" in families


def test_a_status_that_fails_is_a_500_and_the_next_scrape_works(server, daemon):
    daemon.error = RuntimeError("a fault")
    assert httpx.get(f"{server.address}/metrics").status_code == 500
    daemon.error = None
    assert httpx.get(f"{server.address}/metrics").status_code == 200
