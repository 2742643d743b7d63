"""The README's commands, as they stand there, in a clean checkout of what is committed; and docs/tutorial.md, line by
line."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from flexd.demo.processes import free_ports
from tests.support.repository import ROOT

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]

CONTROL_PORT = "29400"
"""In the README's commands; rewritten, as another daemon may run on the machine."""
FOREIGN = ("FLEXD", "MAKE", "MFLAGS", "PYTEST", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that would lead out of the checkout."""
SECONDS = 280.0
BLOCK = re.compile(r"```(python|diff|yaml|bash)\n(.*?)```", re.DOTALL)
FILES = {"python": "train.py", "diff": "flexd.diff", "yaml": "tutorial.yaml"}


def follow(script: Path, directory: Path, environment: dict[str, str]) -> str:
    """Run a script of bash and return what it prints; what it leaves in the background is ended.

    Raises:
        AssertionError: it failed; the text has the ends of the logs in the directory.
    """
    shown = directory / "shown.log"
    with shown.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-e", str(script)], cwd=directory, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True, env=environment,
        )  # fmt: skip
    try:
        process.wait(SECONDS)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                time.sleep(2.0)
            except ProcessLookupError:
                break
    logs = "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(directory.glob("*.log")))
    assert process.returncode == 0, logs
    return shown.read_text(errors="replace")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a ``.venv`` of this interpreter's packages, in which ``make`` installs nothing."""
    if not (ROOT / ".git").exists():
        pytest.skip("the tests do not run in a git checkout")
    target = tmp_path_factory.mktemp("newcomer") / "flexd"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], timeout=60, check=True)
    home = target / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], timeout=60, check=True)
    packages = next(home.glob("lib/python*/site-packages"))
    # As path lines, the borrowed directories' own .pth files are not read: an editable flexd there stays out of sight.
    lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (packages / "newcomer.pth").write_text("\n".join([str(target), *lent]) + "\n")
    scripts = tomllib.loads((target / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry in {**scripts, "torchrun": "torch.distributed.run:main"}.items():
        module, _, function = entry.partition(":")
        script = home / "bin" / name
        script.write_text(f"#!{home}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        script.chmod(0o755)
    for stamp in (".installed", *([".torchrec"] if find_spec("torchrec") else [])):
        (home / stamp).touch()
    return target


def needs_torchrec() -> None:
    if find_spec("torchrec") is None:
        pytest.skip("TorchRec is not here: make torchrec")


def block_with(checkout: Path, text: str) -> str:
    blocks = re.findall(r"```bash\n(.*?)```", (checkout / "README.md").read_text(), flags=re.DOTALL)
    return next(block for block in blocks if text in block)


def follow_in(checkout: Path, commands: str, **environment: str) -> str:
    """Run commands in the checkout as typed into bash, on ports that nobody else uses; return what they print."""
    control, http, rendezvous = free_ports(3)
    ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    ours |= {"PET_MASTER_PORT": str(rendezvous), "OMP_NUM_THREADS": "1", **environment}
    if CONTROL_PORT in commands:  # the demo finds ports for itself
        ours |= {"FLEXD__CONTROL__LISTEN_PORT": str(control), "FLEXD__SERVER__PORT": str(http)}
        ours["FLEXD_URL"] = f"http://127.0.0.1:{http}"
    script = checkout / "commands.sh"
    script.write_text(commands.replace(CONTROL_PORT, str(control)))
    return follow(script, checkout, ours)


def test_from_a_clone_to_the_end_of_the_demo(checkout: Path) -> None:
    command = next(line for line in block_with(checkout, "make demo").splitlines() if line.startswith("make demo"))
    shown = follow_in(checkout, command, DEMO="--steps 60 --batch-size 8", COLUMNS="120")
    for strategy in ("row-wise, no dedup", "flexd before the first plan", "flexd after the last plan"):
        assert strategy in shown
    assert not re.search(r"\bpip\b", shown), "nothing was to be installed"


def test_from_torchrec_types_to_the_first_migration(checkout: Path) -> None:
    needs_torchrec()
    shown = follow_in(checkout, block_with(checkout, "examples/torchrec_sasrec.py"))
    assert re.search(r"^ +nodes +2$", shown, re.MULTILINE), "flexd status"
    assert re.search(r"^ +rows +HOME [\d,]+, NODE [1-9]", shown, re.MULTILINE), "flexd status"
    assert re.search(r"^ +\S+ .* committed .* [1-9]", shown, re.MULTILINE), "flexd get history"
    assert not re.search(r"Traceback|failed|aborted", shown), shown[-3000:]


def test_the_tutorial_from_the_trainer_to_torchrec_again(tmp_path: Path) -> None:
    needs_torchrec()
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
    shown = follow(script, tmp_path, environment)
    assert re.search(r"rollback .* committed", shown)
    assert re.search(r"committed +[\d,]*[1-9]", shown)
    assert re.search(r"^  live +NODE$", shown, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", shown, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[1] < losses[0], "training with flexd went on from the checkpoint"
    assert losses[2] == pytest.approx(losses[1], rel=0.2), "training without flexd went on from its checkpoint"
