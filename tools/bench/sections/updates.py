"""Measure the update of rows by each optimizer against a copy of the rows, torch's sparse optimizers and FBGEMM.

Every update has the same distinct rows and gradients, float32 and bfloat16, without look-up and exchange. The copy
gathers the rows and scatters them back in one piece. torch's optimizers have ``nn.Embedding``'s coalesced sparse
gradient. FBGEMM's time is the backward pass of un-pooled look-ups of these rows, which contains its update; the
comparison is left out, with the reason, where it is not installed. All run in turns; figures are the shortest of all
turns, which the load of the machine changes least. bfloat16 rows are rounded stochastically and to the nearest. The
last figures train a table by updates that are mostly below half a unit in the last place of bfloat16.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

import flexd
from flexd.core.keyspace import state_columns
from tools.bench.harness import Outcome, at_least, in_turns
from tools.bench.sections.directory import device_seconds

ROWS, DIM = 12_800, 64
"""Of an update."""
OURS: dict[str, Any] = {
    "sgd": flexd.SGD(lr=0.01),
    "adagrad": flexd.Adagrad(lr=0.01),
    "rowwise_adagrad": flexd.RowWiseAdagrad(lr=0.01),
    "adam": flexd.Adam(lr=0.01),
    "rowwise_adam": flexd.RowWiseAdam(lr=0.01),
}
TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}
FBGEMMS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
"""FBGEMM has no Adam on a CPU."""


def timed(run: Callable[[], object], device: torch.device) -> float:
    return 1e3 * device_seconds(run, device)


def torch_step(
    make: Callable[[Any], torch.optim.Optimizer], rows: torch.Tensor, index: torch.Tensor, grads: Any
) -> Any:
    plain = torch.nn.Embedding(rows.shape[0], rows.shape[1], sparse=True, device=rows.device)
    optimizer = make(plain.parameters())
    plain.weight.grad = torch.sparse_coo_tensor(index[None], grads, rows.shape, check_invariants=True).coalesce()
    return optimizer.step


def fbgemm_backward(kernel: str, rows: torch.Tensor, index: torch.Tensor, grads: torch.Tensor) -> Callable[[], float]:
    """Raises ImportError without FBGEMM."""
    configs = import_module("fbgemm_gpu.split_embedding_configs")
    common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    cuda = rows.device.type == "cuda"
    place, compute = ("DEVICE", "CUDA") if cuda else ("HOST", "CPU")
    table = (*rows.shape, getattr(training.EmbeddingLocation, place), getattr(training.ComputeDevice, compute))
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [table], optimizer=getattr(configs.EmbOptimType, kernel), learning_rate=0.01,
        pooling_mode=common.PoolingMode.SUM, device=rows.device,
    )  # fmt: skip
    offsets = torch.arange(len(index) + 1, device=rows.device)

    def run() -> float:
        found = module(index, offsets)
        return timed(lambda: found.backward(grads), rows.device)

    return run


def updates(
    dtype: torch.dtype, rows: int, distinct: int, dim: int, device: torch.device, repeat: int
) -> dict[str, Any]:
    """Return milliseconds by optimizer: of this package, of the copy, of torch and of FBGEMM."""
    values = torch.randn(rows, dim, device=device).to(dtype)
    index = torch.randperm(rows, device=device)[:distinct].sort().values
    grads = torch.randn(distinct, dim, device=device)
    found: dict[str, Any] = {}
    for name, ours in OURS.items():
        state = torch.rand(rows, sum(state_columns(name, dim).values()), device=device)

        def copy() -> None:
            values.index_copy_(0, index, values.index_select(0, index))

        runs: dict[str, Callable[[], float]] = {
            "flexd": partial(timed, partial(ours.update, values, state, index, grads, 3), device),
            "copy": partial(timed, copy, device),
        }

        def copy_with_state(state: torch.Tensor = state) -> None:
            copy()
            state.index_copy_(0, index, state.index_select(0, index))

        if dtype != torch.float32:
            keyed = partial(ours.update, values, state, index, grads, 3, lambda slots: slots)
            runs = {"nearest": runs["flexd"], "stochastic": partial(timed, keyed, device), "copy": runs["copy"]}
        if state.shape[1]:
            runs["copy with state"] = partial(timed, copy_with_state, device)
        if dtype == torch.float32 and name in TORCHS:
            runs["torch"] = partial(timed, torch_step(TORCHS[name], values, index, grads), device)
        if dtype == torch.float32 and name in FBGEMMS:
            try:
                runs["FBGEMM"] = fbgemm_backward(FBGEMMS[name], values, index, grads)
            except (ImportError, OSError) as error:
                print(f"  FBGEMM left out: {error}")
        found[name] = {who: min(taken) for who, taken in in_turns(runs, repeat).items()}
    return found


def distances(steps: int, device: torch.device) -> dict[str, float]:
    """Train 64 rows x 16 towards 1 from rows near 0, by SGD at lr 0.002; return the root mean square distance left."""
    left = {}
    index = torch.arange(64, device=device)
    for name, dtype, stochastic in (
        ("float32", torch.float32, True), ("bfloat16, stochastic", torch.bfloat16, True),
        ("bfloat16, nearest", torch.bfloat16, False), ("float16, stochastic", torch.float16, True),
        ("float16, nearest", torch.float16, False),
    ):  # fmt: skip
        optimizer = flexd.SGD(lr=0.002, stochastic_rounding=stochastic)
        rows = (0.1 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1))).to(device, dtype)
        for step in range(1, steps + 1):
            grads = rows.float() - 1.0
            optimizer.update(rows, rows.new_zeros(64, 0), index, grads, step, lambda slots: slots)
        left[name] = float((rows.float() - 1.0).square().mean().sqrt())
    return left


def section(options: Namespace) -> Outcome:
    device = torch.device(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    repeat, table = (7, 100_000) if options.quick else (51, 400_000)
    figures: dict[str, Any] = {"rows": ROWS, "dim": DIM}
    for dtype in (torch.float32, torch.bfloat16):
        figures[str(dtype).removeprefix("torch.")] = updates(dtype, table, ROWS, DIM, device, repeat)
    left = figures["distance"] = distances(3000, device)
    sgd = figures["float32"]["sgd"]
    gain = left["bfloat16, nearest"] / left["bfloat16, stochastic"]
    checks = [
        at_least("SGD: times torch.optim.SGD", sgd["torch"] / sgd["flexd"], 1.0),
        at_least("bfloat16: times nearer to the target by stochastic rounding", gain, 5.0),
    ]
    return Outcome(figures, checks)
