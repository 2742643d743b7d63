"""How the C library keeps memory that was freed."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""``malloc.h`` of glibc."""
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The most that glibc allows."""
TRIM_THRESHOLD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Lets the process use freed buffers of up to ``MMAP_THRESHOLD_BYTES`` again instead of returning them.

    A Kafka client copies every fetch (megabytes) several times. By default each copy is memory fresh from the kernel,
    which is zeroed and mapped page by page, and returned when freed: more time than the copying itself. Kept is at
    most ``TRIM_THRESHOLD_BYTES`` at the end of each heap, and what is free between buffers in use.

    Returns:
        False where nothing was changed: another C library, or the environment sets its malloc itself.
    """
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
