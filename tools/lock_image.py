"""Write ``deploy/requirements.lock``: versions and hashes of everything that the image installs.

    make lock                      # keeps the versions that are locked and still fit
    make lock LOCK=--upgrade       # takes the newest
    make lock LOCK="--upgrade-package fastapi"

``uv pip compile`` resolves the package's dependencies, its ``daemon`` and ``stream-formats`` extras and its build
requirements for every Python from 3.11 on. torch is left out: the trainer brings its own build, and the daemon runs
without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "deploy" / "requirements.lock"
COMMAND = "make lock"
LEFT_OUT = "torch"
_NEVER = "python_version < '3'"


def compile_command(directory: Path, options: list[str]) -> list[str]:
    """Return the command, after writing what it reads beside pyproject.toml into ``directory``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (directory / "build-requirements.txt").write_text("\n".join(project["build-system"]["requires"]))
    (directory / "left-out.txt").write_text(f"{LEFT_OUT} ; {_NEVER}")
    oldest = project["project"]["requires-python"].removeprefix(">=")
    return [
        sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", str(directory / "build-requirements.txt"),
        "--extra", "daemon", "--extra", "stream-formats", "--override",
        str(directory / "left-out.txt"), "--universal", "--python-version", oldest,
        "--generate-hashes", "--no-annotate", "--no-config", "--quiet", "--custom-compile-command", COMMAND,
        "--output-file", str(TARGET), *options,
    ]  # fmt: skip


def main() -> int:
    # Another index's hashes would be those of its own builds.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    # Python's own default, which uv does not look at.
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    if authorities.exists():
        environment.setdefault("SSL_CERT_FILE", str(authorities))
    with tempfile.TemporaryDirectory() as directory:
        return subprocess.run(
            compile_command(Path(directory), sys.argv[1:]), cwd=ROOT, env=environment, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
