"""Work of the interpreter and of libraries that the start of a process can do without.

``tools.bench control`` measures the time of a start.
"""

import gc
import sys

_BLAS = "scipy.linalg.cython_blas"


def pause_garbage_collector() -> None:
    """Disable the garbage collector while modules, classes and routes are created: none of them is garbage."""
    gc.disable()


def resume_garbage_collector() -> None:
    """Enable the garbage collector again; it never scans the objects created so far."""
    gc.freeze()
    gc.enable()


def import_numba() -> None:
    """Import the parts of numba that compiled kernels need, without scipy's linear algebra.

    numba imports all of ``scipy.linalg`` when the first kernel is loaded, to check whether kernels can call BLAS.
    flexd's kernels do not. scipy itself can be imported before and afterwards.
    """
    if _BLAS in sys.modules:
        return
    # An entry of None makes an import fail at once (Python reference, "The module cache").
    sys.modules[_BLAS] = None  # type: ignore[assignment]
    try:
        import numba.np.arraymath  # noqa: F401
    finally:
        del sys.modules[_BLAS]
