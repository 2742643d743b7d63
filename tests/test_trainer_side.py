"""A trainer installs flexd with torch and numpy alone: nothing it imports may need the daemon's dependencies; and each
part of the stream imports only the libraries that it needs."""

import os
import subprocess
import sys

from tests.support.repository import ROOT

SCRIPT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    names = {names}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch, flexd
embedding = flexd.EmbeddingCollection(
    [flexd.EmbeddingTable("items", 100, 4)], optimizer=flexd.SGD(lr=0.1), layout=flexd.RankLayout(1, 1)
)
connection = flexd.connect(embedding, "127.0.0.1:1", job="nobody-listens")
before = embedding.gather_table("items")[3].clone()
rows = embedding({{"items": flexd.Jagged(torch.tensor([3]), torch.tensor([1]))}})["items"]
rows.values.sum().backward()
embedding.optimizer.step()
connection.close(2.0)
assert torch.allclose(embedding.gather_table("items")[3], before - 0.1)
print("trained")
"""

DAEMON_DEPENDENCIES = (
    "pydantic", "yaml", "numba", "datasketches", "pyarrow", "kafka", "fastapi", "uvicorn", "httpx", "prometheus_client",
    "typer", "rich", "scipy", "matplotlib",
)  # fmt: skip


def test_training_needs_torch_and_numpy_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(names=set(DAEMON_DEPENDENCIES))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


_HEAVY = {"torch", "numba", "pydantic"}
_PARTS = (
    (("flexd.stream.types", "flexd.stream.file_log.log"), {*_HEAVY, "kafka", "pyarrow"}),
    (("flexd.stream.codec", "flexd.stream.publisher", "flexd.stream.synthetic"), {*_HEAVY, "kafka"}),
    (("flexd.stream.kafka.source",), _HEAVY),
)
"""Parts in an order in which each may import more than those before it."""


def printed(code: str, *path: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return done.stdout


def test_a_part_imports_only_what_it_needs() -> None:
    code = "import importlib, sys\n" + "".join(
        f"for name in {names}:\n    importlib.import_module(name)\nprint(sorted({absent} & set(sys.modules)))\n"
        for names, absent in _PARTS
    )
    assert printed(code).splitlines() == ["[]"] * len(_PARTS)


def test_a_pyarrow_that_refuses_this_numpy_is_named_with_what_to_install(tmp_path):
    refusal = "pyarrow requires NumPy 2.0 or newer, found 1.26.4"
    (tmp_path / "pyarrow.py").write_text(f"raise ImportError({refusal!r})\n")
    shown = printed(
        "import flexd; from flexd.core.usage_warnings import USAGE_WARNINGS\n"
        "try:\n    flexd.Publisher\nexcept ImportError as error:\n    print(error)\n"
        "print([(each.kind, each.text) for each in USAGE_WARNINGS.reports()])",
        str(tmp_path),
    )
    assert shown.count(refusal) == 2
    assert "pip install 'flexd[publisher]'" in shown
    assert "('numpy'," in shown, "a daemon that the rank connects to shows it"
