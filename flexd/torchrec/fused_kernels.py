"""FBGEMM's table-batched embeddings, TorchRec's fused look-up, pooling and update, for ``flexd probe --kernels``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flexd.core.errors import MissingExtraError
from flexd.embedding.kernels.flexd_kernels import RowMemory, bag_offsets
from flexd.topology.kernel_design import Int64Array
from flexd.topology.kernel_file import TableSet

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except ImportError as error:
    raise MissingExtraError(
        f"FBGEMM is not installed: {error}", remedy="pip install 'flexd[torchrec]', or --kernels-of flexd"
    ) from error

_DTYPES = {"float32": SparseType.FP32, "float16": SparseType.FP16}


class FbgemmKernels:
    """``FusedKernels`` of TorchRec's fused ``EmbeddingBagCollection`` with row-wise Adagrad. Its look-up includes
    pooling, and its backward pass the update.

    Args:
        memory_bytes: of the largest set that is measured, rows and optimizer state.
    """

    name = "fbgemm"

    def __init__(self, memory_bytes: int, device: torch.device) -> None:
        self.device = device
        self._rows = RowMemory(memory_bytes, device)
        self._state = RowMemory(memory_bytes, device)

    def phases(self, tables: TableSet, ids: Sequence[Int64Array]) -> Sequence[Callable[[], object]]:
        """Return look-up, nothing and update; see ``FusedKernels``."""
        module = self._module(tables)
        indices = torch.from_numpy(np.concatenate(list(ids))).to(self.device)
        offsets = torch.from_numpy(bag_offsets(tables, np.arange(len(tables.rows)))).to(self.device)
        made: dict[str, torch.Tensor] = {}

        def look_up() -> None:
            made["out"] = module(indices, offsets)
            made.setdefault("grads", torch.zeros_like(made["out"]))

        def update() -> None:
            made["out"].backward(made["grads"])  # type: ignore[no-untyped-call]

        return look_up, lambda: None, update

    def _module(self, tables: TableSet) -> Any:
        cuda = self.device.type == "cuda"
        place = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(int(rows), int(dim), place, compute) for rows, dim in zip(tables.rows, tables.dim, strict=True)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            eps=1e-8,
            weights_precision=_DTYPES[tables.dtype],
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.SUM,
            device=self.device,
        )
        # Its own memory was never written: every page would be the same one, which a cache holds.
        for name, memory in (("weights", self._rows), ("momentum1", self._state)):
            held = getattr(module, f"{name}_{'dev' if cuda else 'host'}")
            held.data = memory.tensors([(1, held.numel())], held.dtype)[0].view(-1)
        return module
