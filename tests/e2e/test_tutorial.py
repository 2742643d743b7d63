"""docs/tutorial.md, followed line by line: its files are written, its commands run in one shell."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexd.demo.processes import free_ports
from tests.support.repository import ROOT
from tests.support.shell import follow

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]

BLOCK = re.compile(r"```(python|diff|yaml|bash)\n(.*?)```", re.DOTALL)
FILES = {"python": "train.py", "diff": "flexd.diff", "yaml": "tutorial.yaml"}
SECONDS = 240.0


def test_the_tutorial_from_the_trainer_to_torchrec_again(tmp_path: Path) -> None:
    if find_spec("torchrec") is None:
        pytest.skip("TorchRec is not installed: make torchrec")
    control, http, kafka, rendezvous = free_ports(4)
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for port, ours in (("29400", control), ("9092", kafka)):  # others on this machine may use the tutorial's
        text = text.replace(port, str(ours))
    text = text.replace("tansu_broker.py", f"tansu_broker.py --port {kafka}")
    blocks = BLOCK.findall(text)
    for kind, content in blocks:
        if kind in FILES:
            (tmp_path / FILES[kind]).write_text(content)
    script = tmp_path / "commands.sh"
    script.write_text("set -x\n" + "".join(content for kind, content in blocks if kind == "bash"))
    for folder in ("examples", "tools"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLEXD")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "PET_MASTER_PORT": str(rendezvous), "FLEXD__SERVER__PORT": str(http),
        "FLEXD_URL": f"http://127.0.0.1:{http}", "COLUMNS": "100",
    }  # fmt: skip
    shown = follow(script, tmp_path, environment, SECONDS)
    assert re.search(r"rollback .* committed", shown)
    assert re.search(r"committed +[\d,]*[1-9]", shown)
    assert re.search(r"^  live +NODE$", shown, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", shown, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[1] < losses[0], "training with flexd went on from the checkpoint"
    assert losses[2] == pytest.approx(losses[1], rel=0.2), "training without flexd went on from its checkpoint"
