"""``state_dict`` of a collection: the home rows of one rank, for that rank of an equally large job.

Keys contain the rank (``rank0.group0.rows``): ``torch.distributed.checkpoint`` gathers the state dicts of all ranks and
would otherwise treat equal keys as copies and keep the first. ``ShardedState`` saves the form that any number of ranks
can load.

A rank that calls ``state_dict()`` alone is warned. Each call is noted in the store of the process group. A look-up is
collective, so when one that began after a call has found its rows, every rank that calls ``state_dict()`` at this point
of the program has done so. The store is used by ranks that call ``state_dict()``, and there is no waiting for others,
except in a loop of ``flexd.prefetch``, where the call is collective.
"""

import logging
import time
from typing import Any

import torch

from flexd.core.errors import CollectiveError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.calls import BoundedStore, Store
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.step import StepMoments

logger = logging.getLogger(__name__)

REMEDY = (
    "call state_dict() on every rank and keep what each returns, or save all rows with flexd.CheckpointSeries or "
    "flexd.ShardedState, on every rank"
)
_POLL_SECONDS = 0.05
_WARNING_SECONDS = 10.0


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

    def called(self, look_ups: int, steps: int) -> None:
        """Note that this rank calls ``state_dict()`` after so many look-ups and optimizer steps."""
        if self._world_size > 1:
            self._look_ups, self._place = look_ups, f"{look_ups}.{steps}"
            name = self._name(self._place, self._rank)
            self._store.request(lambda store: store.set(name, "1"))

    def located(self, look_up: int) -> None:
        """Warn, once, if a rank did not call ``state_dict()`` where this rank did, before the look-up began."""
        if look_up <= self._look_ups:
            return
        place, self._place = self._place, ""
        if place and not self._warned and (missing := self._missing(place)):
            self._note(missing)
            self._warned = True  # the dense part may be all that is wanted of it
            logger.warning(
                "rank %d: state_dict() was called here and not on ranks %s: %s - %s (for the dense part alone it is "
                "complete)",
                self._rank, missing, self._text, REMEDY,
            )  # fmt: skip

    def wait_for_others(self) -> None:
        """Wait until all ranks have called ``state_dict()``, which then finishes an exchange of the loop together.

        Raises:
            CollectiveError: some did not within the timeout.
        """
        began, warned, place = time.monotonic(), False, self._place
        self._place = ""
        while place and (missing := self._missing(place)):
            waited = time.monotonic() - began
            text = (
                f"rank {self._rank}: state_dict() in a loop of flexd.prefetch, or with rows in other nodes than their "
                f"home, exchanges rows with all ranks (all_to_all), and ranks {missing} have not called it after "
                f"{waited:.0f} s; {self._text}"
            )
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


def save_local(engine: RowEngine, destination: dict[str, Any], prefix: str) -> None:
    """Collective while the prefetch pipeline is active or rows have moved. Store copies of this rank's home rows,
    their state and the step.

    The copies are in host memory: an accelerator has no room for its tables twice.
    """
    mine = sum(len(engine.homes.run(table, engine.groups.rank).rows) for table in range(len(engine.keyspace.tables)))
    detector = engine.join(PartialStateDictDetector, engine.groups, mine, engine.keyspace.total_rows)
    detector.called(engine.look_ups, engine.steps)
    if engine.settles_with_others:
        detector.wait_for_others()
    engine.settle()
    own = _own(engine, prefix)
    for index, store in enumerate(engine.stores):
        destination[f"{own}group{index}.rows"] = store.rows[: store.home_rows].to("cpu", copy=True)
        destination[f"{own}group{index}.state"] = store.state[: store.home_rows].to("cpu", copy=True)
    destination[f"{own}shard"] = _shard(engine)


def load_local(
    engine: RowEngine,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Collective while the prefetch pipeline is active or rows have moved. Load what ``save_local`` stored, and add
    differences to the lists like ``nn.Module._load_from_state_dict``."""
    engine.before_rows_load()
    own, mine = _own(engine, prefix), _shard(engine)
    shards = [f"{own}shard", *(key for key in state if key.startswith(prefix) and key.endswith(".shard"))]
    shard = next((state[key].cpu() for key in shards if key in state), None)
    if shard is not None and not torch.equal(shard[:3], mine[:3]):
        errors.append(
            f"{prefix}shard: saved by rank {int(shard[0])} of {int(shard[1])}, loaded by rank {int(mine[0])} of "
            f"{int(mine[1])}"
            + (f": it has that rank's rows alone; {REMEDY}" if shard[2] == mine[2] else ", with other tables")
        )
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
    unexpected.extend(key for key in state if key.startswith(prefix) and key not in expected)


def _own(engine: RowEngine, prefix: str) -> str:
    return f"{prefix}rank{engine.groups.rank}."


def _shard(engine: RowEngine) -> torch.Tensor:
    """Return int64 [4]: rank, world size and table digest, which determine the home rows of this rank, and the step."""
    groups = engine.groups
    digest = int(engine.keyspace.digest[:15], 16)
    return torch.tensor([groups.rank, groups.layout.world_size, digest, engine.steps], device="cpu")
