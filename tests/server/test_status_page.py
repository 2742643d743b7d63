"""The status page: its headers, and its behaviour in a real browser."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from flexd.api.plan import PlanReport
from flexd.api.planning import PlacementStatus, PlanningStatus, VerificationStatus
from flexd.api.rank import TopologyStatus
from flexd.api.status import DaemonStatus
from flexd.api.stream import StreamStatus
from flexd.api.training import ArmStatus, SlowMemoryStatus, SlowTableStatus, TrainingStatus, TuningStatus
from flexd.control.daemon.migration import MigrationRecord, MigrationState, VerificationReport
from flexd.server.http import DaemonServer
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.api_tokens import serve
from tests.support.fake_daemon import STRANGE, FakeDaemon
from tests.support.ops_tools import tool
from tests.support.until import until

pytestmark = pytest.mark.slow

DEADLINE_MS = 20_000


class BusyDaemon(FakeDaemon):
    """Ranks train, a plan is on its way, and everything that has a name has a bad one."""

    def status(self) -> DaemonStatus:
        super().status()
        return DaemonStatus(
            job=f"shop {STRANGE}", version="1.2.3", uptime_seconds=7300, ready=True, paused=self.paused,
            reasons=(f"note {STRANGE}",),
            stream=StreamStatus(source="kafka", accesses_per_second=1.25e6, lag_messages=3),
            topology=TopologyStatus(generation=2, nodes=2, local_ranks=2, ready=True),
            placement=PlacementStatus(version=7, rows={"HOME": 900, "NODE": 80, "DEVICE": 20}),
            last_plan=PlanReport(plan_id="p2", reason=f"drift {STRANGE}"),
            migration=MigrationRecord(
                migration_id="m1", plan_id="p2", state=MigrationState.PUSHING, rows=120, rows_applied=30,
                bytes_to_copy=10_000, predicted_saving_seconds=2e-3,
            ),
            training=TrainingStatus(
                tuning=TuningStatus(
                    arm="direct", reason="measured", measured_at_step=4800,
                    arms=(
                        ArmStatus(arm="direct", step_seconds=0.12, in_use=True),
                        ArmStatus(arm=f"chain {STRANGE}", step_seconds=0.123),
                    ),
                )
            ),
            planning=PlanningStatus(
                verification=VerificationStatus(
                    newest=VerificationReport(
                        migration_id="m0", state="slower", rolled_back=True, message=f"1.5 % slower {STRANGE}"
                    ),
                    held=(f"m0 measured slower {STRANGE}; plans for NODE wait",),
                )
            ),
        )  # fmt: skip


def test_the_page_may_run_only_its_own_scripts(server):
    answer = httpx.get(f"{server.address}/", timeout=10)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for kind in ("script", "style"):
        bodies = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        assert len(bodies) == 2, "uPlot's and the page's own"
        digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        assert policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "unsafe" not in answer.headers["content-security-policy"]
    html = re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.DOTALL)
    assert not re.search(r"\son\w+=|\sstyle=|\ssrc=|\shref=|javascript:", html)
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)
    assert "cache-control" in answer.headers
    assert httpx.post(f"{server.address}/", headers=COMMAND_HEADERS, timeout=10).status_code == 405
    assert httpx.get(f"{server.address}/", headers={"host": "evil.example"}, timeout=10).status_code == 403


def test_the_page_needs_no_token_and_holds_no_data(tmp_path):
    (tmp_path / "token").write_text("r" * 32)
    daemon = BusyDaemon()
    with serve(daemon, tokens=[{"name": "ops", "file": str(tmp_path / "token")}]) as server:
        assert httpx.get(f"{server.address}/", timeout=10).status_code == 200
        assert httpx.get(f"{server.address}/v1/status", timeout=10).status_code == 401
        assert daemon.calls == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = tool("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers have no user namespaces for its sandbox; nothing but our own page is shown.
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=60_000)
        yield launched
        launched.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page of a server; ``.complaints`` are its console errors, ``.requested`` the addresses it requested."""
    contexts: list[Any] = []

    def open_it(server: DaemonServer, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 1100}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(DEADLINE_MS)
        page.complaints, page.requested = [], []
        page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url))
        page.goto(server.address)
        return page

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture
def busy() -> Iterator[tuple[BusyDaemon, DaemonServer]]:
    daemon = BusyDaemon()
    with serve(daemon) as server:
        yield daemon, server


