"""Commands of the documentation, run in a shell as readers type them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def follow(script: Path, directory: Path, environment: dict[str, str], seconds: float) -> str:
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
        process.wait(seconds)
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
