"""``state_dict`` of a collection: the home rows of one rank, for that rank of an equally large job.

Keys contain the rank (``rank0.group0.rows``): ``torch.distributed.checkpoint`` gathers the state dicts of all ranks and
would otherwise treat equal keys as copies and keep the first. ``ShardedState`` saves the form that any number of ranks
can load.

A rank that calls ``state_dict()`` alone is warned. Each call is noted in the store of the process group. A look-up is
collective, so when one that began after a call has found its rows, every rank that calls ``state_dict()`` at this point
of the program has done so. The store is used by ranks that call ``state_dict()``, and there is no waiting for others,
except in a loop of ``flexd.prefetch``, where the call is collective.

A framework that calls ``state_dict()`` on every rank and writes rank 0's alone is found in the same way: a part that is
pickled notes so, and a rank whose part is gone without it warns at the next look-up if another rank's was. Such
frameworks can have ``full_state_dict=True`` (``full_state``). At a load all ranks compare what they were given.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexd.core.errors import CollectiveError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.checkpoint.full_state import is_full, load_full, save_full
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.fault_notices import BoundedStore, Store
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.step import StepMoments

if TYPE_CHECKING:
    from flexd.embedding.collection import EmbeddingCollection

logger = logging.getLogger(__name__)

REMEDY = (
    "call state_dict() on every rank and keep what each returns, or save all rows with flexd.CheckpointSeries or "
    "flexd.ShardedState, on every rank, or make the collection with full_state_dict=True, with which rank 0's "
    "state_dict() has whole tables"
)
_POLL_SECONDS = 0.05
_WARNING_SECONDS = 10.0
# Look-ups at which a rank whose part was dropped looks whether another rank pickles its own.
_DROPPED_LOOKS = 8


class _StatePart(torch.Tensor):
    """The ``shard`` of a ``state_dict``; it is pickled as a plain tensor, and notes that."""

    pickled: Callable[[], None] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.pickled is not None:
            self.pickled()
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class PartialStateDictDetector(StepMoments):
    """Notes calls of ``state_dict()``. Every rank makes it at the same point of the program.

    Args:
        groups: whose timeout a wait for the other ranks has.
        home_rows, rows: of all tables, on this rank and in the job.
    """

    def __init__(self, groups: ChainGroups, home_rows: int, rows: int) -> None:
        rank = self._rank = groups.rank
        self._world_size = groups.layout.world_size
        self._text = (
            f"it has {home_rows:,} of {rows:,} rows, those with their home on rank {rank}: of it alone no "
            "table can be loaded"
        )
        self._timeout_seconds = groups.timeout_seconds
        self._store = BoundedStore()
        self._key = f"flexd/state_dict/{groups.notices.number}"
        self._warned = False
        # Of the last call, in the program; empty when it was checked.
        self._place = ""
        # Look-ups that had begun before that call.
        self._look_ups = 0
        # The part that it returned, until it is pickled or its loss is certain, and the place of that call.
        self._part: weakref.ref[torch.Tensor] | None = None
        self._part_place = ""
        self._dropped_looks = 0
        self._loads = 0

    def called(self, look_ups: int, steps: int) -> None:
        """Note that this rank calls ``state_dict()`` after so many look-ups and optimizer steps."""
        if self._world_size > 1:
            self._look_ups, self._place = look_ups, f"{look_ups}.{steps}"
            name = self._name(self._place, self._rank)
            self._store.request(lambda store: store.set(name, "1"))

    def located(self, look_up: int) -> None:
        """Warn, once, if a rank did not call ``state_dict()`` where this rank did, before the look-up began, or if this
        rank's part was dropped and another's was pickled."""
        if look_up <= self._look_ups:
            return
        if self._part is not None and self._part() is None:
            self._warn_of_dropped_part()
        place, self._place = self._place, ""
        if place and not self._warned and (missing := self._missing(place)):
            self._note(missing)
            self._warned = True  # the dense part may be all that is wanted of it
            logger.warning(
                "rank %d: state_dict() was called here and not on ranks %s: %s - %s (for the dense part alone it is "
                "complete)",
                self._rank, missing, self._text, REMEDY,
            )  # fmt: skip

    def part(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the ``shard`` of the call before in a form of which this rank knows whether it is pickled."""
        if self._world_size == 1 or type(shard) is not torch.Tensor:  # under a mode with tensors of its own
            return shard
        part, place = shard.as_subclass(_StatePart), self._place

        def pickled() -> None:
            if self._part_place == place:
                self._part = None
            self._store.request(lambda store: store.set(self._name(f"{place}/pickled", self._rank), "1"))

        part.pickled = pickled
        self._part, self._part_place, self._dropped_looks = weakref.ref(part), place, _DROPPED_LOOKS
        return part

    def _warn_of_dropped_part(self) -> None:
        others = self._missing(f"{self._part_place}/pickled")
        savers = [rank for rank in range(self._world_size) if rank not in others]
        self._dropped_looks -= 1
        if savers or not self._dropped_looks:
            self._part = None
        if savers and others:
            text = (
                f"ranks {savers} wrote what state_dict() returned there, and what it returned on rank {self._rank} was "
                "dropped"
            )
            USAGE_WARNINGS.note(UsageWarningKind.PARTIAL_STATE_DICT, text)
            logger.warning("rank %d: %s: %s - %s", self._rank, text, self._text, REMEDY)

    def compared_at_load(self, given: str) -> list[str]:
        """Return what each rank was given to load; nothing if the ranks cannot reach each other.

        Raises:
            CollectiveError: some ranks do not load within the timeout.
        """
        self._loads += 1
        place = f"load/{self._loads}"
        mine = self._name(place, self._rank)
        self._store.request(lambda store: store.set(mine, given))
        self._wait(place, "load_state_dict() compares what all ranks were given", "all of them load a checkpoint")
        names = [self._name(place, rank) for rank in range(self._world_size)]
        return self._store.request(lambda store: [store.get(name).decode() for name in names]) or []

    def wait_for_others(self) -> None:
        """Wait until all ranks have called ``state_dict()``, which then exchanges rows together.

        Raises:
            CollectiveError: some did not within the timeout.
        """
        place, self._place = self._place, ""
        self._wait(
            place,
            "state_dict() in a loop of flexd.prefetch, with rows in other nodes than their home, or with "
            "full_state_dict=True, exchanges rows with all ranks (all_to_all)",
            self._text,
        )

    def _wait(self, place: str, what: str, why: str) -> None:
        began, warned = time.monotonic(), False
        while place and (missing := self._missing(place)):
            waited = time.monotonic() - began
            text = f"rank {self._rank}: {what}, and ranks {missing} have not called it after {waited:.0f} s; {why}"
            if waited >= self._timeout_seconds:
                self._note(missing)
                raise CollectiveError(text, remedy=REMEDY)
            if waited >= min(_WARNING_SECONDS, self._timeout_seconds / 2) and not warned:
                warned = True
                logger.warning("%s - %s", text, REMEDY)
            time.sleep(_POLL_SECONDS)

    def _note(self, missing: list[int]) -> None:
        USAGE_WARNINGS.note(
            UsageWarningKind.PARTIAL_STATE_DICT,
            f"state_dict() was called on rank {self._rank} and not on ranks {missing}",
        )

    def _missing(self, place: str) -> list[int]:
        def find(store: Store) -> list[int]:
            names = [self._name(place, rank) for rank in range(self._world_size)]
            if store.check(names):
                return []
            return [rank for rank, name in enumerate(names) if not store.check([name])]

        return self._store.request(find) or []

    def _name(self, place: str, rank: int) -> str:
        return f"{self._key}/{place}/{rank}"


