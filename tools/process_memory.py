"""Resident memory of this process, and its peak, as Linux reports them in ``/proc/self/status``.

The peak of ``resource.getrusage`` is not used: it cannot be reset, and a child inherits that of its parent through
``exec``. So it can be larger than anything that the measured part ever held.
"""

from __future__ import annotations

from pathlib import Path


def reset_peak() -> bool:
    """Make the current resident memory the new peak. Returns False where the system does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_bytes() -> int:
    return _field_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident memory since the process started or ``reset_peak`` was called."""
    return _field_bytes("VmHWM")


def _field_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
