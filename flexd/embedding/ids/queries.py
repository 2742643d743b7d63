"""Which rows unbounded ids have, and which ids rows have: questions of any rank to the homes of the ids."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding import devices
from flexd.embedding.engine import RowEngine
from flexd.embedding.ids.id_sets import SLOTS
from flexd.embedding.ids.unbounded_ids import UnboundedIds
from flexd.embedding.meetings import agree_on_reading


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
    order, counts = devices.ordered(sets % world.size, world.size)
    with engine.calling(), engine.router.traffic.uncounted():
        ones = [1] * world.size
        sent, received = counts.tolist(), world.all_to_all(counts, ones, ones).tolist()
        width = words.shape[1]
        arrived = world.all_to_all(
            words.index_select(0, order).view(-1), [width * n for n in sent], [width * n for n in received]
        )
        answers = answer(arrived.view(-1, width))
        width = answers.shape[1]
        back = world.all_to_all(answers.view(-1), [width * n for n in received], [width * n for n in sent])
    back = back.view(-1, width)
    return torch.empty_like(back).index_copy_(0, order, back)
