"""A newcomer's way through the README: a clean checkout, the README's own commands in it, and how long they take."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CONTROL_PORT = "29400"
"""In the README's commands; rewritten, as another daemon may run on the machine."""


class NewcomerError(Exception):
    """A step failed or passed its deadline; the text has what it printed last."""


@dataclass(frozen=True)
class Went:
    """Seconds until the line that was looked for (or the end, without one), and all that was printed."""

    seconds: float
    output: str


def is_checkout(source: Path = ROOT) -> bool:
    return (source / ".git").exists()


def clean_checkout(source: Path, target: Path, seconds: float = 60.0) -> None:
    """``git clone`` of what is committed. Raises NewcomerError."""
    command = ["git", "clone", "--quiet", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise NewcomerError(f"git clone: {done.stderr}")


def borrow_environment(checkout: Path, seconds: float = 60.0) -> None:
    """Gives the checkout a ``.venv`` with the packages of the running interpreter, so that ``make`` installs nothing.

    flexd itself is the checkout's. TorchRec counts as installed where it can be imported. Raises NewcomerError.
    """
    home = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], timeout=seconds, check=True)
    packages = next(home.glob("lib/python*/site-packages"))
    # As path lines, the borrowed directories' own .pth files are not read: an editable flexd there stays out of sight.
    lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (packages / "newcomer.pth").write_text("\n".join([str(checkout), *lent]) + "\n")
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry in {**scripts, "torchrun": "torch.distributed.run:main"}.items():
        module, _, function = entry.partition(":")
        script = home / "bin" / name
        script.write_text(f"#!{home}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        script.chmod(0o755)
    for stamp in (".installed", *([".torchrec"] if find_spec("torchrec") else [])):
        (home / stamp).touch()
    found = subprocess.run(
        [str(home / "bin" / "python"), "-c", "import flexd; print(flexd.__file__)"], cwd="/", capture_output=True,
        text=True, timeout=seconds, check=False, env=_environment(),
    )  # fmt: skip
    if not found.stdout.startswith(str(checkout)):
        raise NewcomerError(f"flexd is not the checkout's: {found.stdout}{found.stderr}")


def demo_command(checkout: Path) -> str:
    """The README's line that runs the demo."""
    return next(line for line in "\n".join(_blocks(checkout)).splitlines() if line.startswith("make demo"))


def first_migration_commands(checkout: Path) -> str:
    """The README's block that takes a trainer with TorchRec's types to its first migration."""
    (block,) = [block for block in _blocks(checkout) if "examples/torchrec_sasrec.py" in block]
    return block


def _blocks(checkout: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (checkout / "README.md").read_text(), flags=re.DOTALL)


def follow(
    commands: str, checkout: Path, *, marker: str = "", seconds: float, environment: Mapping[str, str] | None = None
) -> Went:
    """Runs commands in the checkout as typed into bash, on ports that nobody else uses.

    Args:
        marker: a regular expression; the time until a line of the output has it is what counts. Empty: until the end.
        seconds: deadline of all.
        environment: on top of ours without what would lead out of the checkout.

    Raises:
        NewcomerError: a command failed, the deadline passed, or the marker never came.
    """
    control, http, rendezvous = _free_ports(3)
    ports = {"PET_MASTER_PORT": str(rendezvous), "OMP_NUM_THREADS": "1"}
    if _CONTROL_PORT in commands:  # the demo finds ports for itself
        ports |= {
            "FLEXD__CONTROL__LISTEN_PORT": str(control), "FLEXD__SERVER__PORT": str(http),
            "FLEXD_URL": f"http://127.0.0.1:{http}",
        }  # fmt: skip
    environ = {**_environment(), **ports, **(environment or {})}
    log = checkout / "newcomer.log"
    begun = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-e", "-c", commands.replace(_CONTROL_PORT, str(control))], cwd=checkout, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environ,
        )  # fmt: skip
    seen: float | None = None
    try:
        while process.poll() is None:
            if time.monotonic() - begun > seconds:
                raise NewcomerError(f"not within {seconds:g} s:\n{_tail(log)}")
            if seen is None and marker and re.search(marker, log.read_text(errors="replace"), re.MULTILINE):
                seen = time.monotonic() - begun
            time.sleep(0.1)
        ended = time.monotonic() - begun
    finally:
        _end_group(process)
    output = log.read_text(errors="replace")
    if process.returncode:
        raise NewcomerError(f"exit status {process.returncode}:\n{_tail(log)}")
    if marker and not re.search(marker, output, re.MULTILINE):
        raise NewcomerError(f"{marker!r} was never printed:\n{_tail(log)}")
    return Went(ended if seen is None else seen, output)


def _end_group(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """Whatever the commands left in the background: SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + seconds
    number = signal.SIGTERM
    while True:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        process.poll()
        if number == signal.SIGKILL:
            break
        number = signal.SIGKILL if time.monotonic() > deadline else signal.Signals(signal.SIGTERM)
        time.sleep(0.2)
    process.wait(10)


def _environment() -> dict[str, str]:
    """Ours without what would lead out of the checkout."""
    foreign = ("FLEXD", "MAKE", "MFLAGS", "PYTEST", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _tail(log: Path) -> str:
    """The ends of what was printed and of the logs that the commands wrote beside it."""
    others = sorted(file for file in log.parent.glob("*.log") if file != log)
    ends = [log.read_text(errors="replace")[-3000:]]
    return "\n".join([*ends, *(f"{file.name}:\n{file.read_text(errors='replace')[-1500:]}" for file in others)])


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