def test_the_page_shows_names_and_figures(open_page, busy):
    _, server = busy
    page = open_page(server)
    page.wait_for_selector("body[data-polls]")
    assert page.text_content("#job") == f"shop {STRANGE}"
    assert page.text_content("#health") == "ready"
    tiles = page.text_content("#tiles")
    assert "1.25 M/s" in tiles
    assert "88.5 % less than row-wise" in tiles
    assert "version 7" in tiles
    for chart in ("#traffic", "#step-time", "#tiers"):
        assert page.locator(f"{chart} canvas").count() == 1
    assert page.evaluate("[charts.traffic.scales.y.distr, charts['step-time'].scales.y.distr]") == [3, 1]
    columns = page.evaluate("charts.traffic.data.slice(1).map(column => column[10])")
    assert columns == [1.5e6, 4e5 - 6e4, 4e5 - 8e4, 2e4], "row-wise, all, all-to-all, synchronisation"
    assert page.evaluate("charts['step-time'].data[1][10]") == 0.02
    assert page.evaluate("charts.tiers.data.slice(1).map(column => column[10])") == [3000, 400, 200], "stacked"
    assert page.evaluate("plans.map(plan => plan.plan_id)") == ["p1"]
    assert page.locator("#migration progress").get_attribute("value") == "0.25"
    assert "30 of 120 rows" in page.text_content("#migration")
    assert page.text_content("#saving") == "predicted saving 2.00 ms per step"
    assert page.text_content("#verdict") == f"slower m0: 1.5 % slower {STRANGE} (rolled back)"
    assert page.text_content("#migration .held") == (
        f"no gain measured: m0 measured slower {STRANGE}; plans for NODE wait"
    )
    assert page.locator("#ranks tbody tr").count() == 4
    assert "1.50 of the mean" in page.text_content("#ranks")
    assert STRANGE in page.text_content("#tables")
    row = page.locator("#plans tbody tr td").all_text_contents()
    assert page.text_content("#arms p") == "direct, measured at step 4,800"
    arms = [cells.split("\t") for cells in page.locator("#arms tbody tr").all_inner_texts()]
    assert arms == [["direct", "120 ms", "in use"], [f"chain {STRANGE}", "123 ms", ""]]
    assert row[-4:] == ["committed", "2.00 ms", "1.5 %", "slower"]
    page.hover("#traffic .u-over")
    until(lambda: "1.50 MB" in page.text_content("#traffic .u-legend"))
    # Names are text wherever they stand: no element came of them, and nothing of them ran.
    assert page.locator("img").count() == 0
    assert page.complaints == []
    assert {httpx.URL(url).host for url in page.requested} == {"127.0.0.1"}


BROKEN_WORDS = """() => [...document.querySelectorAll("td, th")].flatMap(cell => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), broken = [];
  for (let text; (text = walker.nextNode());)
    for (const word of text.data.matchAll(/[\\w.,]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(rect => rect.top)).size > 1) broken.push(word[0]);
    }
  return broken;
})"""


