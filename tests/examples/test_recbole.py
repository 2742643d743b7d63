"""RecBole's own trainer with its item table in flexd: losses and metrics are those of RecBole in one process."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys

import pytest

from flexd.demo.processes import free_ports
from tests.support.repository import ROOT

EXAMPLES = ROOT / "examples"


def printed(*command: str) -> list[float]:
    """Return the figures that a script prints. Lines of two ranks may be in one."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(number) for number in re.findall(r"\d+\.\d{10}", done.stdout)]


@pytest.mark.long
@pytest.mark.parametrize("learner", ["adam", "sgd"])
@pytest.mark.parametrize("loss", ["BPR", "CE"])
def test_two_ranks_have_the_losses_and_metrics_of_plain_recbole(loss: str, learner: str) -> None:
    pytest.importorskip("recbole")
    options = ("--loss", loss, "--learner", learner)
    plain = printed("examples/recbole_before.py", *options)
    assert len(plain) == 3 + 2, "losses of three epochs and two metrics"
    assert plain[2] < 0.8 * plain[0], "training must reduce the loss"
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_ports(1)[0]))
    of_ranks = printed(*launch, "examples/recbole_sasrec.py", *options)
    assert sorted(of_ranks) == pytest.approx(sorted(plain * 2), abs=1e-9, rel=0)


def difference() -> list[str]:
    names = ("examples/recbole_before.py", "examples/recbole_sasrec.py")
    sides = [(ROOT / name).read_text().splitlines() for name in names]
    return list(difflib.unified_diff(*sides, *names, lineterm="", n=1))


def test_the_difference_is_under_30_lines_and_the_docs_show_it() -> None:
    changed = [line for line in difference() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) < 30, "\n".join(changed)
    shown = (ROOT / "docs" / "frameworks.md").read_text().split("```diff\n")[1].split("```")[0]
    assert shown == "\n".join(difference()) + "\n", "docs/frameworks.md shows another difference"
