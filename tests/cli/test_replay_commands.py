"""``flexd advise``: the verdict, its sources, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from flexd.cli.client import ExitCode
from flexd.config.model import load_config
from flexd.daemon.config_file import sketch_settings
from flexd.sketch.sketch_set import SketchSet
from flexd.stream.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink
from flexd.stream.trace import synthetic_trace
from flexd.stream.types import AccessBatch
from tests.support.saved_sketches import save_sketches

SMALL = ("--steps", 8, "--batch", 16, "--history", 4, "--dim", 8)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "events.npz"
    events = synthetic_trace(12_000, 0)
    arrays = {"row": events.row, "ts": events.seconds, "table": events.table, "user": events.user}
    np.savez(path, table_rows=events.table_rows, table_names=np.array(events.table_names), **arrays)
    return path


def configured(tmp_path: Path, source: dict[str, object]) -> Path:
    file = tmp_path / "flexd.yaml"
    tables = [{"name": "item", "rows": 3_000, "dim": 8}]
    file.write_text(yaml.safe_dump({"job": "shop", "tables": tables, "stream": {"source": source}}))
    return file


def test_a_trace(flexd_command, trace: Path):
    measured = ("--step-ms", 50, "--computing-ms", 20, "--now", "dedup")
    done = flexd_command("advise", *measured, "--trace", trace, *SMALL, "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["exchange_seconds"] == pytest.approx(0.03)
    assert any("The prices were multiplied by" in line for line in found["messages"])
    assert set(found["options"]) == {
        "row_wise", "two_hops", "dedup_prefetch_pipeline", "two_hops_prefetch_pipeline", "copies",
        "copies_prefetch_pipeline",
    }  # fmt: skip
    for option in found["options"].values():
        assert option["step_seconds"]["expected"] + option["saved_seconds"]["expected"] == pytest.approx(0.05)
    affinity = found["affinity"]
    assert "affinity" in affinity["messages"][0].lower()
    assert {"loader", "dealing_loader", "by_user", "chain_bytes", "rehomed_rows", "move_bytes"} <= set(affinity)


def test_a_stream_is_read_to_its_end_and_nothing_is_written(flexd_command, tmp_path: Path):
    log = FileLogSink(tmp_path / "log", "p0")
    rows = np.random.default_rng(0).zipf(1.3, 5_000) % 3_000
    log.send(encode_arrow([AccessBatch("item", rows.astype(np.int64), 0, 1.7e9)]))
    log.close()
    file = configured(tmp_path, {"kind": "file_log", "path": str(tmp_path / "log")})
    before = sorted(tmp_path.rglob("*"))
    done = flexd_command("advise", "--step-ms", 5, "-c", file, "--scale", 1000, *SMALL, "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["accesses"] == "shop"
    assert found["accesses_per_step"] == 4 * 16 * 4
    assert found["options"]["two_hops"]["saved_seconds"]["expected"] > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_without_accesses_or_with_two_sources_the_options_are_named(flexd_command):
    for given, says in (
        ((), "no accesses to advise on"),
        (("--trace", __file__, "-c", __file__), "--trace and --config are given"),
    ):
        done = flexd_command("advise", "--step-ms", 5, *given)
        assert (done.returncode, says in done.stderr) == (ExitCode.USAGE, True), done.stderr
        assert "--trace FILE" in done.stderr


def test_of_a_tap_what_the_daemon_has_counted_is_read_beside_it(flexd_command, tmp_path: Path):
    file = configured(tmp_path, {"kind": "tap"})
    state = {"state": {"dir": str(tmp_path / "state")}}
    file.write_text(file.read_text() + yaml.safe_dump(state))
    done = flexd_command("advise", "--step-ms", 5, "-c", file, *SMALL)
    assert (done.returncode, "does not exist" in done.stderr) == (ExitCode.FAILED, True), done.stderr
    config = load_config(file)
    sketches = SketchSet(config.keyspace().tables, sketch_settings(config))
    snapshots = tmp_path / "state" / "snapshots"
    store = save_sketches(snapshots, sketches)
    done = flexd_command("advise", "--step-ms", 5, "-c", file, *SMALL)
    assert "no access was counted yet" in done.stderr
    rows = np.random.default_rng(0).zipf(1.3, 5_000) % 3_000
    sketches.ingest("item", rows.astype(np.int64), 0, 1.7e9)
    save_sketches(snapshots, sketches)
    (damaged := store.directory / "snapshot-000000000009.flexd").write_bytes(b"no snapshot")
    before = sorted(tmp_path.rglob("*"))
    done = flexd_command("advise", "--step-ms", 5, "-c", file, "--scale", 1000, *SMALL, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["options"]["two_hops"]["saved_seconds"]["expected"] > 0
    assert sorted(tmp_path.rglob("*")) == before
    for path in store.paths():
        path.write_bytes(b"no snapshot")
    done = flexd_command("advise", "--step-ms", 5, "-c", file, *SMALL)
    assert (done.returncode, damaged.name in done.stderr) == (ExitCode.FAILED, True), done.stderr


def test_the_answer_says_not_here_where_nothing_is_won(flexd_command, trace: Path):
    done = flexd_command("advise", "--step-ms", 1000, "--trace", trace, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("answer:\n  No gain expected: no option saves 2.00% of a step for certain.")
    assert "GPU-hours" in done.stdout
    wins = flexd_command("advise", "--step-ms", 30, "--trace", trace, "--scale", 100_000, *SMALL)
    assert wins.stdout.startswith("answer:\n  Worth it: "), wins.stdout


SIMULATE = (
    "simulate", "--zipf", 1.05, "--rows", 600, "--drift", 4, "--batch", 40, "--history", 4, "--steps", 16,
    "--interval-steps", 3, "--half-life-steps", 4, "--scale", 1e7,
)  # fmt: skip


def test_simulate_prints_its_result(flexd_command):
    first = flexd_command(*SIMULATE, "-o", "json")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert set(found["strategies"]) == {
        "row_wise", "row_wise_dedup", "two_hop", "static", "replanned", "oracle"
    }  # fmt: skip
    assert found["compared_steps"] == [12, 16]
    assert found["accesses_per_step"] == 4 * 40 * 5
    table = flexd_command(*SIMULATE)
    assert "flexd, re-planned" in table.stdout
    assert "answer:" in table.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--zipf", "1.0", "--trace", __file__],
        ["--zipf", "-1"],
        ["--zipf", "1", "--rows", "0"],
        ["--zipf", "1", "--batch", "100000000"],
        ["--trace", "/nonexistent.npz"],
        ["--replica-fraction", "1.5"],
        ["--preset", "x", "--topology", "y"],
        ["--half-life-steps", "0"],
        ["--steps", "3"],
        ["--dtype", "int8"],
    ],
)
def test_wrong_usage_of_simulate(flexd_command, arguments):
    done = flexd_command("simulate", *arguments)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr
