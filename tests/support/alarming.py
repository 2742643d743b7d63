"""Daemons that are brought into the conditions of the alerts, all at the same time.

A scenario is a generator: it acts, and yields a condition for which it waits meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.handshake import NONCE_BYTES, encode_hello
from flexd.control.protocol.report import StepReport
from flexd.control.protocol.versions import Versions
from flexd.core.errors import FlexdError
from flexd.core.fault_points import VARIABLE
from flexd.demo.ports import free_ports
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.types import AccessBatch
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.channel import is_closed, raw_connection
from tests.support.prometheus import Prometheus
from tests.support.ranks_in_threads import SECRET, TABLES, Ranks
from tests.support.raw_rank import RawRank
from tests.support.repository import child_environment
from tests.support.tcp_cut import TcpCut

Scenario = Iterator[Callable[[], object]]
_TURN_SECONDS = 0.2
_WITHOUT_END = "1-10000:raise"


class WatchedDaemon:
    """``flexd run`` of the tables of ``ranks_in_threads``, which may be armed and started again."""

    def __init__(self, name: str, directory: Path, sections: dict[str, Any]) -> None:
        self.name = self.job = name
        self.state = directory / name / "state"
        self.state.parent.mkdir()
        self.log = self.state.parent / "log"
        self.log.mkdir()
        secret_file = self.state.parent / "secret"
        secret_file.write_bytes(SECRET)
        self.port, http_port = free_ports(2)
        self.target = f"127.0.0.1:{http_port}"
        settings: dict[str, dict[str, Any]] = {
            "stream": {"source": {"kind": "file_log", "path": str(self.log)}, "poll_seconds": 0.05},
            "sketch": {"memory_bytes": 2**22},
            "planner": {"interval_seconds": 3600.0, "drift_threshold": None},
            "control": {"listen_port": self.port, "secret_file": str(secret_file), "timeout_seconds": 5.0},
            "server": {"port": http_port},
            "state": {"dir": str(self.state), "snapshot_interval_seconds": 1.0},
        }
        for section, changed in sections.items():
            settings[section] = {**settings.get(section, {}), **changed}
        tables = [{"name": table.name, "rows": table.rows, "dim": table.dim} for table in TABLES.tables]
        self._file = self.state.parent / "flexd.yaml"
        self._file.write_text(yaml.safe_dump({"job": self.job, "tables": tables, **settings}))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, faults: str = "") -> None:
        with (self.state.parent / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flexd", "run", "-c", str(self._file)],
                stdout=log, stderr=log, env=child_environment(**{VARIABLE: faults}),
            )  # fmt: skip

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def post(self, path: str) -> None:
        """Send a command, whose response may be late or a refusal."""
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"http://{self.target}{path}", json={"reason": "a test"}, headers=COMMAND_HEADERS, timeout=5)

    def messages(self, name: str, payloads: list[bytes]) -> Path:
        """Append to a new partition of the log."""
        sink = FileLogSink(self.log, name)
        for payload in payloads:
            sink.send(payload)
        sink.close()
        return self.log / name


def _accesses(rows: list[int], ahead_seconds: float = 0.0) -> bytes:
    return encode_arrow([AccessBatch("item", np.array(rows, np.int64), 0, time.time() + ahead_seconds)])


def _passed(seconds: float = _TURN_SECONDS) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def _synthetic(accesses_per_second: int = 20_000) -> dict[str, Any]:
    return {"source": {"kind": "synthetic", "accesses_per_second": accesses_per_second}, "poll_seconds": 0.05}


class Alarms:
    """The daemons, the ranks and their Prometheus, which has the rules as ``changed`` makes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closed: list[Callable[[], object]] = []
        self.daemons: dict[str, WatchedDaemon] = {}
        self.prometheus: Prometheus
        often = {"interval_seconds": 0.5, "min_spacing_seconds": 0.1, "min_coverage": 0.0, "min_samples": 1_000}
        moving = {"pins": [{"table": "item", "tier": "NODE", "rows": list(range(480))}]}
        slow = {"chunk_rows": 16, "throttle": {"bytes_per_second": 300}}
        refused = {"source": {"kind": "kafka", "bootstrap_servers": f"127.0.0.1:{free_ports(1)[0]}"}}
        self._add("stream", planner=often | {"min_samples": 10**12})
        self._add("idle", state={"snapshot_interval_seconds": 8.0})
        self._add(
            "proposes", stream=_synthetic(),
            planner=often | moving | {"auto": False, "interval_seconds": 10.0, "drift_interval_seconds": 0.2},
        )  # fmt: skip
        self._add("moves", stream=_synthetic(), control=slow, planner=often | moving | {"interval_seconds": 3600.0})
        self._add("fails", stream=_synthetic(), planner=often | moving)
        self._add("churns")
        self._add("missing")
        self._add("disk", stream=refused)
        self._add("restarts")

    def _add(self, name: str, **sections: Any) -> None:
        self.daemons[name] = WatchedDaemon(name, self._directory, sections)

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
        for close in reversed(self._closed):
            close()

    def scenarios(self) -> dict[str, Scenario]:
        return {
            "stream": self._stream(), "idle": self._idle(), "proposes": self._proposes(), "moves": self._moves(),
            "fails": self._fails(), "churns": self._churns(), "missing": self._missing(), "disk": self._disk(),
            "restarts": self._restarts(),
        }  # fmt: skip

    def fired(self) -> set[tuple[str, str]]:
        """Return (alert, target) of all that fired so far; without a target the job."""
        found = self.prometheus.query('last_over_time(ALERTS{alertstate="firing"}[10m])')
        labels = [series["metric"] for series in found]
        return {(each["alertname"], each.get("instance") or each.get("training_job", "")) for each in labels}

    def _fires(self, alert: str, where: str) -> Callable[[], bool]:
        return lambda: (alert, where) in self.fired()

    def _scraped(self, daemon: WatchedDaemon) -> Callable[[], object]:
        """Return whether Prometheus has twice scraped the process that runs now."""
        begun = time.time()
        labels = f'{{instance="{daemon.target}"}}'
        started = f"flexd_start_time_seconds{labels} > {begun - 1} and timestamp(flexd_start_time_seconds{labels}) "
        return lambda: self.prometheus.query(f"({started}) and changes(timestamp(up{labels})[3s:1s]) > 0")

    def _train(self, daemon: WatchedDaemon, port: int = 0, attempt: str = "a1", **options: Any) -> Ranks:
        ranks = Ranks(
            port or daemon.port, attempt=attempt, identities=lambda who: replace(who, job=daemon.job), **options
        )
        ranks.__enter__()
        self._closed.append(ranks.stop)
        return ranks

    def _stream(self) -> Scenario:
        daemon = self.daemons["stream"]
        daemon.start()
        yield self._scraped(daemon)
        self._train(daemon)
        turn = 0
        while True:
            turn += 1
            daemon.messages(f"good{turn}", [_accesses([1, 2, 3]), _accesses([4, 5], 86_400.0)])
            daemon.messages(f"bad{turn}", [b"no message of flexd", _accesses([1, 10**9])])
            (damaged,) = daemon.messages(f"damaged{turn}", [_accesses([turn]) for _ in range(4)]).glob("*.log")
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 0xFF
            damaged.write_bytes(content)
            if turn == 3:
                snapshots = daemon.state / "snapshots"
                snapshots.rename(daemon.state / "moved")
                snapshots.write_text("a file")
            yield _passed(1.0)

    def _idle(self) -> Scenario:
        daemon = self.daemons["idle"]
        daemon.start()
        yield self._scraped(daemon)
        self._train(daemon)
        yield _passed(5.0)
        self._train(daemon, attempt="a2")
        while True:
            with contextlib.suppress(FlexdError, AssertionError, OSError), RawRank(daemon.port) as peer:
                peer.send(b"no message")
            yield _passed()

    def _proposes(self) -> Scenario:
        daemon = self.daemons["proposes"]
        daemon.start(f"thread.drift:{_WITHOUT_END}")
        yield self._scraped(daemon)
        ranks = self._train(daemon)
        ranks.reported = lambda _, report: replace(report, apply_seconds=report.step_seconds / 2)
        yield lambda: False

    def _moves(self) -> Scenario:
        daemon = self.daemons["moves"]
        daemon.start()
        yield self._scraped(daemon)
        ranks = self._train(daemon)
        yield lambda: ranks.placements[0].version > 3

        def without_last(rank: int, report: StepReport) -> StepReport | None:
            return None if rank == len(ranks.placements) - 1 else report

        ranks.reported = without_last
        yield self._fires("FlexdRanksDisagree", daemon.target)
        ranks.reported = lambda _, report: report
        ranks.moving.clear()
        yield self._fires("FlexdMigrationStuck", daemon.target)
        yield self._fires("FlexdPlanStale", daemon.target)
        ranks.moving.set()
        yield _passed(2.0)
        ranks.false_digests[1] = 7
        yield lambda: False

    def _fails(self) -> Scenario:
        def prepare(*_: object) -> object:
            raise MemoryError("no memory for a chunk")

        daemon = self.daemons["fails"]
        daemon.start()
        yield self._scraped(daemon)
        self._train(daemon, prepare_of_rank={1: prepare})
        while True:
            daemon.post("/v1/replan")
            yield _passed(1.0)

    def _churns(self) -> Scenario:
        daemon = self.daemons["churns"]
        daemon.start()
        yield self._scraped(daemon)
        (port,) = free_ports(1)
        network = TcpCut(port, daemon.port)
        self._closed.append(network.close)
        ranks = self._train(daemon, port)
        churns = self._fires("FlexdEpochsChurn", daemon.target)
        while not churns():
            # Ranks that are cut off before they are in wait longer and longer.
            yield lambda: all(rank.agent.state.startswith("joined epoch") for rank in ranks.ranks)
            network.disconnect()
            network.mend()
        daemon.kill()
        yield lambda: False

    def _missing(self) -> Scenario:
        daemon = self.daemons["missing"]
        daemon.start()
        yield self._scraped(daemon)
        ranks = self._train(daemon)
        ranks.ranks[-1].agent.stop(10)
        yield lambda: False

    def _disk(self) -> Scenario:
        daemon = self.daemons["disk"]
        daemon.start()
        yield self._scraped(daemon)
        temporary = daemon.state / "decisions.json.tmp"
        temporary.mkdir()
        daemon.post("/v1/pause")
        decisions_fail = self._fires("FlexdDecisionsFail", daemon.target)
        while not decisions_fail():
            self._knock(daemon.port)
            yield _passed()
        temporary.rmdir()
        # To open a pipe that nobody reads does not return, as on a volume that hangs.
        os.mkfifo(temporary)
        while True:
            self._knock(daemon.port)
            yield _passed()

    @staticmethod
    def _knock(port: int) -> None:
        with contextlib.suppress(FlexdError, OSError):
            ChannelClient.connect("127.0.0.1", port, ChannelCredentials(b"another secret, as long"), 5.0).close()
        with contextlib.suppress(OSError), raw_connection(port) as sock:
            sock.sendall(encode_hello(Versions(900, 901), bytes(NONCE_BYTES)))
            is_closed(sock)

    def _restarts(self) -> Scenario:
        daemon = self.daemons["restarts"]
        daemon.start("thread.counting:1:kill")
        yield self._scraped(daemon)
        daemon.messages("p", [_accesses([1, 2, 3])])
        yield daemon.ended
        daemon.start("thread.counting:1:kill")
        yield daemon.ended
        daemon.start()
        yield self._fires("FlexdOffsetsSkipped", daemon.target)
        daemon.messages("q", [_accesses([1, 2, 3])])
        yield lambda: len(list((daemon.state / "snapshots").glob("*.flexd"))) > 1
        daemon.kill()
        newest = max((daemon.state / "snapshots").glob("*.flexd"))
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 0xFF
        newest.write_bytes(content)
        while True:
            daemon.start()
            yield self._scraped(daemon)
            yield _passed(1.0)
            daemon.kill()
