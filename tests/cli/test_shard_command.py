"""``flexd shard``: sources of tables, the plan file, and what is refused."""

import json
from pathlib import Path

import numpy as np

import flexd
from flexd.cli.client import ExitCode
from flexd.core.placement import RankLayout


def test_a_list_becomes_a_plan(flexd_command, tmp_path: Path):
    tables = [{"name": f"t{i}", "rows": 50_000 * (i + 1), "dim": 64, "lookups": 20, "module": "bags"} for i in range(3)]
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    plan = tmp_path / "plan.json"
    done = flexd_command("shard", tmp_path / "tables.json", "--plan", plan, "-o", "json")
    assert done.returncode == 0, done.stderr
    pooling_at, written = json.loads(done.stdout), json.loads(plan.read_text())
    assert pooling_at == written | {"plan": str(plan)}
    assert set(written["modules"]["bags"]) == {f"t{i}" for i in range(3)}
    assert pooling_at["predicted"]["listed_step_seconds"] is None
    arrays = {"row": np.arange(900) % 3, "ts": np.arange(900), "table_rows": [150_000], "table_names": ["t2"]}
    np.savez(tmp_path / "trace.npz", **arrays)
    of_trace = flexd_command("shard", tmp_path / "tables.json", "--plan", plan, "--trace", tmp_path / "trace.npz")
    assert of_trace.returncode == 0, of_trace.stderr
    assert all(word in of_trace.stdout for word in ("no plan under", "bags t2"))
    assert json.loads(plan.read_text())["predicted"] != written["predicted"]


def test_sharding_types_for_a_flexd_trainer(flexd_command, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = [{"name": f"t{i}", "rows": 20 if i < 2 else 500_000, "dim": 64, "lookups": 30} for i in range(4)]
    tables.append({"name": "history", "rows": 500_000, "dim": 64, "lookups": 30, "bags": 0})
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    done = flexd_command("shard", "tables.json", "--for", "flexd", "-o", "json")
    assert done.returncode == 0, done.stderr
    pooling_at, written = json.loads(done.stdout), json.loads((tmp_path / "rules.json").read_text())
    assert pooling_at == written | {"plan": "rules.json"}
    rules = flexd.TableRules.read(tmp_path / "rules.json")
    assert rules.layout == RankLayout(2, 2)
    assert {rules.by_name[f"t{i}"].pooling_at for i in (2, 3)} == {"owner"}
    assert rules.by_name["history"].pooling_at is None
    text = flexd_command(
        "shard", "tables.json", "--for", "flexd", "--without", "table_wise", "--without", "table_row_wise"
    ).stdout
    assert "row_wise (owner)" in text
    assert "table_row_wise:" not in text
    assert "table_wise:" not in text


def test_a_function_is_called_in_the_working_directory(flexd_command, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def tables():\n"
        "    return [N(name='a', num_embeddings=900, embedding_dim=8, feature_names=['f'], data_type=N(name='FP32'))]\n"
        "def broken():\n    raise KeyError('no data')\n"
    )
    done = flexd_command("shard", "my_model:tables")
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "sharding.json").read_text())["modules"][""]) == ["a"]
    for source, message in (
        ("my_model:none", "no function 'none'"),
        ("no_module:f", "'no_module' cannot be imported"),
        ("my_model:broken", "KeyError: 'no data'"),
        ("none.csv", "none.csv: cannot be read"),
    ):
        done = flexd_command("shard", source)
        assert done.returncode == ExitCode.USAGE, done.stderr
        assert message in done.stderr
    assert flexd_command("shard", "my_model:tables", "--memory-gb", 0.000001).returncode == ExitCode.FAILED


def test_a_function_may_return_its_sharding_plan(flexd_command, tmp_path: Path, monkeypatch):
    """Attributes as of TorchRec's ShardingPlan: module path -> table -> sharding type and ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_model.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def config(name):\n"
        "    return N(name=name, num_embeddings=90_000, embedding_dim=64, feature_names=['f'],\n"
        "             data_type=N(name='FP32'), pooling='sum')\n"
        "tables = [config('a'), config('b')]\n"
        "lookups = {name: N(pooling_factors=[20.0], num_poolings=None, batch_sizes=[256]) for name in 'ab'}\n"
        "whole = {'': {'a': N(sharding_type='table_wise', ranks=[0]), 'b': N(sharding_type='row_wise', ranks=None)}}\n"
        "def plan():\n    return tables, lookups, N(plan=whole)\n"
        "def short():\n    return tables, N(plan={'': {'a': whole['']['a']}})\n"
    )
    done = flexd_command("shard", "planned_model:plan", "-o", "json")
    assert done.returncode == 0, done.stderr
    predicted = json.loads(done.stdout)["predicted"]
    assert predicted["listed_step_seconds"] > predicted["step_seconds"]
    done = flexd_command("shard", "planned_model:short")
    assert done.returncode == ExitCode.USAGE
    assert "no sharding of table 'b'" in done.stderr
