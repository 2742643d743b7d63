"""``flexd sketch export`` from a snapshot, without a daemon."""

from __future__ import annotations

import datasketches
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from flexd.cli.main import app
from flexd.config.load import load_config
from flexd.core.errors import SketchError, SnapshotError
from flexd.daemon.factory import sketch_settings
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_set import SketchSet


def test_export_reads_the_newest_whole_snapshot_and_leaves_unfinished_files(tmp_path):
    state = tmp_path / "state"
    document = {
        "job": "j",
        "tables": [{"name": "items", "rows": 3_000_000, "dim": 16}],
        "stream": {"source": {"kind": "file_log", "path": str(tmp_path / "log")}},
        "sketch": {"memory_bytes": 2**21, "half_life_seconds": None, "logarithmic": False},
        "state": {"dir": str(state)},
    }
    config = tmp_path / "flexd.yaml"
    config.write_text(yaml.safe_dump(document))
    checked = load_config(config)
    out = tmp_path / "items.cms"
    arguments = ["sketch", "export", "items", str(out), "-c", str(config)]
    with pytest.raises(SnapshotError):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    sketches = SketchSet.of(checked.keyspace().tables, sketch_settings(checked))
    sketches.ingest("items", np.repeat(np.arange(50), 4), 0, 1.7e9)
    meta, arrays = sketches.state()
    store = SnapshotStore(state / "snapshots", 3)
    store.save({"sketches": meta}, arrays)
    damaged = store.save({"sketches": meta}, arrays)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    unfinished = state / "snapshots" / ".snapshot-000000000003.tmp"
    unfinished.write_bytes(b"")
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "snapshot-000000000001" in result.output
    assert datasketches.count_min_sketch.deserialize(out.read_bytes()).get_estimate(49) == 4
    assert unfinished.exists()
    with pytest.raises(SketchError):
        CliRunner().invoke(app, [*arguments, "--kind", "lengths"], catch_exceptions=False)
