"""``state_dict`` of a collection: the home rows of one rank, for that rank of an equally large job.

Keys contain the rank (``rank0.group0.rows``): ``torch.distributed.checkpoint`` gathers the state dicts of all ranks and
would otherwise treat equal keys as copies and keep the first. ``flexd.embedding.checkpoint.checkpoint`` saves the form
that any number of ranks can load.

Rows are saved by slots. If home rules have changed in training, the places of the rows are saved too; where they are
others in the job that loads, rows travel to their homes.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from flexd.core.homes import NO_KEY, HomePart, Homes
from flexd.embedding.checkpoint.lone_saves import REMEDY
from flexd.embedding.checkpoint.saved_rows import send_home, window_rows
from flexd.embedding.engine import RowEngine


def save_local(engine: RowEngine, destination: dict[str, Any], prefix: str) -> None:
    """Collective while run-ahead is active or rows have moved. Store copies of this rank's home rows, their state and
    the step.

    The copies are in host memory: an accelerator has no room for its tables twice.
    """
    engine.lone_saves.called(engine.steps)
    if engine.settles_with_others:
        engine.lone_saves.wait_for_others()
    engine.settle()
    own = _own(engine, prefix)
    for index, store in enumerate(engine.stores):
        destination[f"{own}group{index}.rows"] = store.rows[: store.home_rows].to("cpu", copy=True)
        destination[f"{own}group{index}.state"] = store.state[: store.home_rows].to("cpu", copy=True)
    destination[f"{own}shard"] = _shard(engine)
    if engine.homes.home_parts != engine.first_homes.home_parts:
        places = [astuple(part) for part in engine.homes.home_parts]
        destination[f"{own}homes"] = torch.tensor(places, dtype=torch.int64, device="cpu")


def load_local(
    engine: RowEngine,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Collective while run-ahead is active, rows have moved, or home rules are others than when it was saved. Load what
    ``save_local`` stored, and add differences to the lists like ``nn.Module._load_from_state_dict``."""
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
    expected = {f"{own}shard", f"{own}homes"}
    saved_homes = _saved_homes(engine, state.get(f"{own}homes"))
    for index, store in enumerate(engine.stores):
        for name, held in (("rows", store.rows), ("state", store.state)):
            key = f"{own}group{index}.{name}"
            expected.add(key)
            value = state.get(key)
            if value is None:
                missing.append(key)
            elif value.shape != (store.home_rows, held.shape[1]):
                errors.append(f"{key}: shape {tuple(value.shape)}, this rank holds {(store.home_rows, held.shape[1])}")
            elif saved_homes is None:
                held[: store.home_rows] = value
    if saved_homes is not None and not missing and not errors:
        for index in range(len(engine.stores)):
            saved = (state[f"{own}group{index}.rows"], state[f"{own}group{index}.state"])
            _send_home(engine, index, saved_homes, saved)
    if shard is None:
        missing.append(f"{own}shard")
    else:
        engine.steps = int(shard[3])
    unexpected.extend(key for key in state if key.startswith(prefix) and key not in expected)


def _saved_homes(engine: RowEngine, places: torch.Tensor | None) -> Homes | None:
    """Return where rows were when they were saved; None: where they are now.

    Args:
        places: int64 [parts, 6], the ``HomePart`` of each; None: rows were where they are in a new collection.
    """
    first, now = engine.first_homes, engine.homes
    parts = first.home_parts if places is None else tuple(HomePart(*numbers) for numbers in places.tolist())
    return None if parts == now.home_parts else first.with_places(parts)


def _send_home(engine: RowEngine, group: int, saved_homes: Homes, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Collective. Write rows and state [home rows, c], saved by their slots, to where their homes are now."""
    store, world = engine.stores[group], engine.groups.world
    most, each = int(engine.homes.home_rows(group).max()), window_rows(store)
    for first in range(0, most, each):
        slots = np.arange(first, max(first, min(first + each, store.home_rows)), dtype=np.int64)
        keys = saved_homes.keys(slots * store.world_size + store.first_home_address)
        used = torch.from_numpy(slots[keys != NO_KEY])
        columns = [column.cpu().index_select(0, used).contiguous().view(torch.uint8) for column in saved]
        packed = torch.cat([column for column in columns if column.shape[1]], dim=1).to(store.rows.device)
        addresses = torch.from_numpy(engine.homes.addresses(keys[keys != NO_KEY])).to(store.rows.device)
        with engine.router.traffic.uncounted():
            send_home(world, store, addresses, packed)


def _own(engine: RowEngine, prefix: str) -> str:
    return f"{prefix}rank{engine.groups.rank}."


def _shard(engine: RowEngine) -> torch.Tensor:
    """Return int64 [4]: rank, world size and table digest, which determine the home rows of this rank, and the step."""
    groups = engine.groups
    digest = int(engine.keyspace.digest[:15], 16)
    return torch.tensor([groups.rank, groups.layout.world_size, digest, engine.steps], device="cpu")
