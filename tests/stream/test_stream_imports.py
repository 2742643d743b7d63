"""Libraries that each part of the stream imports, and so must be installed for it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.repository import ROOT

_HEAVY = {"torch", "numba", "pydantic"}
_PARTS = (
    (("flexd.stream.types", "flexd.stream.file_log.log"), {*_HEAVY, "kafka", "pyarrow"}),
    (("flexd.stream.codec", "flexd.stream.publisher", "flexd.stream.synthetic"), {*_HEAVY, "kafka"}),
    (("flexd.stream.kafka.source",), _HEAVY),
)
"""Parts in an order in which each may import more than those before it."""


def printed(code: str, *path: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return done.stdout


def test_a_part_imports_only_what_it_needs() -> None:
    code = "import importlib, sys\n" + "".join(
        f"for name in {names}:\n    importlib.import_module(name)\nprint(sorted({absent} & set(sys.modules)))\n"
        for names, absent in _PARTS
    )
    assert printed(code).splitlines() == ["[]"] * len(_PARTS)


def test_a_pyarrow_that_refuses_this_numpy_is_named_with_what_to_install(tmp_path):
    refusal = "pyarrow requires NumPy 2.0 or newer, found 1.26.4"
    (tmp_path / "pyarrow.py").write_text(f"raise ImportError({refusal!r})\n")
    shown = printed(
        "import flexd; from flexd.core.usage_warnings import USAGE_WARNINGS\n"
        "try:\n    flexd.Publisher\nexcept ImportError as error:\n    print(error)\n"
        "print([(each.kind, each.text) for each in USAGE_WARNINGS.reports()])",
        str(tmp_path),
    )
    assert shown.count(refusal) == 2
    assert "pip install 'flexd[publisher]'" in shown
    assert "('numpy'," in shown, "a daemon that the rank connects to shows it"
