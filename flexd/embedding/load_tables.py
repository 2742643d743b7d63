"""``flexd.load_tables``: tables from a checkpoint of another trainer, by keys of its own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.mistakes import MISTAKES, MistakeKind
from flexd.embedding.collection import EmbeddingCollection

_SHOWN = 20
"""Keys named in an error."""


def load_tables(
    collection: EmbeddingCollection,
    state: Mapping[str, torch.Tensor] | None,
    keys: Mapping[str, str],
    *,
    source: int = 0,
) -> tuple[str, ...]:
    """Collective. Load whole tables from tensors of one rank, which have keys of any form.

    ::

        state = torch.load("model.pt", mmap=True) if rank == 0 else None
        flexd.load_tables(tables, state, {"items": "encoder.item_emb.weight"})

    Rank ``source`` sends each row to its home, table by table and window by window: no other rank has a whole table.
    Tables that are not in ``keys`` keep their rows, and optimizer states do not change: see
    ``EmbeddingCollection.load_rows``.

    Args:
        state: key -> [rows, dim] of a table, of any floating dtype. A value is read for its shape before anything is
            loaded, and again when its table is. Ignored on other ranks than ``source``, which may give None.
        keys: table -> key, equal on all ranks.
        source: the rank whose tensors are loaded.

    Returns:
        The keys of ``state`` that no table was loaded from, sorted; empty on other ranks.

    Raises:
        EmbeddingError: on every rank: a key is not in ``state``, a tensor does not have its table's shape, or ranks
            gave other keys or another source. Nothing is loaded. On this rank: a table or the source is unknown.
    """
    unknown = [name for name in keys if name not in collection.keyspace.index]
    if unknown:
        raise EmbeddingError(
            f"load_tables: no table {', '.join(map(repr, unknown[:_SHOWN]))}",
            remedy=f"one of {', '.join(collection.keyspace.index)}",
        )
    if not 0 <= source < collection.layout.world_size:
        raise EmbeddingError(f"load_tables: source={source}", remedy=f"a rank below {collection.layout.world_size}")
    names = [name for name in collection.keyspace.index if name in keys]  # each load is collective: one order
    here = collection.rank == source
    faults = _faults(collection, state, [(name, keys[name]) for name in names]) if here else []
    _agree(collection, repr([(name, keys[name]) for name in names]), source, faults)
    for name in names:
        collection.load_rows(name, 0, state[keys[name]] if here and state is not None else None, source=source)
    return tuple(sorted(set(state) - {keys[name] for name in names})) if here and state is not None else ()


def _faults(
    collection: EmbeddingCollection, state: Mapping[str, torch.Tensor] | None, pairs: list[tuple[str, str]]
) -> list[str]:
    """Return why tensors do not fit; empty if all do."""
    if state is None:
        return ["it gave no state"]
    missing = [key for _, key in pairs if key not in state]
    if missing:
        used = {key for _, key in pairs}
        spare = sorted(key for key in state if key not in used)
        more = f" and {len(spare) - _SHOWN} more" if len(spare) > _SHOWN else ""
        have = f"; the state has {', '.join(map(repr, spare[:_SHOWN]))}{more} beside" if spare else ""
        return [f"no key {', '.join(map(repr, missing[:_SHOWN]))}{have}"]
    faults = []
    for name, key in pairs:
        spec = collection.keyspace.tables[collection.keyspace.index[name]]
        value = state[key]
        if tuple(value.shape) != (spec.rows, spec.dim) or not value.dtype.is_floating_point:
            faults.append(
                f"{key!r} is {tuple(value.shape)} of {value.dtype}, table {name!r} has {spec.rows} rows of {spec.dim}"
            )
    if faults:
        MISTAKES.note(MistakeKind.ROW_COUNTS, f"load_tables: {faults[0]}")
    return faults


def _agree(collection: EmbeddingCollection, pairs: str, source: int, faults: list[str]) -> None:
    """Collective. Raise on every rank if one has faults, or other arguments."""
    mine = torch.tensor([zlib.crc32(pairs.encode()), source, len(faults)], dtype=torch.int64, device=collection.device)
    collection.engine.settle()
    with collection.traffic.uncounted():
        of_ranks = collection._groups.world.all_gather(mine).tolist()
    if faults:
        raise EmbeddingError(
            f"load_tables: rank {collection.rank}: {'; '.join(faults[:_SHOWN])}",
            remedy="name the key of each table in keys=, and make tables with the checkpoint's rows and dimensions",
        )
    faulty = [rank for rank, (_, _, count) in enumerate(of_ranks) if count]
    if faulty:
        raise EmbeddingError(
            f"load_tables: the tensors of rank {faulty[0]} do not fit", remedy=f"see the error of rank {faulty[0]}"
        )
    odd = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[:2] != of_ranks[0][:2]]
    if odd:
        raise EmbeddingError(
            f"load_tables: ranks {odd} gave other keys or another source than rank 0",
            remedy="call it with the same keys= and source= on every rank",
        )
