"""A pool of read buffers that are reused once no view of them is left."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt


class BufferPool:
    """Provide buffers for reads. Fresh memory for each would cost a page fault every 4 KiB, more than the read itself.

    A buffer is free again when the last view of it is gone, including views of views: its bytes stay valid for as long
    as any view exists. If no buffer is free, memory is allocated that the pool does not keep.

    Args:
        kept: number of buffers that the pool keeps.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._buffers: list[tuple[npt.NDArray[np.uint8], weakref.ref[Any]]] = []

    def acquire(self, size_bytes: int) -> memoryview:
        """Return a writable view of ``size_bytes`` bytes of arbitrary content."""
        free = [i for i, (_, window) in enumerate(self._buffers) if window() is None]
        fitting = [i for i in free if self._buffers[i][0].nbytes >= size_bytes]
        memory = self._buffers[fitting[0]][0] if fitting else np.empty(size_bytes, dtype=np.uint8)
        # Views refer to this array object, and through it to the memory; nothing else does.
        window = memory[:size_bytes]
        entry = (memory, weakref.ref(window))
        if fitting:
            self._buffers[fitting[0]] = entry
        elif free:
            self._buffers[free[0]] = entry
        elif len(self._buffers) < self._kept:
            self._buffers.append(entry)
        return window.data
