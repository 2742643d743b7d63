"""Measure what a step takes beside its links: with tables pooled at the owner, with copies on every rank, and per
byte of rows."""

import time
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn import functional

from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import DATA_PARALLEL, ROW_WISE
from flexd.embedding import devices
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.features import Jagged
from flexd.embedding.row_optimizers import GroupUpdate, RowWiseAdagrad
from flexd.topology.cluster import StepCosts

Float64Array = npt.NDArray[np.float64]

TABLES, ROWS, DIM, BAGS, BAG_LENGTH = 8, 512, 16, 32, 2
"""So small that bytes take no time beside launches and latencies."""
KINDS = (("requester", ROW_WISE), ("owner", ROW_WISE), ("requester", DATA_PARALLEL))
"""Place of pooling and sharding type of half of the tables; the other half is as the first."""
WARM_UP, FEWEST_TURNS, MOST_TURNS = 2, 5, 200
# Of the budget, for rows in memory.
_KERNEL_SHARE = 0.25
_KERNEL_ROWS, _KERNEL_DIM, _KERNEL_IDS, _KERNEL_BAGS = 2**17, 64, 2**15, 2**11
_KERNEL_SKEW = 0.8
# Of a clock that shows no time.
_MOST_BYTES_PER_SECOND = 1e15


def step_costs(steps: Float64Array, kernels: Float64Array, kernel_bytes: float) -> StepCosts:
    """Return medians: of differences within a turn, so that what disturbs a turn disturbs no difference.

    Args:
        steps: float64[turns, 3], seconds of a step by turn and kind of ``KINDS``.
        kernels: float64[turns], seconds of look-up, pooling and update.
        kernel_bytes: that those read and write.
    """
    sums, copies = (float(np.median(steps[:, kind] - steps[:, 0])) for kind in (1, 2))
    rate = kernel_bytes / max(float(np.median(kernels)), kernel_bytes / _MOST_BYTES_PER_SECOND)
    return StepCosts(max(0.0, sums), max(0.0, copies), rate)


def measure_step_costs(layout: RankLayout, device: torch.device, budget_seconds: float) -> StepCosts:
    """Collective over the default process group. Return what a step takes beside its links, equal on every rank.

    Steps of small tables (forward, backward, update) are timed in turns: all pooled at the requester, half of them at
    the owner, and half of them copied to every rank. Rows in memory are timed on all ranks at once, because they share
    it.

    Args:
        budget_seconds: about how long; a few turns are measured whatever they take.

    Raises:
        TopologyError: on every rank, if the budget is no positive number; as the collections' own errors otherwise.
    """
    if not 0 < budget_seconds <= 3600:
        raise TopologyError(f"step probe of {budget_seconds!r} s", remedy="give seconds above 0, at most 3600")
    started = time.monotonic()

    def until(share: float) -> Callable[[int], bool]:
        """Return a function that says if a turn begins: rank 0 decides for all."""

        def goes_on(turn: int) -> bool:
            wanted = turn < MOST_TURNS and (turn < FEWEST_TURNS or time.monotonic() < started + share * budget_seconds)
            answer = torch.tensor([float(wanted)], device=device)
            dist.broadcast(answer, src=0)
            return bool(answer.item())

        return goes_on

    of_kernels, kernel_bytes = _kernels(device, until(_KERNEL_SHARE))
    return _agreed(step_costs(_steps(layout, device, until(1.0)), of_kernels, kernel_bytes), device)


def _steps(layout: RankLayout, device: torch.device, goes_on: Callable[[int], bool]) -> Float64Array:
    collections = [_collection(layout, device, kind) for kind in KINDS]
    batch = _batch(device)
    try:
        for collection in collections * WARM_UP:
            _step(collection, batch)
        turns: list[list[float]] = []
        for turn in count():
            if not goes_on(turn):
                break
            turns.append([_timed(partial(_step, collection, batch), device) for collection in collections])
    finally:
        for collection in collections:
            collection.close()
    return np.array(turns)


