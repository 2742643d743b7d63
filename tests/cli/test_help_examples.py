"""Every command's help has an example, and the example does what it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from flexd.cli.main import app
from flexd.config.load import load_config
from flexd.daemon.config_file import sketch_settings
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from tests.support.repository import ROOT as REPOSITORY

SMALLER = {
    "simulate": ["--steps", "8", "--batch", "4", "--history", "2"],
    "advise": ["--steps", "8", "--batch", "4", "--history", "2", "--nodes", "1", "--local-ranks", "2"],
}
"""Options that make a long example short."""
PARSED_ONLY = {
    "run": "runs until it is stopped: tests/e2e",
    "demo": "trains: tests/e2e/test_demo_runs.py",
    "probe": "needs ranks: tests/topology/test_probe.py",
}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    # Typer may carry its own copy of click: a group is what has commands.
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        if not below.hidden:
            yield from leaves(below, (*path, name))


ROOT = typer.main.get_command(app)
COMMANDS = dict(leaves(ROOT))


def examples(command: Any) -> list[str]:
    return re.findall(r"Example: +(.+)", command.help or "")


CASES = [(path, line) for path, command in COMMANDS.items() for line in examples(command)]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_of_itself(path):
    found = examples(COMMANDS[path])
    assert found, f"flexd {' '.join(path)} has no 'Example: flexd ...' in its help"
    for line in found:
        assert f"flexd {' '.join(path)}" in line


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files that the examples name: a trace, the configurations, and a snapshot of the laptop's daemon."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    rows = np.tile(np.arange(20), 20)
    np.savez(
        tmp_path / "events.npz", row=rows, ts=np.arange(len(rows)) + 1.7e9, table_rows=np.array([100_000]),
        table_names=np.array(["items"]),
    )  # fmt: skip
    (tmp_path / "tables.csv").write_text(
        "fqn,sharding,sum_pooling_factor,sum_num_poolings,output,emb_dim,hash_size,n_shards,ranks,batch\n"
        "bags.items,TW,30,1,pooled,64,100000,1,3,512\n"
    )
    config = load_config(Path("configs/laptop.yaml"))
    sketches = SketchSet(config.keyspace().tables, sketch_settings(config))
    sketches.ingest("items", rows, 0, 1.7e9, np.array([len(rows)]))
    meta, arrays = sketches.state()
    store = SnapshotStore(tmp_path / config.state.dir / "snapshots", 20)
    saved = {"sketches": meta, "positions": {"p0": 1}, "generation": 1, "saved": {}}
    store.save(saved, arrays)
    return tmp_path


@pytest.mark.parametrize(("path", "line"), CASES, ids=[line for _, line in CASES])
def test_the_example_runs(path, line, workplace, flexd_command, url):
    words = shlex.split(line)
    arguments = words[words.index("flexd") + 1 :]
    if path[0] in PARSED_ONLY:
        command, rest = COMMANDS[path], arguments[len(path) :]
        with command.make_context(path[-1], rest) as context:
            assert context.params
        return
    done = flexd_command(*arguments, *SMALLER.get(" ".join(path), []), FLEXD_URL=url)
    assert "Traceback" not in done.stderr
    assert done.returncode in ((0, 7) if path == ("doctor",) else (0,)), (done.stdout, done.stderr)
    assert done.stdout.strip()
