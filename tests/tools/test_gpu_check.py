"""``tools/gpu_check.py`` without a GPU; its training, on the CPU."""

from __future__ import annotations

import subprocess
import sys

import gpu_check
import pytest
import torch

from tests.support.repository import ROOT, child_environment


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_everything_is_skipped() -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=child_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU: exactness skipped, benchmarks skipped" in done.stdout


def test_its_training_changes_the_tables_and_does_not_depend_on_the_exchange() -> None:
    chain, direct = (gpu_check.train(0, 1, "cpu", exchange) for exchange in ("chain", "direct"))
    assert {name: tuple(table.shape) for name, table in chain.items()} == gpu_check._TABLES
    assert all(torch.equal(chain[name], direct[name]) for name in chain)
