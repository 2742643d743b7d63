"""``docs/how-it-works.md`` lists the files that a message, a plan, a step, a command and a tick really enter."""

import ast
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import flexd
from flexd.cli.main import app
from flexd.config.model import parse_config
from flexd.core.placement import RankLayout
from flexd.stream.file_log.log import FileLogSink
from tests.support.rank_pool import Ranks
from tests.support.repository import ROOT
from tests.support.until import until

_PREFIX = f"{ROOT}/"
_SOURCES = f"{ROOT}/flexd/"


class EnteredFiles:
    """Record the files of functions that are called, directly or not, by the functions in which a way begins.

    Bodies of modules and classes do not count, nor does what dataclasses generate. Make it before the threads whose
    calls are to be seen, and close it in the thread that made it.

    Args:
        starts: by way, the functions that it begins in, one for each thread that takes part.
        others: functions that belong to no way: what they call is left out.

    Attributes:
        found: by way, paths relative to the repository in the order in which they were entered first.
        recorded: ways that are recorded now.
    """

    def __init__(
        self, starts: Mapping[str, Sequence[Callable[..., Any]]], others: Sequence[Callable[..., Any]] = ()
    ) -> None:
        self.found: dict[str, dict[str, None]] = {way: {} for way in starts}
        self.recorded: set[str] = set()
        self._starts = {_code_of(function): way for way, functions in starts.items() for function in functions}
        self._starts |= {_code_of(function): "" for function in others}
        self._inside = threading.local()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def close(self) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        ways = self._inside.__dict__.setdefault("ways", [])
        way = self._starts.get(code)
        if way is not None and event == "call":
            ways.append(way)
        is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_filename.startswith(_SOURCES)
        if event == "call" and is_function and ways and ways[-1]:
            for each in self.recorded.intersection(ways):
                self.found[each].setdefault(code.co_filename.removeprefix(_PREFIX))
        if way is not None and event == "return" and ways and ways[-1] == way:
            ways.pop()


def _code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__  # type: ignore[attr-defined]
    return code


ROWS, IDS = 5_000, 2_000
SECONDS = 60.0
PAGE = ROOT / "docs" / "how-it-works.md"
LIMITS = {"message": 11, "plan": 22, "step": 22, "status": 11, "renewal": 35}
"""By way: the most files that it may enter."""
RACED = {"flexd/stream/types.py", "flexd/control/protocol/messages.py", "flexd/planner/model/prices.py"}
"""Entered by some renewals."""


def train_step(collection: flexd.EmbeddingCollection, ids: torch.Tensor) -> None:
    collection({"item": flexd.Jagged(ids, torch.tensor([len(ids)]))})["item"].values.square().sum().backward()
    collection.optimizer.step()


