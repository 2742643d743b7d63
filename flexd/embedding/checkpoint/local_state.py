"""``state_dict`` of a collection: the home rows of one rank, for that rank of an equally large job.

Keys contain the rank (``rank0.group0.rows``): ``torch.distributed.checkpoint`` gathers the state dicts of all ranks and
would otherwise treat equal keys as copies and keep the first. ``ShardedState`` saves the form that any number of ranks
can load.
"""

from __future__ import annotations

from typing import Any

import torch

from flexd.embedding.checkpoint.partial_state_dict import REMEDY, PartialStateDictDetector
from flexd.embedding.engine import RowEngine


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
