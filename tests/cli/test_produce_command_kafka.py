"""``flexd produce`` to a real broker: the daemon's source reads the trace; without a broker the exit status is 4."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from tansu_broker import TansuBroker

from flexd.cli.exit_codes import ExitCode
from flexd.cli.produce_command import _Progress
from flexd.config.load import load_config
from flexd.daemon.factory import make_source
from flexd.stream.codecs.codec import decode
from flexd.stream.trace import Trace, load_trace
from flexd.stream.types import AccessBatch
from tests.support.until import until

EVENTS, MESSAGE = 1000, 64
TOPIC, PARTITIONS = "accesses", 3


@pytest.fixture
def broker() -> Iterator[TansuBroker]:
    with TansuBroker(topics={TOPIC: PARTITIONS}) as broker:
        yield broker


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    path = tmp_path / "events.npz"
    np.savez(
        path, row=random.integers(0, 50, EVENTS), table=random.integers(0, 2, EVENTS), ts=np.arange(EVENTS) + 1.5e9,
        table_rows=np.array([50, 60]), table_names=np.array(["items", "users"]),
    )  # fmt: skip
    return path


def configuration(directory: Path, broker: str) -> Path:
    path = directory / "flexd.yaml"
    document = {
        "job": "j",
        "tables": [{"name": "items", "rows": 50, "dim": 4}, {"name": "users", "rows": 60, "dim": 4}],
        "stream": {"source": {"kind": "kafka", "bootstrap_servers": broker, "topic": TOPIC, "group_id": "daemon"}},
    }
    # The daemon's own: a consumer's, and one that both have.
    document["stream"]["source"]["client_options"] = {"fetch_max_wait_ms": 400, "metadata_max_age_ms": 60_000}
    path.write_text(yaml.safe_dump(document))
    return path


def read_by_the_daemons_source(config_file: Path, accesses: int) -> tuple[Counter, list[AccessBatch]]:
    """Return (times each row of a table came, the batches) as the daemon's own source delivers them."""
    source = make_source(load_config(config_file, {}))
    rows: Counter = Counter()
    batches: list[AccessBatch] = []

    def read(seconds: float) -> None:
        for message in source.poll(seconds):
            for batch in decode(message.payload, 2**20):
                rows.update((batch.table, row) for row in batch.rows.tolist())
                batches.append(batch)

    def enough() -> bool:
        read(0.2)
        return rows.total() >= accesses

    try:
        until(enough, 60.0, lambda: f"{rows.total()} accesses; {source.problem}")
        # A message that was sent twice would come now.
        read(1.0)
    finally:
        source.close()
    return rows, batches


def expected(events: Trace) -> Counter:
    return Counter(zip((events.table_names[i] for i in events.table), events.row.tolist(), strict=True))


def test_the_daemons_source_reads_back_what_was_produced(flexd_command, broker, trace, tmp_path, monkeypatch):
    monkeypatch.setattr("flexd.cli.produce_command.MESSAGE_ACCESSES", MESSAGE)
    config = configuration(tmp_path, broker.bootstrap_servers)
    done = flexd_command("produce", trace, "-c", config, "-o", "json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stderr == ""
    summary = json.loads(done.stdout)
    messages = -(-EVENTS // MESSAGE)
    assert (summary["messages"], summary["accesses"], summary["failed"]) == (messages, EVENTS, 0)
    assert summary["target"] == f"topic {TOPIC} at {broker.bootstrap_servers}"
    rows, _ = read_by_the_daemons_source(config, EVENTS)
    assert rows == expected(load_trace(trace))


def test_a_broker_that_goes_away_in_the_middle_is_exit_status_4(flexd_command, broker, trace, monkeypatch):
    shown = _Progress.__call__

    def kill_at_half(self: _Progress, sent: int) -> None:
        if sent == EVENTS // 2:
            broker.kill()
        shown(self, sent)

    monkeypatch.setattr(_Progress, "__call__", kill_at_half)
    monkeypatch.setattr("flexd.cli.produce_command.MESSAGE_ACCESSES", 50)
    done = flexd_command("produce", trace, "--kafka", broker.bootstrap_servers, "--topic", TOPIC, "--timeout", 1)
    assert done.returncode == ExitCode.REFUSED, done.stderr
    assert done.stdout == ""
    error, remedy = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "remedy: "))]
    assert "not delivered within 1 s" in error
    assert "1,000 of 1,000 accesses were sent, the last may be lost" in error
    assert broker.bootstrap_servers in remedy
