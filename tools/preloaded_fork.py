"""Processes forked from one that has imported what they need: a dozen ranks are there in the time of one."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def preloaded(module: str) -> ForkServerContext:
    """Return a context whose server has imported ``module``. The first call of a process decides which."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([module])
    # Before Python 3.13 the server is not told where this process finds modules, and passes over what it cannot find.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
