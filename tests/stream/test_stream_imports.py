"""Libraries that each part of the stream imports, and so must be installed for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.repository import ROOT


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flexd.stream.types", {"kafka", "pyarrow", "torch", "numba", "pydantic"}),
        ("flexd.stream.codec", {"kafka", "torch", "numba", "pydantic"}),
        ("flexd.stream.file_log.log", {"kafka", "pyarrow", "torch", "numba", "pydantic"}),
        ("flexd.stream.publisher", {"kafka", "torch", "numba", "pydantic"}),
        ("flexd.stream.synthetic", {"kafka", "torch", "numba", "pydantic"}),
        ("flexd.stream.kafka.source", {"torch", "numba", "pydantic"}),
    ],
)
def test_a_part_imports_only_what_it_needs(module, absent):
    code = f"import sys, {module}; print(*{absent!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_a_pyarrow_that_refuses_this_numpy_is_named_with_what_to_install(tmp_path):
    refusal = "pyarrow requires NumPy 2.0 or newer, found 1.26.4"
    (tmp_path / "pyarrow.py").write_text(f"raise ImportError({refusal!r})\n")
    done = subprocess.run(
        [sys.executable, "-c", "import flexd; flexd.Publisher"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert refusal in done.stderr
    assert "pip install 'flexd[publisher]'" in done.stderr
    code = (
        "import contextlib, flexd; from flexd.core.usage_warnings import USAGE_WARNINGS\n"
        "with contextlib.suppress(Exception): flexd.Publisher\n"
        "print([(each.kind, each.text) for each in USAGE_WARNINGS.reports()])"
    )
    noted = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )  # fmt: skip
    assert "('numpy'," in noted.stdout, "a daemon that the rank connects to shows it"
    assert refusal in noted.stdout
