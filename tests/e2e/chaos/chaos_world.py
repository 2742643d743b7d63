"""The processes of a chaos run: broker, daemon, training ranks, and the link between the last two."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from kafka import KafkaConsumer, TopicPartition
from tansu_broker import TansuBroker

from flexd.config.model import Config, load_config
from flexd.core.errors import CodecError
from flexd.core.supervision import VARIABLE
from flexd.demo.processes import free_ports
from flexd.stream.codec import decode
from flexd.stream.types import AccessBatch
from flexd.topology.files import load_preset, scale_model, write_cluster
from tests.e2e.chaos.chaos_processes import Child, Clock, ProcessServer
from tests.e2e.chaos.chaos_training import JOB, TABLES, WORLD
from tests.support.until import until


class TcpCut:
    """Forwards one loopback port to another, with interruptions."""

    def __init__(self, listen_port: int, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._open = True
        self.tamper: Callable[[bytes], bytes] | None = None
        """Changes each segment, in either direction."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._server = socket.create_server(("127.0.0.1", listen_port))
        threading.Thread(target=self._accept, daemon=True).start()

    def disconnect(self) -> None:
        """End all connections, and every new one until ``mend``."""
        self._open = False
        with self._lock:
            for end in self._sockets:
                _close(end)
            self._sockets.clear()

    def stall(self) -> None:
        """Keep connections and accept new ones, and forward no byte until ``mend``."""
        self._flowing.clear()

    def mend(self) -> None:
        self._open = True
        self.tamper = None
        self._flowing.set()

    def close(self) -> None:
        _close(self._server)
        self.disconnect()
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if not self._open:
                _close(client)
                continue
            try:
                target = socket.create_connection(("127.0.0.1", self._target_port), timeout=5.0)
                target.settimeout(None)
            except OSError:
                _close(client)
                continue
            with self._lock:
                self._sockets |= {client, target}
            for source, sink in ((client, target), (target, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                self._flowing.wait()
                tamper = self.tamper
                sink.sendall(data if tamper is None else tamper(data))
        _close(source)
        _close(sink)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


TOPIC = "accesses"
PARTITIONS = 2
CONTROL_SECONDS = 3.0
"""Deadline of every wait on the control channel."""
MAX_MESSAGE_BYTES = 2**18
"""Of the stream; a rank's messages have a few kilobytes."""
STATE_BYTES = "8m"
"""More than a daemon keeps; a file that grows without bound fills it within minutes."""
BALLAST = "ballast"
"""File of a fault that fills the state directory."""
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


class ChaosWorld:
    """A context manager. Ranks reach the daemon through ``link``.

    Args:
        next_server: starts processes of the next version; by default there is none.
        step_seconds: a training step takes at least so long.

    Attributes:
        daemon_server, rank_servers: version of the daemon and of the ranks that start next.
        config_file, control_port, url: of the daemon; the last is its admin API.
        has_disk: the state directory is a small disk of its own (root only).
    """

    def __init__(
        self, directory: Path, seed: int, server: ProcessServer, *,
        next_server: ProcessServer | None = None, step_seconds: float = 0.02,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.seed = seed
        self.server = self.daemon_server = server
        self.next_server = next_server
        self.rank_servers = [server] * WORLD
        self.attempts: list[Attempt] = []
        self.lives = 0
        self.daemon: Child | None = None
        self._step_seconds = step_seconds
        self.control_port, self._http_port, self.link_port = free_ports(3)
        self.config_file = directory / "flexd.yaml"
        self.url = f"http://127.0.0.1:{self._http_port}"
        self.state = directory / "state"
        self.clock = Clock(directory / "clock")
        self.broker = TansuBroker(topics={TOPIC: PARTITIONS})
        self.link = TcpCut(self.link_port, self.control_port)
        self.has_disk = False
        self._write_files()

    def __enter__(self) -> ChaosWorld:
        try:
            self._mount()
            self.broker.start()
            self.start_daemon()
            self.launch()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ranks = (child for attempt in self.attempts for child in attempt.children)
        for child in (self.daemon, *ranks):
            if child is not None and child.alive:
                child.kill()
        self.link.close()
        self.broker.__exit__(None, None, None)
        if self.has_disk:
            subprocess.run(["umount", "-l", str(self.state)], check=False, capture_output=True)

    @property
    def config(self) -> Config:
        return load_config(self.config_file, {})

    @property
    def job(self) -> Attempt:
        return self.attempts[-1]

    def status(self) -> dict[str, Any]:
        """Return the daemon's status; empty while it does not respond."""
        try:
            # Plain HTTP on loopback: to read the certificates of authorities would take 30 ms of every look.
            answer = httpx.get(f"{self.url}/v1/status", timeout=1.0, verify=False)
            status: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return status

    def ready(self) -> bool:
        return bool(self.status().get("ready"))

    def start_daemon(self, fault_points: str = "", **overrides: str) -> Child:
        """Start the daemon again; it may end at once if a fault point is armed."""
        self.lives += 1
        # The broker would make the next life wait for the dead member of the last one; positions are the snapshot's.
        group = {"FLEXD__STREAM__SOURCE__GROUP_ID": f"daemon-{self.lives}"}
        self.daemon = self.daemon_server.start(
            "tests.e2e.chaos.chaos_processes:daemon", self.directory / "daemon.log",
            {**group, VARIABLE: fault_points, **overrides},
            config_file=str(self.config_file), clock_file=str(self.clock.path),
        )  # fmt: skip
        return self.daemon

    def launch(self) -> Attempt:
        """Starts the ranks, from the newest checkpoint if there is one."""
        found = [int(match[1]) for path in self.directory.iterdir() if (match := _CHECKPOINT.match(path.name))]
        first = max(found, default=0)
        name = f"a{len(self.attempts) + 1}"
        (store_port,) = free_ports(1)
        children = [
            self.rank_servers[rank].start(
                "tests.e2e.chaos.chaos_training:rank", self.directory / f"{name}-{rank}.log",
                directory=str(self.directory), rank=rank, attempt=name, store_port=store_port,
                control=f"127.0.0.1:{self.link_port}", secret_file=str(self.directory / "secret-of-ranks"),
                bootstrap=self.broker.bootstrap_servers, topic=TOPIC,
                checkpoint=str(self.directory / f"checkpoint-{first}") if first else None, seed=self.seed,
                step_seconds=self._step_seconds,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        self.attempts.append(Attempt(name, first, children, self.directory))
        return self.job

    def check_ranks(self) -> None:
        """AssertionError with its log if a rank has ended."""
        for child in self.job.children:
            assert child.alive, f"a training rank has ended ({child.exit_code}):\n{child.tail()}"

    def steps_on(self, steps: int, seconds: float = 45.0) -> None:
        """Waits until every rank has gone on by so many steps."""
        wanted = self.job.done + steps

        def moved() -> bool:
            self.check_ranks()
            return self.job.done >= wanted

        until(moved, seconds, lambda: f"training does not go on:\n{self._stacks()}")

    def moved_on(self, seconds: float = 60.0) -> None:
        """Waits until the daemon is ready and every rank has applied a chunk that it has not yet."""
        job, version = self.job, self.job.version

        def again() -> bool:
            self.check_ranks()
            return job.version > version and self.ready()

        until(again, seconds, self.where)

    def log(self) -> Iterator[bytes]:
        """The messages in the broker, as of now."""
        consumer = KafkaConsumer(bootstrap_servers=self.broker.bootstrap_servers, group_id=None)
        try:
            partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(partitions)
            consumer.seek_to_beginning()
            ends = consumer.end_offsets(partitions)
            while any(consumer.position(partition) < ends[partition] for partition in partitions):
                for records in consumer.poll(timeout_ms=500).values():
                    yield from (record.value for record in records)
        finally:
            consumer.close()

    def batches(self) -> Iterator[list[AccessBatch]]:
        """Those of each message in the broker; none of a message that no rank wrote."""
        for message in self.log():
            try:
                yield decode(message, MAX_MESSAGE_BYTES)
            except CodecError:
                yield []

    def publishing_ranks(self) -> set[int]:
        """Those with accesses in the broker."""
        return {batch.source_rank for batches in self.batches() for batch in batches}

    def where(self) -> str:
        """For the message of a failure."""
        job = self.job
        job.follow()
        agents = [steps[-1].agent if steps else "-" for steps in job.steps]
        log = self.daemon.tail(25) if self.daemon else ""
        return f"attempt {job.name}, step {job.done}, version {job.version}\nagents {agents}\n{self.status()}\n{log}"

    def _stacks(self) -> str:
        """Where the ranks are."""
        for child in self.job.children:
            child.signal(signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{child.tail(60)}" for rank, child in enumerate(self.job.children))

    @contextmanager
    def publishing_held(self) -> Iterator[None]:
        """Ranks train on but publish nothing; entered when what they had published is in the broker."""
        hold = self.directory / "hold"
        hold.touch()
        try:
            self.steps_on(25)
            yield
        finally:
            hold.unlink()

    def stop_training(self) -> list[dict[str, Any]]:
        """Let the ranks finish and return their final reports."""
        (self.directory / "stop").touch()
        for child in self.job.children:
            child.wait(60.0)
            assert child.exit_code == 0, child.tail()
        self.job.follow()
        return [json.loads((self.directory / f"{self.job.name}-{rank}.done").read_text()) for rank in range(WORLD)]

    def stop_daemon(self) -> None:
        """SIGTERM; AssertionError if it takes longer than it promises, or ends with another code than 0."""
        self.daemon.signal(signal.SIGTERM)
        self.daemon.wait(25.0)
        assert self.daemon.exit_code == 0, self.daemon.tail()

    def _mount(self) -> None:
        self.state.mkdir(mode=0o700)
        if os.geteuid() == 0:
            options = ["-t", "tmpfs", "-o", f"size={STATE_BYTES},mode=0700", "tmpfs", str(self.state)]
            self.has_disk = subprocess.run(["mount", *options], check=False, capture_output=True).returncode == 0

    def _write_files(self) -> None:
        for name in ("secret", "secret-of-ranks"):
            (self.directory / name).write_text("a secret of the chaos run")
        topology = self.directory / "topology.yaml"
        # Steps are tiny: with real latencies no replica would pay, and nothing would ever be migrated.
        write_cluster(scale_model(load_preset("azure-a100-200g"), 1e9), topology)
        config: dict[str, Any] = {
            "job": JOB,
            "tables": [
                {"name": name, "rows": rows, "dim": dim, "dtype": "float64", "optimizer": "rowwise_adagrad"}
                for name, (rows, dim, _) in TABLES.items()
            ],
            "stream": {
                "source": {
                    "kind": "kafka", "bootstrap_servers": self.broker.bootstrap_servers, "topic": TOPIC,
                    "session_timeout_seconds": 3.0, "connect_timeout_seconds": 3.0,
                },
                "poll_seconds": 0.05, "max_message_bytes": MAX_MESSAGE_BYTES, "dead_letter_bytes": 2**17,
            },
            "sketch": {"memory_bytes": 2**22, "half_life_seconds": 0.5, "max_future_seconds": 1e6},
            "topology": {"file": str(topology)},
            "planner": {
                "interval_seconds": 0.4, "min_spacing_seconds": 0.1, "horizon_steps": 1e9, "min_samples": 1_000,
                "min_coverage": 0.0, "drift_threshold": None, "min_saving": {"seconds": 0.0, "share": 0.0},
                "verify_budget_steps": 0,
            },
            "control": {
                "timeout_seconds": CONTROL_SECONDS, "chunk_rows": 24,
                "secret_file": str(self.directory / "secret"),
            },
            "state": {"dir": str(self.state), "snapshot_interval_seconds": 0.3},
            "shutdown_seconds": 10.0,
        }  # fmt: skip
        config["control"]["listen_port"], config["server"] = self.control_port, {"port": self._http_port}
        self.config_file.write_text(yaml.safe_dump(config, sort_keys=False))


@dataclass(frozen=True)
class Step:
    """Record of one step of one rank; ``at`` is CLOCK_MONOTONIC, which all processes of a machine share."""

    step: int
    loss: float
    version: int
    digest: int
    bit_equal: bool
    seconds: float
    at: float
    agent: str
    misuse: str = ""


class Attempt:
    """One launch of the training ranks."""

    def __init__(self, name: str, first_step: int, children: list[Child], directory: Path) -> None:
        self.name = name
        self.first_step = first_step
        self.children = children
        self.steps: list[list[Step]] = [[] for _ in children]
        """By rank."""
        self._files = [directory / f"{name}-{rank}.jsonl" for rank in range(len(children))]
        self._read = [0] * len(children)

    def follow(self) -> None:
        """Reads on what the ranks have written; half a line is left for the next time."""
        for rank, path in enumerate(self._files):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[rank] += len(whole) + 1
                self.steps[rank] += [Step(**json.loads(line)) for line in whole.splitlines()]

    @property
    def done(self) -> int:
        """Steps that every rank has done."""
        self.follow()
        return min(len(steps) for steps in self.steps)

    @property
    def version(self) -> int:
        """Placement version after the newest step that every rank has done."""
        return min((steps[self.done - 1].version for steps in self.steps), default=0) if self.done else 0
