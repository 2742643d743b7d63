"""The dense part of tools/bench_memory.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Dense:
    """A dense part: the host waits ``seconds`` for a device, then computes ``products`` of 256 x 256 matrices with one
    thread, the same work whatever else runs."""

    seconds: float = 0.0
    products: int = 0

    def runner(self) -> Callable[[], None]:
        left, right = torch.randn(256, 256), torch.randn(256, 256)

        def run() -> None:
            if self.seconds:
                time.sleep(self.seconds)
            if self.products:
                threads = torch.get_num_threads()
                torch.set_num_threads(1)
                for _ in range(self.products):
                    torch.mm(left, right)
                torch.set_num_threads(threads)

        return run

    @classmethod
    def computing(cls, seconds: float) -> Dense:
        """Return the products that take so long now."""
        dense, took = cls(products=20).runner(), []
        for _ in range(11):
            began = time.perf_counter()
            dense()
            took.append(time.perf_counter() - began)
        return cls(products=max(1, math.ceil(seconds / (float(np.median(took)) / 20))))


NO_DENSE = Dense()
