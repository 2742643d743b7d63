"""A trainer installs flexd with torch and numpy alone: nothing it imports may need the daemon's dependencies."""

from __future__ import annotations

import subprocess
import sys

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
