"""``tools/gpu_check.py`` without a GPU: its parts on the CPU."""

import subprocess
import sys

import pytest
import torch

from tests.support.repository import ROOT, child_environment
from tools import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    assert "GPUs: []" in capsys.readouterr().out


def test_every_mode_trains_equally_and_changes_the_tables() -> None:
    expected = {pooled: gpu_check.train(0, 1, "cpu", gpu_check.Mode("", pooled=pooled)) for pooled in (False, True)}
    assert not torch.equal(expected[False]["items"], expected[True]["items"])
    for mode in gpu_check.MODES:
        tables = gpu_check.train(0, 1, "cpu", mode)
        assert {name: tuple(table.shape) for name, table in tables.items()} == gpu_check._TABLES
        for name, table in tables.items():
            torch.testing.assert_close(table, expected[mode.pooled][name], rtol=0, atol=gpu_check.TOLERANCE)


@pytest.mark.long
def test_the_whole_command_runs_on_a_cpu() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=300, env=child_environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in gpu_check.MODES:
        for ranks in (1, 2):
            assert f"{ranks} rank(s), {mode.name}: largest difference from the CPU" in done.stdout