def save_local(collection: EmbeddingCollection, destination: dict[str, Any], prefix: str) -> None:
    """Collective while the prefetch pipeline is active, rows have moved, or with ``full_state_dict``. Store copies of
    this rank's home rows, their state and the step; or of all rows on rank 0.

    The copies are in host memory: an accelerator has no room for its tables twice.
    """
    engine = collection.engine
    detector = _detector(engine)
    detector.called(engine.look_ups, engine.steps)
    part = None if collection.full_state_dict else detector.part(_shard(engine))  # of the place that the wait ends
    if engine.settles_with_others or collection.full_state_dict:
        detector.wait_for_others()
    engine.settle()
    if part is None:
        save_full(collection, destination, prefix)
        return
    own = _own(engine, prefix)
    for index, store in enumerate(engine.stores):
        destination[f"{own}group{index}.rows"] = store.rows[: store.home_rows].to("cpu", copy=True)
        destination[f"{own}group{index}.state"] = store.state[: store.home_rows].to("cpu", copy=True)
    for name, column in ({} if engine.ids is None else engine.ids.state()).items():
        destination[f"{own}ids.{name}"] = column.to("cpu", copy=True)
    destination[f"{own}shard"] = part


def load_local(
    collection: EmbeddingCollection,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Collective. Load what ``save_local`` stored, and add differences to the lists like
    ``nn.Module._load_from_state_dict``. If ranks were given parts that do not fit together, nothing is loaded on any.
    """
    engine = collection.engine
    engine.before_rows_load()
    own, mine = _own(engine, prefix), _shard(engine)
    shards = [f"{own}shard", *(key for key in state if key.startswith(prefix) and key.endswith(".shard"))]
    shard = next((state[key].cpu() for key in shards if key in state), None)
    given, fault = "no rows", ""
    if is_full(state, prefix):
        given = "whole tables"
    elif shard is not None:
        given = "its part" if torch.equal(shard[:2], mine[:2]) else f"the part of rank {shard[0]} of {shard[1]}"
        if not torch.equal(shard[:3], mine[:3]):
            fault = (
                f"saved by rank {int(shard[0])} of {int(shard[1])}, loaded by rank {int(mine[0])} of {int(mine[1])}"
                + (f": it has that rank's rows alone; {REMEDY}" if shard[2] == mine[2] else ", with other tables")
            )
    if engine.groups.layout.world_size > 1:
        of_ranks = _detector(engine).compared_at_load(f"{given}, which does not fit" if fault else given)
        odd = [f"rank {rank} was given {other}" for rank, other in enumerate(of_ranks) if other != given]
        if odd and not fault:
            more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
            fault = f"rank {mine[0]} was given {given}, {', '.join(odd[:5])}{more}; {REMEDY}"
    if fault:
        errors.append(f"{prefix}shard: {fault}")
        return
    if given == "whole tables":
        load_full(collection, state, prefix, missing, unexpected, errors)
        return
    expected = {f"{own}shard"}
    for index, store in enumerate(engine.stores):
        for name, held in (("rows", store.rows), ("state", store.state)):
            key = f"{own}group{index}.{name}"
            expected.add(key)
            value = state.get(key)
            if value is None:
                missing.append(key)
            elif value.shape != (store.home_rows, held.shape[1]):
                errors.append(f"{key}: shape {tuple(value.shape)}, this rank holds {(store.home_rows, held.shape[1])}")
            else:
                held[: store.home_rows] = value
    if shard is None:
        missing.append(f"{own}shard")
    else:
        engine.steps = int(shard[3])
    if engine.ids is not None:
        columns = {name: state.get(f"{own}ids.{name}") for name in engine.ids.state()}
        expected |= {f"{own}ids.{name}" for name in columns}
        missing += [f"{own}ids.{name}" for name, column in columns.items() if column is None]
        errors += engine.ids.load_state({name: column for name, column in columns.items() if column is not None})
    unexpected.extend(key for key in state if key.startswith(prefix) and key not in expected)


def _detector(engine: RowEngine) -> PartialStateDictDetector:
    mine = sum(len(engine.homes.run(table, engine.groups.rank).rows) for table in range(len(engine.keyspace.tables)))
    return engine.join(PartialStateDictDetector, engine.groups, mine, engine.keyspace.total_rows)


def _own(engine: RowEngine, prefix: str) -> str:
    return f"{prefix}rank{engine.groups.rank}."


def _shard(engine: RowEngine) -> torch.Tensor:
    """Return int64 [4]: rank, world size and table digest, which determine the home rows of this rank, and the step."""
    groups = engine.groups
    digest = int(engine.keyspace.digest[:15], 16)
    return torch.tensor([groups.rank, groups.layout.world_size, digest, engine.steps], device="cpu")
