"""The repository's root, and the environment of a Python child process that imports flexd, tests and tools from it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def child_environment(*, tree: Path = ROOT, **variables: str) -> dict[str, str]:
    """Copy this process's environment without flexd's settings; set the import path and ``variables``.

    Args:
        tree: directory whose ``flexd`` is imported, in place of the repository's.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLEXD_")}
    path = dict.fromkeys([str(tree), str(ROOT), str(ROOT / "tools")])
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **variables}
