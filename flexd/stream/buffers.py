"""Memory that is read into again once nobody looks at it any more."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt


class ReusedBuffers:
    """Lends buffers for reads. Fresh memory for each would cost a page fault every 4 KiB, more than the read itself.

    A buffer is free again when the last view of what was lent is gone, however far views of views were handed on; who
    keeps one keeps its bytes. When all are lent, memory is made that is not kept.

    Args:
        kept: buffers kept for the next read.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._buffers: list[tuple[npt.NDArray[np.uint8], weakref.ref[Any]]] = []

    def lend(self, size_bytes: int) -> memoryview:
        """A writable view of ``size_bytes`` with any content."""
        free = [i for i, (_, window) in enumerate(self._buffers) if window() is None]
        fitting = [i for i in free if self._buffers[i][0].nbytes >= size_bytes]
        memory = self._buffers[fitting[0]][0] if fitting else np.empty(size_bytes, dtype=np.uint8)
        # Views hold on to this array object, and through it to the memory; nothing else refers to it.
        window = memory[:size_bytes]
        entry = (memory, weakref.ref(window))
        if fitting:
            self._buffers[fitting[0]] = entry
        elif free:
            self._buffers[free[0]] = entry
        elif len(self._buffers) < self._kept:
            self._buffers.append(entry)
        return window.data