def _collection(layout: RankLayout, device: torch.device, kind: tuple[str, str]) -> EmbeddingBagCollection:
    tables = []
    for number in range(TABLES):
        pooling_at, sharding = kind if number % 2 else KINDS[0]
        tables.append(EmbeddingBagTable(f"t{number}", ROWS, DIM, pooling_at=pooling_at, sharding=sharding))
    return EmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(lr=0.01), layout=layout, device=device)


def _batch(device: torch.device) -> dict[str, Jagged]:
    rng = np.random.default_rng(dist.get_rank())
    lengths = torch.full((BAGS,), BAG_LENGTH, device=device)
    return {
        f"t{number}": Jagged(torch.from_numpy(rng.integers(0, ROWS, BAGS * BAG_LENGTH)).to(device), lengths)
        for number in range(TABLES)
    }


def _step(collection: EmbeddingBagCollection, batch: dict[str, Jagged]) -> None:
    torch.stack([part.sum() for part in collection(batch).values()]).sum().backward()  # type: ignore[no-untyped-call]
    collection.optimizer.step()


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Return wall seconds of work that all ranks begin together."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _kernels(device: torch.device, goes_on: Callable[[int], bool]) -> tuple[Float64Array, float]:
    """float64[turns] seconds of look-up, pooling and update of one table, and the bytes that they read and write.

    The kernels are those of ``SummingRouter`` and ``RowWiseAdagrad`` on one rank: gather of distinct rows, sums of
    bags, gradients of rows, update. Rows and gradients are zeros, so that no step changes them.
    """
    ids = _skewed_ids(np.random.default_rng(dist.get_rank()))
    found = np.unique(ids, return_inverse=True)
    offsets = np.arange(_KERNEL_BAGS + 1) * len(ids) // _KERNEL_BAGS
    slots, expand, ends, bag = (
        torch.from_numpy(each).to(device)
        for each in (*found, offsets, np.repeat(np.arange(_KERNEL_BAGS), np.diff(offsets)))
    )
    # Written: pages that never were would all be the same one, which a cache holds.
    rows, state = (torch.empty((_KERNEL_ROWS, width), device=device).fill_(0) for width in (_KERNEL_DIM, 1))
    grads = torch.zeros((_KERNEL_BAGS, _KERNEL_DIM), device=device)
    optimizer = RowWiseAdagrad(lr=0.01, stochastic_rounding=False)
    sums = partial(functional.embedding_bag, mode="sum", include_last_offset=True)

    def step() -> None:
        sums(expand, rows.index_select(0, slots), ends)
        order = torch.sort(expand, stable=True).indices
        numbers = devices.sum_by_place(expand, None, len(slots))
        of_rows = sums(bag.index_select(0, order), grads, functional.pad(numbers.cumsum(0), (1, 0)))
        optimizer.update_groups([GroupUpdate(rows, state, [(slots, of_rows)])], 1)

    step()
    turns = []
    for turn in count():
        if not goes_on(turn):
            break
        turns.append(_timed(step, device))
    row_bytes, state_bytes = 4.0 * _KERNEL_DIM, 4.0
    # As ``kernel_bytes`` of a home that adds bags up.
    return np.array(turns), 2 * _KERNEL_IDS * row_bytes + 2 * len(slots) * (row_bytes + state_bytes)


def _skewed_ids(rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """int64 [_KERNEL_IDS] by Zipf's law (the inverse of the continuous one), spread over the table."""
    power = 1.0 - _KERNEL_SKEW
    rank = (1.0 + rng.random(_KERNEL_IDS) * ((_KERNEL_ROWS + 1.0) ** power - 1.0)) ** (1.0 / power)
    # Multiplied by a prime above the table's rows, neighbours lie apart and no two rows meet.
    ids: npt.NDArray[np.int64] = np.minimum(rank.astype(np.int64) - 1, _KERNEL_ROWS - 1) * 2_654_435_761 % _KERNEL_ROWS
    return ids


def _agreed(own: StepCosts, device: torch.device) -> StepCosts:
    mean = torch.tensor(
        [own.sums_seconds, own.copies_seconds, own.row_bytes_per_second], dtype=torch.float64, device=device
    )
    dist.all_reduce(mean)
    return StepCosts(*(mean / dist.get_world_size()).tolist())
