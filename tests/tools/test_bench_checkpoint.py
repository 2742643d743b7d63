"""The benchmark of checkpoints: its figures on a small table, and that its checks can fail."""

from __future__ import annotations

from pathlib import Path

from bench_checkpoint import Setting, checks_of, run


def test_figures_and_checks(tmp_path: Path) -> None:
    setting = Setting(rows=5_000, dim=8, ids=200, zipf=1.05, intervals=(1, 2))
    figures = run(setting, tmp_path)
    whole, first, second, dcp = figures["saves"]
    assert whole["rows"] == dcp["rows"] == 5_000
    assert 0 < first["rows"] < second["rows"] < 5_000
    assert first["rows"] <= 200
    assert first["bytes"] < second["bytes"] < dcp["bytes"]
    figures["saves"] = [{**save, "bytes": save["rows"] * setting.row_bytes} for save in figures["saves"]]
    assert all(entry["ok"] for entry in checks_of(setting, figures))
    figures["loads"]["series"]["differing"] = 1
    figures["saves"][1]["bytes"] *= 1.1
    assert [entry["name"] for entry in checks_of(setting, figures) if not entry["ok"]] == [
        "tensors that differ after loading: series", "bytes over those of the rows: changed in 1 steps"
    ]  # fmt: skip
