"""Reports that say what cannot be: refused alone, while ranks, plans and metrics go on."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from flexd.config.model import Config
from flexd.control.protocol.report import SentBytes, SlowMemoryReport, SlowTableReport, StepReport, TrainerSettings
from flexd.daemon import Daemon
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.ranks_in_threads import Ranks
from tests.support.until import until

SECONDS = 30.0


class Observed:
    """A daemon and four ranks that train."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.ranks = Ranks(self.daemon.components.coordinator.port, secret=None)
        self.sent: Callable[[StepReport], StepReport] = lambda report: report
        """Changes what rank 1 sends, behind everything that cleans it."""
        reports = self.ranks.ranks[1].agent.reports
        drain = reports.drain

        def drain_and_change() -> StepReport | None:
            report = drain()
            return None if report is None else self.sent(report)

        reports.drain = drain_and_change  # type: ignore[method-assign]

    def malformed(self) -> dict[str, int]:
        return self.daemon.status().topology.channel.malformed_reports

    def refused(self) -> int:
        return self.daemon.status().topology.channel.refused_messages["malformed"]

    def ready(self) -> bool:
        return self.get("/readyz").status_code == 200 and self.plan().status_code == 200

    def plan(self) -> httpx.Response:
        return httpx.post(self.daemon.address + "/v1/plan", headers=COMMAND_HEADERS, timeout=10.0)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.daemon.address + path, timeout=10.0)

    def metric(self, name: str) -> dict[str, float]:
        """Return the samples of a family by their labels."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        return {line.rsplit(" ", 1)[0].removeprefix(name): float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.fixture
def observed(start: Callable[..., Any], make_config: Callable[..., Config]) -> Iterator[Observed]:
    config = make_config(
        job="job", tables=[{"name": "item", "rows": 50_000, "dim": 8}, {"name": "shop", "rows": 1_000, "dim": 16}],
        planner={"auto": False, "min_samples": 1_000, "min_coverage": 0.0},
    )  # fmt: skip
    made = Observed(start(config).daemon)
    with made.ranks:
        until(made.ready, SECONDS, lambda: (made.get("/readyz").text, made.plan().text))
        yield made


IMPOSSIBLE: dict[str, Callable[[StepReport], StepReport]] = {
    "StepReport.steps": lambda report: replace(report, steps=-5),
    "SentBytes.sync_inter_bytes": lambda report: replace(report, sent=SentBytes(sync_inter_bytes=-1)),
    "SlowTableReport.missed": lambda report: replace(
        report, slow_memory=SlowMemoryReport((SlowTableReport(0, 1, 2**63, 0, 0),))
    ),
}
"""By field, one at each depth; all fields are those of ``test_report_bounds``."""


def test_impossible_reports_are_refused_by_field_and_the_rest_goes_on(
    observed: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = observed.daemon.status().topology.epochs
    first, *_ = IMPOSSIBLE
    observed.sent = IMPOSSIBLE[first]
    until(lambda: observed.malformed().get(first, 0) >= 1, SECONDS)  # good ones that were under way have arrived
    before = observed.daemon.components.training.ranks()[1]
    for field, change in IMPOSSIBLE.items():
        observed.sent = change
        until(lambda field=field: observed.malformed().get(field, 0) >= 3, SECONDS)
    assert observed.daemon.components.training.ranks()[1] == before, "the last good report stays"
    observed.sent = lambda report: report
    until(lambda: observed.daemon.components.training.ranks()[1].step > before.step, SECONDS)
    status = observed.daemon.status().topology
    assert (status.ready, status.ranks_ready, status.epochs) == (True, 4, epochs), status
    assert observed.ready()

    def counted() -> dict[str, float]:
        return {f'{{field="{field}"}}': count for field, count in observed.malformed().items()}

    # A report that was under way may still be refused.
    until(lambda: observed.metric("flexd_control_malformed_reports_total") == counted(), SECONDS, counted)
    malformed = observed.malformed()
    until(lambda: observed.refused() == sum(observed.malformed().values()), SECONDS)
    assert set(malformed) == set(IMPOSSIBLE)
    assert all(math.isfinite(value) and value >= 0 for value in observed.metric("flexd_step").values())
    lines = [record for record in caplog.records if "report_refused" in record.message]
    assert len(lines) <= sum(1 + int(math.log2(count)) for count in malformed.values())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_table_of_unbounded_ids_is_named_where_a_stream_has_ids(
    start: Callable[..., Any], make_config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(
        job="job",
        tables=[
            {"name": "item", "rows": 50_000, "dim": 8}, {"name": "shop", "rows": 1_000, "dim": 16, "ids": "unbounded"},
        ],
    )  # fmt: skip
    trainer = TrainerSettings("chain", unbounded="u-")
    daemon = start(config).daemon
    port = daemon.components.coordinator.port
    with Ranks(port, secret=None, identities=lambda identity: replace(identity, trainer=trainer)):
        until(lambda: "tables item have unbounded ids in the trainer" in caplog.text, SECONDS, lambda: caplog.text)
        until(lambda: "tables shop have ids: unbounded in the configuration" in caplog.text, SECONDS)
        until(lambda: daemon.status().unbounded_ids.of_stream[0].look_ups > 0, SECONDS)
        assert [(one.table, one.rows) for one in daemon.status().unbounded_ids.of_stream] == [("shop", 1_000)]
