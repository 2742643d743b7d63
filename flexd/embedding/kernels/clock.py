"""Seconds of kernels: of the device where it has events, otherwise of the processor or of the wall."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class KernelClock:
    """Times work on a device.

    On a CPU with one thread it counts processor time, which other processes lengthen least; with several threads wall
    time, of which the caller keeps the shortest turn. On CUDA it is the time between two events.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Which clock it is, for the source of a measurement."""
        if self.device.type == "cuda":
            return "CUDA events"
        return "processor time" if torch.get_num_threads() == 1 else f"wall time of {torch.get_num_threads()} threads"

    def seconds(self, work: Callable[[], object]) -> float:
        """Run work and return its seconds."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        started = clock()
        work()
        return clock() - started
