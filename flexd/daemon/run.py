"""Run a daemon as a process: handle its signals, return its exit code, keep freed memory for reuse."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from flexd.config.model import Config
from flexd.core import supervision as faults
from flexd.core.fast_start import resume_garbage_collector
from flexd.core.supervision import EXIT_UNSAFE_STATE, set_up_logging
from flexd.daemon.config_file import ConfigFile
from flexd.daemon.daemon import Daemon

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


def run_daemon(config: Config, path: Path | None = None) -> int:
    """Run until SIGTERM or SIGINT; SIGHUP reloads the file at ``path``.

    Returns the exit code: 0, 1 if a part did not end within the deadline, or ``EXIT_UNSAFE_STATE``.
    """
    # The file may have changed since it was read, so a signal before there is a daemon is not lost.
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))
    set_up_logging(config.job, config.log.level, config.log.format)
    faults.arm()
    keep_freed_memory()
    daemon = Daemon(config, ConfigFile(config, path))
    daemon.supervisor.watch_uncaught()
    signal.signal(signal.SIGHUP, lambda *_: daemon.request_reload())
    if early:
        daemon.request_reload()
    daemon.start()
    resume_garbage_collector()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.request_stop())
    in_time = daemon.run_until_stopped()
    if daemon.supervisor.fatal:
        return EXIT_UNSAFE_STATE
    return 0 if in_time else 1
