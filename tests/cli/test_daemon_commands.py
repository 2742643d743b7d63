"""The end of the process of ``flexd run``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

PROGRAM = """
import gc, sys, threading, time, types

def run_daemon(config, path):
    import datasketches

    def late():
        sketch = datasketches.kll_floats_sketch(200)
        started.set()
        time.sleep(60)

    started = threading.Event()
    threading.Thread(target=late, daemon=True).start()
    started.wait()
    cycle = [datasketches.kll_floats_sketch(200)]
    cycle.append(cycle)
    gc.freeze()
    print("ended", end="")
    {end}

sys.modules["flexd.daemon"] = types.SimpleNamespace(run_daemon=run_daemon)
from flexd.cli import main
sys.argv = ["flexd", "run", "-c", sys.argv[1]]
main.main()
"""


@pytest.mark.parametrize(("end", "code"), [("return 0", 0), ("return 1", 1), ("sys.exit(0)", 0)])
def test_objects_of_a_late_thread_are_not_reported_as_leaks(end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{end}", end), str(ROOT / "configs" / "laptop.yaml")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "ended", "")
