"""Count what one training step launches on an accelerator, and how often the host waits for it.

Simulates rank 0 of jobs of 1x1 to 128x8 ranks on CPU tensors, with exchanges answered by mirrors (``mirror_ranks``) and
with the code paths of an accelerator. A dispatch mode counts the operators of forward, backward and step:

* launches: operators that run a kernel or a copy (views and allocations excluded);
* host waits: operators whose result the host must have (a number read, ``nonzero``, ``unique``, a boolean index, a
  copy to the host);
* uploads: host lists copied to the device, from pinned memory, for which the host does not wait;
* collectives;
* processor ms: the processor time of the step on this machine without that of the mirrors (median; ``gc.freeze`` first:
  the garbage collector does not visit what exists before the steps). It includes the arithmetic on CPU tensors that a
  device would do.

``--quick`` leaves out 128 nodes.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexd
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Delta, RankLayout, Tier
from tools.bench import mirror_ranks
from tools.bench.harness import Outcome, at_most
from tools.bench.mirror_ranks import mirrored

MAX_LAUNCHES, MAX_LAUNCHES_OF_IDS, MAX_WAITS = 400, 700, 16
DIMS = (16, 32, 64, 128)
MILLISECONDS = {100: 12.0, 1935: 25.0}
"""Processor time a step at the most, by number of tables."""

_FREE = {
    "view", "_unsafe_view", "reshape", "select", "slice", "expand", "t", "transpose", "detach", "alias", "as_strided",
    "unsqueeze", "squeeze", "unbind", "split", "split_with_sizes", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided", "permute", "view_as_real", "_reshape_alias", "lift_fresh", "diagonal", "unfold", "chunk",
    "is_pinned", "_has_compatible_shallow_copy_type", "narrow", "promote_types",
}  # fmt: skip
_WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}


@dataclass(frozen=True)
class Case:
    """A job. ``copies``: part of the rows with a NODE or DEVICE copy; ``sums``: of the tables, pooled at the owner;
    ``unbounded``: all ids are, and rows are given at the second look-up."""

    name: str
    layout: RankLayout
    tables: int
    ids: int
    copies: float = 0.0
    pooled: bool = False
    exchange: str = "chain"
    sums: float = 0.0
    unbounded: bool = False


CASES = [
    Case("1x1, 100 tables", RankLayout(1, 1), 100, 64),
    Case("2x2, 1 table", RankLayout(2, 2), 1, 4096, 0.01),
    Case("1x1, 1 table, unbounded ids", RankLayout(1, 1), 1, 4096, unbounded=True),
    Case("2x2, 100 tables", RankLayout(2, 2), 100, 64, 0.01),
    Case("1x1, 100 tables, unbounded ids", RankLayout(1, 1), 100, 64, unbounded=True),
    Case("16x8, 100 tables", RankLayout(16, 8), 100, 64, 0.01),
    Case("16x8, 100 tables, bags", RankLayout(16, 8), 100, 64, 0.01, pooled=True),
    Case("16x8, 100 tables, sums", RankLayout(16, 8), 100, 64, pooled=True, sums=1.0),
    Case("16x8, 100 tables, both", RankLayout(16, 8), 100, 64, 0.01, pooled=True, sums=0.5),
    Case("16x8, 100 tables, direct", RankLayout(16, 8), 100, 64, 0.01, exchange="direct"),
    Case("128x8, 100 tables", RankLayout(128, 8), 100, 64, 0.01),
    Case("128x8, 1935 tables", RankLayout(128, 8), 1935, 8, 0.01),
]
QUICK = [case for case in CASES if case.tables <= 100 and case.layout.world_size <= 128]


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITS or (name in ("index", "index_put_", "index_put") and _boolean(args[1])):
            self.waits[name] += 1
        if name not in _FREE:
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def host_reads(self) -> Iterator[None]:
        """Also count what is not dispatched for CPU tensors: ``tolist``, ``numpy``, ``cpu``, copies of lists."""
        with ExitStack() as stack:
            for owner, method, counter in (
                (torch.Tensor, "tolist", self.waits), (torch.Tensor, "numpy", self.waits),
                (torch.Tensor, "cpu", self.waits), (torch, "tensor", self.uploads),
            ):  # fmt: skip
                function = self._counted(getattr(owner, method), method, counter)
                stack.enter_context(mock.patch.object(owner, method, function))
            yield

    def _counted(self, function: Callable[..., Any], name: str, counter: Counter[str]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not mirror_ranks.INSIDE[0]:
                counter[name] += 1
            return function(*args, **kwargs)

        return counted


def _boolean(index: Any) -> bool:
    return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in index)


class _Model(torch.autograd.Function):
    """A model as one operator: it takes all rows, and its gradients of them are the rows themselves."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.rows = [value.detach() for value in values]
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ctx.rows)


def _on_accelerator(_: torch.Tensor) -> bool:
    return False


