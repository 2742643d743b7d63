"""Measure sets of tables until a budget is used up; the kernels are given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from flexd.core.errors import ConfigError, TopologyError
from flexd.topology.kernel_design import Int64Array, drawn_ids
from flexd.topology.kernel_file import Float64Array, KernelMeasurements, TableSet


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


TURNS = 3
"""Of each set in each pass; the shortest of all counts."""
PASSES = 3
"""Over all sets: what disturbs a set in one of them is likely over in another."""
_TURN_SECONDS = 0.2
"""After so long a set has no further turn; two at least."""
_WARM_UP = 1


class FusedKernels(Protocol):
    """The kernels of one runtime."""

    @property
    def name(self) -> str:
        """Name in the file of measurements."""
        ...

    def phases(self, tables: TableSet, ids: Sequence[Int64Array]) -> Sequence[Callable[[], object]]:
        """Return look-up with pooling, and update, of one step of these tables; each is run after the one before.

        Args:
            ids: int64 [ids] of each table, bag by bag.
        """
        ...


@dataclass(frozen=True)
class KernelBudget:
    """Bounds of a run.

    Attributes:
        seconds: of all passes together; the first begins no set after its share of them.
        sets: most sets.

    Raises:
        ConfigError: a bound that allows nothing.
    """

    seconds: float = 60.0
    sets: int = 1000

    def __post_init__(self) -> None:
        if not (0 < self.seconds <= 24 * 3600 and self.sets >= 1):
            raise ConfigError(
                f"kernel budget of {self.seconds} s and {self.sets} sets", remedy="give above 0, and at most a day"
            )


def measure_kernels(
    kernels: FusedKernels, wanted: Iterable[TableSet], device: torch.device, budget: KernelBudget, seed: int = 1
) -> KernelMeasurements:
    """Measure sets of tables in their order until the budget is used up. Rows hold zeros, so no step changes them.

    Args:
        wanted: sets whose ids are drawn here.
        seed: of the ids.

    Raises:
        TopologyError: a set does not fit the device's memory, or not one was measured.
    """
    clock, started = KernelClock(device), time.monotonic()
    sets: list[TableSet] = []
    seconds: list[Float64Array] = []
    for tables in wanted:
        if len(sets) == budget.sets or (sets and time.monotonic() > started + budget.seconds / PASSES):
            break
        ids = drawn_ids(tables, np.random.default_rng((seed, len(sets))))
        seconds.append(_timed(kernels, tables, ids, clock))
        sets.append(replace(tables, distinct=np.array([float(len(np.unique(of_table))) for of_table in ids])))
    if not sets:
        raise TopologyError("no set of tables to measure", remedy="report this")
    again = 1
    for number in (at for _ in range(1, PASSES) for at in range(len(sets))):
        if time.monotonic() > started + budget.seconds:
            break
        ids = drawn_ids(sets[number], np.random.default_rng((seed, number)))
        seconds[number] = np.minimum(seconds[number], _timed(kernels, sets[number], ids, clock))
        again += number == len(sets) - 1
    columns = np.array(seconds).T
    source = (
        f"{len(sets)} sets, shortest of {TURNS} turns in each of {again} passes over all, {clock.name}, "
        f"torch {torch.__version__}"
    )
    return KernelMeasurements(kernels.name, str(device), source, tuple(sets), columns[0], columns[1])


def _timed(kernels: FusedKernels, tables: TableSet, ids: Sequence[Int64Array], clock: KernelClock) -> Float64Array:
    """float64[2] of one set in one pass."""
    try:
        return _shortest(kernels.phases(tables, ids), clock)
    except torch.OutOfMemoryError as error:
        raise TopologyError(
            f"a set of {len(tables.rows)} tables of {tables.rows.sum():.3g} rows does not fit {clock.device}",
            remedy="measure on a device with more free memory",
        ) from error


def _shortest(phases: Sequence[Callable[[], object]], clock: KernelClock) -> Float64Array:
    """float64[2]: the shortest time of each phase over the turns, after one that is not counted."""
    turns: list[list[float]] = []
    spent = 0.0
    for turn in range(_WARM_UP + TURNS):
        times = [clock.seconds(phase) for phase in phases]
        spent += sum(times)
        if turn >= _WARM_UP:
            turns.append(times)
        if len(turns) >= 2 and spent > _TURN_SECONDS:
            break
    shortest: Float64Array = np.array(turns).min(axis=0)
    return shortest
