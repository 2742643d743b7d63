"""Libraries that each part of the stream imports, and so must be installed for it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flexd.stream.types", {"kafka", "pyarrow", "torch", "numba", "pydantic"}),
        ("flexd.stream.codecs.codec", {"kafka", "torch", "numba", "pydantic"}),
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