def run_command(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, (done.output, done.stderr)
    return done.output


def starts() -> dict[str, list[Callable[..., Any]]]:
    """By way, where it begins in each thread."""
    from flexd.control.agent.rank_connection import RankConnection
    from flexd.control.daemon.coordinator import Coordinator
    from flexd.daemon import Daemon
    from flexd.embedding.engine import RowEngine
    from flexd.operations.executions import Executions
    from flexd.server.access import AccessControl, RequestGuard
    from flexd.sketch.ingestor import Ingestor

    return {
        "message": [Ingestor._read_some],
        "plan": [Executions.start, Coordinator._tick_until_stopped, RankConnection.run, RowEngine._apply_chunks],
        "step": [train_step],
        "status": [run_command, AccessControl.__call__, RequestGuard.__call__, Daemon.call],
        "renewal": [Daemon.renew_status],
    }


def live(rank: int, directory: str) -> dict[str, list[str]]:
    """Train beside a daemon, which the process of rank 0 runs, and record what each way enters on this rank."""
    from flexd.control.agent.rank_connection import RankConnection
    from flexd.daemon import Daemon
    from flexd.daemon.components import DaemonComponents
    from flexd.embedding.connect import Connection

    files = EnteredFiles(starts(), [DaemonComponents._take_report, Connection.updated, RankConnection._send_progress])
    port, daemon = [0], None
    if rank == 0:
        config = {
            "job": "ways", "shutdown_seconds": 20.0,
            "tables": [{"name": "item", "rows": ROWS, "dim": 8}],
            "stream": {"source": {"kind": "file_log", "path": f"{directory}/log"}, "poll_seconds": 0.05},
            "topology": {"file": str(ROOT / "examples" / "rehearsal_cluster.yaml")},
            "planner": {
                "auto": False, "horizon_steps": 1000, "min_samples": 1000, "min_saving": {"seconds": 0, "share": 0},
                "verify_budget_steps": 0, "interval_seconds": 3600, "drift_threshold": None,
            },
            "control": {"listen_port": 0}, "server": {"port": 0}, "state": {"dir": f"{directory}/state"},
        }  # fmt: skip
        daemon = Daemon(parse_config(config))
        daemon.start()
        looping = threading.Thread(target=daemon.run_until_stopped)
        looping.start()
        port[0] = daemon.components.coordinator.port
    dist.broadcast_object_list(port)
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", ROWS, 8)],
        layout=RankLayout(2, 2),
        replica_slots=[ROWS // 20],
        exchange="chain",
    )
    connection = flexd.connect(collection, f"127.0.0.1:{port[0]}", job="ways", timeout_seconds=5.0)
    publisher = flexd.Publisher(FileLogSink(f"{directory}/log", f"rank-{rank}"), source_rank=rank)
    random = torch.Generator().manual_seed(rank)
    steps = 0

    def steps_until(condition: Callable[[], bool]) -> None:
        """Train until rank 0 sees the condition."""
        nonlocal steps
        going, deadline = torch.ones(1), time.monotonic() + SECONDS
        while going:
            ids = (ROWS * torch.rand(IDS, generator=random) ** 8).long()
            publisher.publish("item", ids, step=steps)
            train_step(collection, ids)
            steps += 1
            assert time.monotonic() < deadline, "the condition is not met in time"
            going.fill_(float(rank > 0 or not condition()))
            dist.all_reduce(going, op=dist.ReduceOp.MIN)

    def planned() -> bool:
        return CliRunner().invoke(app, ["plan", "--url", daemon.address]).exit_code == 0

    steps_until(lambda: steps > 3 and planned())
    files.recorded.add("plan")
    if rank == 0:
        run_command("replan", "--yes", "--reason", "test", "--url", daemon.address)
    dist.barrier()
    # Recorded by the daemon too, and its placement is that of the ranks from then on.
    steps_until(
        lambda: daemon.components._executions.migrations["committed"] and daemon.components.coordinator.placement()
    )
    files.recorded.clear()
    if rank == 0:
        # Every plan's summary is worked out by the first status that shows it.
        daemon.renew_status()
        files.recorded.update(("message", "status", "renewal"))
        daemon.renew_status()
        run_command("status", "--url", daemon.address)
        counted = daemon.components.ingestor.counter.messages
        publisher.publish("item", torch.arange(9), step=steps)
        until(lambda: daemon.components.ingestor.counter.messages > counted)
        files.recorded.clear()
    dist.barrier()
    files.recorded.add("step")
    steps_until(lambda: True)
    files.close()
    publisher.close(5.0)
    connection.close(5.0)
    if daemon is not None:
        daemon.request_stop()
        looping.join(30)
    collection.close()
    return {way: list(found) for way, found in files.found.items()}


@pytest.mark.timeout(180)
def test_the_page_lists_the_files_that_are_entered(ranks: Ranks, tmp_path: Path) -> None:
    """RECORD_GOLDEN=1 writes the lists anew, in the order in which the files were entered."""
    entered: dict[str, dict[str, None]] = {way: {} for way in LIMITS}
    for of_rank in ranks(4).run(live, str(tmp_path)):
        for way, found in of_rank.items():
            entered[way] |= dict.fromkeys(found)
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("RECORD_GOLDEN"):
        for way, found in entered.items():
            tasks = [
                f"`{path}`" if way in ("plan", "status", "renewal") else f"`{path}`: {task_of(path)}" for path in found
            ]
            listed = "".join(f"{n}. {task}\n" for n, task in enumerate(tasks, 1))
            (before,) = re.findall(rf"<!-- entered: {way} -->\n(.*?)<!-- end -->", page, flags=re.DOTALL)
            if sorted(re.findall(r"`[^`]+`", before)) != sorted(re.findall(r"`[^`]+`", listed)):  # threads race
                page = page.replace(f"<!-- entered: {way} -->\n{before}", f"<!-- entered: {way} -->\n{listed}")
        PAGE.write_text(page, encoding="utf-8")
    for way, most in LIMITS.items():
        (lines,) = re.findall(rf"<!-- entered: {way} -->\n(.*?)<!-- end -->", page, flags=re.DOTALL)
        listed = re.findall(r"^\d+\. `([^`]+)`", lines, flags=re.MULTILINE)
        # What a renewal reads again depends on what the daemon's threads have just done.
        raced = RACED if way == "renewal" else set()
        assert {*listed} - raced == {*entered[way]} - raced, f"{way}: record the lists anew (RECORD_GOLDEN=1)"
        assert len(listed) <= most, f"{way}: {len(listed)} files"


def task_of(path: str) -> str:
    """Return the first clause of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or "").split())
    clause = re.split(r"[:;.] |, |\.$", text)[0]
    return clause[0].lower() + clause[1:]
