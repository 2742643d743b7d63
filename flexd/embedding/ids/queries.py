"""Which rows unbounded ids have, which ids rows have, and rows for ids from elsewhere: any rank asks the homes of the
ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.checkpoint.saved_tables import send_home
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.addressed_rows import AddressedRows
from flexd.embedding.ids.distinct_ids import ids_by_set
from flexd.embedding.ids.id_sets import SLOTS
from flexd.embedding.ids.unbounded_ids import UnboundedIds
from flexd.embedding.meetings import agree_on_reading
from flexd.embedding.store.quantized_rows import as_stored


@torch.no_grad()
def rows_of(engine: RowEngine, table: int, ids: torch.Tensor) -> torch.Tensor:
    """Collective. As ``EmbeddingCollection.rows_of``."""
    known, number = _of_table(engine, table)
    numbers = torch.full_like(ids, number)
    sets = known.sets.of_ids(ids, numbers)

    def slots(asked: torch.Tensor) -> torch.Tensor:
        return known.slots.find(*asked.T.contiguous()).unsqueeze(1)

    found = _ask(engine, sets, torch.stack([_local(engine, sets), ids], dim=1), slots).view(-1)
    rows = known.sets.keys(sets, found) - known.sets.tables[number].first_key
    return torch.where(found < 0, -1, rows)


@torch.no_grad()
def ids_of(engine: RowEngine, table: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective. As ``EmbeddingCollection.ids_of``."""
    known, number = _of_table(engine, table)
    count = known.sets.tables[number].slots
    own = (rows >= 0) & (rows < count)
    sets, slots = known.sets.places(rows.clamp(0, count - 1), number)

    def ids(asked: torch.Tensor) -> torch.Tensor:
        at = asked.view(-1)
        used = known.slots.uses.view(-1)[at] != 0
        return torch.stack([known.slots.ids.view(-1)[at], used.to(torch.int64)], dim=1)

    found, used = _ask(engine, sets, (_local(engine, sets) * SLOTS + slots).unsqueeze(1), ids).T.contiguous()
    has = own & (used > 0)
    return torch.where(has, found, 0), has


@torch.no_grad()
def load_ids(
    engine: RowEngine, table: int, ids: torch.Tensor, values: torch.Tensor, initial_state: float
) -> torch.Tensor:
    """Collective. As ``EmbeddingCollection.load_ids``."""
    known, number = _of_table(engine, table)
    spec = engine.keyspace.tables[table]
    fits = ids.dim() == 1 and ids.dtype == torch.int64 and values.shape == (len(ids), spec.dim)
    agree_on_reading(engine)
    with engine.calling(), engine.router.traffic.uncounted():
        faults = engine.groups.world.all_gather(torch.tensor([not fits], device=known.slots.ids.device))
    wrong = faults.view(-1).tolist()
    if any(wrong):
        raise EmbeddingError(
            f"load_ids of table {spec.name!r}: ids of rank {wrong.index(True)} are no int64 [n], or its values are no "
            f"[n, {spec.dim}]",
            remedy="give each rank ids and as many rows, or none of both",
        )
    sets = known.sets.of_ids(ids, torch.full_like(ids, number))

    def admit(asked: torch.Tensor) -> torch.Tensor:
        of_ids, given = asked.T.contiguous()
        chosen, place = ids_by_set(of_ids, given, known.sets.hashes(given), several=False)
        at, id_ = of_ids.index_select(0, chosen), given.index_select(0, chosen)
        decided = known.slots.decide(at, id_, torch.full_like(at, 2), known.next_step, torch.ones_like(at))
        # They read the rows that they have now, and not the shared one.
        known.slots.apply(replace(decided, uses=decided.uses.abs()))
        return decided.slots.index_select(0, place).unsqueeze(1)

    slots = _ask(engine, sets, torch.stack([_local(engine, sets), ids], dim=1), admit).view(-1)
    known.loaded()
    engine.before_rows_load()
    has = slots >= 0
    keys = known.sets.keys(sets, slots)
    store = next(store for store in engine.stores if table in store.group.tables)
    stored = as_stored(values.to(keys.device), store.rows.dtype)[has]
    packed = store.fitted(stored.contiguous().view(torch.uint8), initial_state)
    with engine.calling(), engine.router.traffic.uncounted():
        send_home(engine.groups.world, store, store.homes.addresses(keys[has]), packed)
    return torch.where(has, keys - known.sets.tables[number].first_key, -1)


def _of_table(engine: RowEngine, table: int) -> tuple[UnboundedIds, int]:
    if engine.ids is None or table not in engine.ids.numbers:
        raise EmbeddingError(
            f"the ids of table {engine.keyspace.tables[table].name!r} are its rows",
            remedy='flexd.EmbeddingTable(..., ids="unbounded") has others',
        )
    return engine.ids, engine.ids.numbers[table]


def _local(engine: RowEngine, sets: torch.Tensor) -> torch.Tensor:
    return torch.div(sets, engine.groups.layout.world_size, rounding_mode="floor")


def _ask(
    engine: RowEngine, sets: torch.Tensor, words: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Collective. Send int64 [n, a] words to the homes of int64 [n] sets, and return their int64 [n, b] answers.

    Args:
        answer: int64 [m, a] words that arrived -> int64 [m, b].
    """
    agree_on_reading(engine)
    world = engine.groups.world
    with engine.calling(), engine.router.traffic.uncounted():
        asked = AddressedRows.exchanged(world, sets % world.size, words)
        return asked.answered(world, answer(asked.arrived))
