"""What makes a start short: work of the interpreter and of libraries that a start can do without.

``tools/bench_daemon.py`` shows what a start takes.
"""

from __future__ import annotations

import gc
import sys

_BLAS = "scipy.linalg.cython_blas"


def pause_garbage_collector() -> None:
    """Modules, classes and routes are made to stay: looking through them for cycles again and again finds nothing."""
    gc.disable()


def resume_garbage_collector() -> None:
    """Ends ``pause_garbage_collector``. What has been made so far is no longer looked through, then or later."""
    gc.freeze()
    gc.enable()


def import_numba() -> None:
    """Imports what numba needs to run compiled kernels, without scipy's linear algebra.

    numba imports all of ``scipy.linalg`` when the first kernel is loaded, to find out whether kernels may call BLAS.
    flexd's do not. scipy itself can be imported as ever, before and afterwards.
    """
    if _BLAS in sys.modules:
        return
    # An entry of None makes an import fail at once (Python reference, "The module cache").
    sys.modules[_BLAS] = None  # type: ignore[assignment]
    try:
        import numba.np.arraymath  # noqa: F401
    finally:
        del sys.modules[_BLAS]