@pytest.mark.parametrize("width", [1280, 390])
def test_tables_break_no_word_and_the_page_does_not_scroll_sideways(open_page, busy, width):
    page = open_page(busy[1])
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector("#ranks td")
    assert page.evaluate(BROKEN_WORDS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_rows_in_tiered_storage_are_shown_by_table_those_with_most_misses_first(open_page):
    class InTieredStorage(FakeDaemon):
        def status(self) -> DaemonStatus:
            tables = (
                SlowTableStatus(table="few", used=1_000, missed=10, evicted=8, written=7),
                SlowTableStatus(table=f"many {STRANGE}", used=2_000, missed=500, evicted=400, written=300),
            )
            slow = SlowMemoryStatus(
                used=3_000, missed=510, bytes_read=2_000_000, bytes_written=1_000_000, wait_seconds=3.0,
                wait_share=0.25, tables=tables,
            )  # fmt: skip
            return super().status().model_copy(update={"slow_memory": slow})

    with serve(InTieredStorage()) as server:
        page = open_page(server)
        page.wait_for_selector("#slow-tables td")
        cells = page.locator("#slow-tables tbody tr").all_inner_texts()
        assert [row.split("\t") for row in cells] == [
            [f"many {STRANGE}", "2,000", "500", "25.0 %", "400", "300"],
            ["few", "1,000", "10", "1.0 %", "8", "7"],
        ]
        assert page.text_content("#slow-tables p") == "2.00 MB read, 1.00 MB written, 3.00 s waited over all ranks"
        assert page.complaints == []


def test_light_and_dark_and_narrow(open_page, busy):
    colours = set()
    for scheme in ("light", "dark"):
        page = open_page(busy[1], color_scheme=scheme)
        page.wait_for_selector("body[data-polls]")
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_replan_shows_the_plan_first_and_can_be_cancelled(open_page, busy):
    daemon, server = busy
    page = open_page(server)
    page.wait_for_selector("body[data-polls]")
    page.click("#replan")
    page.wait_for_selector("dialog[open]")
    assert page.text_content("#ask-text") == "As of now nothing would move."
    page.click("#ask-no")
    assert not [call for call in daemon.calls if call[0] == "replan"]
    page.click("#replan")
    page.wait_for_selector("dialog[open]")
    page.fill("#ask-reason", 'sale "today"')
    page.click("#ask-yes")
    page.wait_for_selector("dialog:not([open])", state="attached")
    assert [call[:3] for call in daemon.calls if call[0] == "replan"] == [("replan", 'sale "today"', 0.0)]
    assert page.complaints == []


def test_the_page_requests_a_token_and_a_read_token_cannot_replan(open_page, tmp_path):
    (tmp_path / "read").write_text("r" * 32)
    (tmp_path / "admin").write_text("a" * 32)
    daemon = BusyDaemon()
    tokens = [{"name": name, "scope": name, "file": str(tmp_path / name)} for name in ("read", "admin")]
    with serve(daemon, tokens=tokens) as server:
        page = open_page(server)
        page.wait_for_selector("dialog[open]")
        page.fill("#ask-token", "x" * 32)
        page.click("#ask-yes")
        page.wait_for_selector("#ask-problem:not(:empty)")
        assert "not known" in page.text_content("#ask-problem")
        assert daemon.calls == []
        page.fill("#ask-token", "r" * 32)
        page.press("#ask-token", "Enter")
        page.wait_for_selector("body[data-polls]")
        page.click("#replan")
        page.wait_for_selector("dialog[open]")
        page.click("#ask-yes")
        page.wait_for_selector("#ask-problem:not(:empty)")
        assert "may only read" in page.text_content("#ask-problem")
        page.fill("#ask-token", "a" * 32)
        page.click("#ask-yes")
        page.wait_for_selector("dialog:not([open])", state="attached")
        assert [call[0] for call in daemon.calls].count("replan") == 1
        # Nothing of a token stays behind in the browser.
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_an_unreachable_daemon_is_shown_until_it_answers(open_page, busy):
    daemon, server = busy
    page = open_page(server)
    page.wait_for_selector("body[data-polls]")
    daemon.error = RuntimeError("away")
    page.wait_for_selector("#health:text('no answer')")
    assert page.is_disabled("#replan")
    daemon.error = None
    page.wait_for_selector("#health:text('ready')")