def tables_of(case: Case) -> list[flexd.EmbeddingTable]:
    rng = np.random.default_rng(case.tables)
    rows = np.exp(rng.uniform(np.log(2_000), np.log(20_000), case.tables)).astype(int)
    more: dict[str, Any] = {"ids": "unbounded", "admit_after": 2} if case.unbounded else {}
    if case.tables == 1:
        return [flexd.EmbeddingTable("t0", 200_000, 64, **more)]
    make = flexd.EmbeddingBagTable if case.pooled else flexd.EmbeddingTable
    tables = [make(f"t{i}", int(n), DIMS[i % len(DIMS)], **more) for i, n in enumerate(rows)]
    at_owner = range(round(case.sums * case.tables))
    return [replace(table, pooling_at="owner") if i in at_owner else table for i, table in enumerate(tables)]


def keyspace_of(case: Case) -> KeySpace:
    return KeySpace([TableSpec(t.name, t.rows, t.dim, t.dtype, "rowwise_adagrad") for t in tables_of(case)])


def placement(case: Case, keyspace: KeySpace) -> Delta:
    """Copies of the first rows of each table: a half at NODE, a half at DEVICE."""
    keys = np.concatenate([
        int(keyspace.first_key[i]) + np.arange(max(2, int(spec.rows * case.copies)))
        for i, spec in enumerate(keyspace.tables)
    ])  # fmt: skip
    keys = np.unique(keys)
    tiers = np.where(np.arange(len(keys)) % 2 == 0, int(Tier.NODE), int(Tier.DEVICE)).astype(np.uint8)
    return Delta(keys, np.zeros(len(keys), np.uint8), tiers)


def batch(case: Case, seed: int) -> dict[str, flexd.Jagged]:
    rng = np.random.default_rng([7, seed])
    features = {}
    for spec in tables_of(case):
        ids = np.minimum(rng.zipf(1.3, case.ids) - 1, spec.rows - 1)
        if case.unbounded:  # a twentieth comes a first time
            ids = np.where(rng.random(case.ids) < 0.05, rng.integers(2**40, 2**41, case.ids), ids)
        samples = max(1, case.ids // 8)
        lengths = torch.full((samples,), case.ids // samples, dtype=torch.int64)
        features[spec.name] = flexd.Jagged(torch.from_numpy(ids), lengths)
    return features


def measure(case: Case, steps: int) -> dict[str, float]:
    """Return launches, waits and collectives of a step after the first two, and its processor milliseconds."""
    keyspace = keyspace_of(case)
    ranges = [(group.first_key, group.end_key) for group in keyspace.groups]
    with mirrored(ranges), mock.patch("flexd.embedding.devices.in_host_memory", _on_accelerator):
        make = flexd.EmbeddingBagCollection if case.pooled else flexd.EmbeddingCollection
        collection = make(
            tables_of(case), layout=case.layout, optimizer=flexd.RowWiseAdagrad(), exchange=case.exchange,
            replica_slots=[int(min(1.0, 2 * case.copies + 0.01) * group.rows) for group in keyspace.groups],
        )  # fmt: skip
        if case.copies and case.layout.world_size > 1:
            engine = collection.engine
            engine.migrator.apply([engine.migrator.prepare(placement(case, keyspace), None)])
        batches = [batch(case, seed) for seed in range(2)]

        def step(number: int) -> None:
            rows = collection(batches[number % 2])
            values = [part if isinstance(part, torch.Tensor) else part.values for part in rows.values()]
            _Model.apply(*values).backward()
            collection.optimizer.step()

        for number in range(2):
            step(number)
        counting = Counting()
        mirror_ranks.COLLECTIVES.clear()
        with counting, counting.host_reads():
            step(2)
        collectives = len(mirror_ranks.COLLECTIVES)
        seconds = []
        gc.collect()
        gc.freeze()
        for number in range(steps):
            started, of_mirrors = time.thread_time(), mirror_ranks.MIRROR_SECONDS[0]
            step(number)
            of_mirrors = mirror_ranks.MIRROR_SECONDS[0] - of_mirrors
            seconds.append(time.thread_time() - started - of_mirrors)
    return {
        "launches": float(counting.launches.total()),
        "host waits": float(counting.waits.total()),
        "uploads": float(counting.uploads.total()),
        "collectives": float(collectives),
        "processor ms": 1e3 * statistics.median(seconds),
    }


def section(options: Namespace) -> Outcome:
    torch.set_num_threads(1)
    figures, checks = {}, []
    for case in QUICK if options.quick else CASES:
        figures[case.name] = found = measure(case, 3 if options.quick else 7)
        launches = MAX_LAUNCHES_OF_IDS if case.unbounded else MAX_LAUNCHES
        for name, most in (("launches", launches), ("host waits", MAX_WAITS)):
            checks.append(at_most(f"{case.name}: {name} a step", found[name], most))
        if case.layout.world_size > 1 and case.tables in MILLISECONDS:
            name = f"{case.name}: processor ms per step"
            checks.append(at_most(name, found["processor ms"], MILLISECONDS[case.tables]))
    return Outcome(figures, checks)
