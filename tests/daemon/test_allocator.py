"""Freed buffers are reused, counted in page faults of a child process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import resource, sys
from flexd.daemon.run import keep_freed_memory
changed = keep_freed_memory() if sys.argv[1] == "keep" else False
kept = bytes(1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    parts = [b"x" * 3_000_000 for _ in range(4)]
    del parts
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def probe(how: str, **environment: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, how],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**clean, **environment},
    )
    changed, faults = done.stdout.split()
    return changed == "True", int(faults)


def test_freed_buffers_are_kept():
    changed, faults = probe("keep")
    if not changed:
        pytest.skip("another C library than glibc")
    pages = 12_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults < 2 * pages
    assert probe("leave")[1] > 10 * pages
