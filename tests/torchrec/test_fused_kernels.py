"""FBGEMM's kernels as they are measured: sums of bags, an update, and memory that was written before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexd.topology.kernel_design import drawn_ids
from flexd.topology.kernel_file import TableSet

pytest.importorskip("fbgemm_gpu")
from flexd.torchrec.fused_kernels import FbgemmKernels, bag_offsets

COLUMNS = [np.array(v, float) for v in ([40, 30], [8, 4], [50, 20], [10, 10], [1, 0], [0, 0])]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_phases_are_those_of_a_step(dtype: str) -> None:
    tables = TableSet(dtype, *COLUMNS)
    kernels = FbgemmKernels(2**16, torch.device("cpu"))
    ids = drawn_ids(tables, np.random.default_rng(0))
    module = kernels._module(tables)
    assert module.weights_host.data_ptr() == kernels._rows.bytes.data_ptr()
    kernels._rows.tensors([(40, 8)], getattr(torch, dtype))[0].fill_(0.5)
    look_up, update = kernels.phases(tables, ids)
    look_up()
    update()
    offsets = torch.from_numpy(bag_offsets(tables, np.arange(2)))
    out = module(torch.from_numpy(np.concatenate(ids)), offsets)
    # Ten bags of five ids of the first table: each sum is five times a half.
    torch.testing.assert_close(out[:, :8], torch.full((10, 8), 2.5))
    assert not out[:, 8:].any()
