"""The buffer pool reuses a buffer if, and only if, no view of it is left."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flexd.stream.file_log.segments import BufferPool


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


@pytest.mark.parametrize(
    "keep",
    [
        lambda view: view,
        lambda view: view[10:20][2:4],
        lambda view: view.toreadonly()[5:],
        lambda view: np.frombuffer(view, dtype=np.uint8)[3:5][1:],
        lambda view: np.frombuffer(view[8:24], dtype=np.int64),
        lambda view: pa.py_buffer(view[8:]).slice(3),
        lambda view: pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(view[:16])]).to_numpy(),
    ],
)
def test_a_view_of_a_view_keeps_its_bytes(keep):
    buffers = BufferPool(2)
    view = buffers.acquire(64)
    first = address(view)
    kept = keep(view)
    del view
    for _ in range(3):
        assert address(buffers.acquire(64)) != first
    del kept
    assert address(buffers.acquire(64)) == first


def test_memory_is_bounded_and_grows_with_the_largest_read():
    buffers = BufferPool(2)
    held = [buffers.acquire(10) for _ in range(5)]
    assert len({address(view) for view in held}) == 5
    assert len(buffers._buffers) == 2
    del held
    large = buffers.acquire(100)
    at = address(large)
    del large
    assert address(buffers.acquire(50)) == at
