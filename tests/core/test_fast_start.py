"""Work that a start skips must not change what works afterwards."""

import subprocess
import sys

from tests.support.repository import ROOT


def _prints(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    return done.stdout.split()


def test_kernels_run_without_scipy_which_can_be_imported_later() -> None:
    """The import of scipy's linear algebra lasts most of a second on a slow machine; the planner needs its solver."""
    printed = _prints(
        "import sys\n"
        "from flexd.core.fast_start import import_numba\n"
        "import_numba()\n"
        "from flexd.sketch.sketch_set import warm_up\n"
        "warm_up()\n"
        "print('scipy.linalg' in sys.modules)\n"
        "import scipy.linalg.cython_blas\n"
        "from scipy.optimize import milp\n"
        "print(scipy.linalg.cython_blas is not None, milp.__name__)\n"
        "import_numba()\n"
        "print('scipy.linalg.cython_blas' in sys.modules)\n"
    )
    assert printed == ["False", "True", "milp", "True"]


def test_a_running_daemon_has_its_garbage_collector_enabled() -> None:
    """Cyclic garbage of the daemon would never be freed otherwise."""
    printed = _prints(
        "import gc, types\n"
        "from pathlib import Path\n"
        "from flexd.cli.main import run\n"
        "from flexd.daemon import daemon as module\n"
        "def start():\n"
        "    print(gc.isenabled())\n"
        "def run_until_stopped():\n"
        "    print(gc.isenabled())\n"
        "    return True\n"
        "from flexd.core.supervision import Supervisor\n"
        "fake = types.SimpleNamespace(start=start, run_until_stopped=run_until_stopped, supervisor=Supervisor())\n"
        "module.Daemon = lambda *_: fake\n"
        "run(Path('configs/laptop.yaml'))\n"
    )
    assert printed == ["False", "True"]
