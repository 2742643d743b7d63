"""Make the C library keep freed memory for reuse."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""``malloc.h`` of glibc."""
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The largest value that glibc accepts."""
TRIM_THRESHOLD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Let the process reuse freed buffers of up to ``MMAP_THRESHOLD_BYTES`` instead of returning them to the kernel.

    A Kafka client copies every fetch (megabytes) several times. By default each copy is fresh memory, which the kernel
    zeroes and maps page by page and takes back when it is freed; that takes longer than the copying itself. At most
    ``TRIM_THRESHOLD_BYTES`` at the end of each heap are kept, and the free space between buffers in use.

    Returns:
        False if nothing was changed: another C library, or the environment configures malloc.
    """
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
