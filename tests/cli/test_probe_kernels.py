"""``flexd probe --kernels`` without a job: the file that it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexd.topology.kernel_file import read_kernels


def test_kernels_are_measured_without_a_job(flexd_command, tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    path = tmp_path / "kernels.json"
    done = flexd_command("probe", "--kernels", path, "--kernel-seconds", 0.2, "-o", "json")
    assert done.returncode == 0, done.stderr
    answer, measured = json.loads(done.stdout)["kernels"], read_kernels(path)
    assert answer["file"] == str(path)
    assert answer["sets"] == len(measured.sets) >= 1
    assert answer["kernels"] == measured.kernels == "fbgemm"
    assert (measured.update_seconds > 0).all()


def test_nothing_to_measure_is_refused(flexd_command, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "give --out FILE.yaml, --kernels FILE.json or both"),
        (("--kernels", tmp_path / "none" / "k.json"), "--kernels"),
        (("--kernels", tmp_path / "k.json", "--kernel-seconds", 0), "kernel budget of 0.0 s"),
    ):
        done = flexd_command("probe", *arguments)
        assert done.returncode != 0
        assert message in done.stderr
    assert not (tmp_path / "k.json").exists()
