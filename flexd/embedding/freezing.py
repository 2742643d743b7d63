"""``freeze`` and ``unfreeze`` of a collection: agreed on all ranks, then the same rows in other dim-groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import QUANTIZED, KeySpace
from flexd.embedding.exchange.hop import FREEZES, digest_of_settings, fault_of_table
from flexd.embedding.meetings import gathered
from flexd.embedding.pending_passes import forget_lost
from flexd.embedding.rank_rows import InitialRows, RankRows

if TYPE_CHECKING:
    from flexd.embedding.engine import RowEngine

_SAME = "call freeze and unfreeze with the same tables on every rank, between the same two steps"


def regrouped_rows(engine: RowEngine, names: Sequence[str], initial: InitialRows, *, freeze: bool) -> RankRows | None:
    """Collective. Return the rows in the dim-groups that they have once some tables are frozen or unfrozen; None if
    these are so already.

    Raises:
        EmbeddingError: on every rank: ranks name other tables or make other calls, a table is unknown, gradients wait
            for a step, or a rank has no memory. Nothing has changed.
    """
    keyspace = engine.keyspace
    _agree(engine, names, freeze=freeze)
    changed = keyspace.read_only | frozenset(names) if freeze else keyspace.read_only - frozenset(names)
    if changed == keyspace.read_only:
        return None
    engine.discard()
    return _built(engine, keyspace.with_read_only(changed), initial, _verb(names, freeze=freeze))


def _verb(names: Sequence[str], *, freeze: bool) -> str:
    return f"{'freeze' if freeze else 'unfreeze'}({', '.join(map(repr, names))})"


def _agree(engine: RowEngine, names: Sequence[str], *, freeze: bool) -> None:
    """Collective. Raise EmbeddingError on every rank unless all can do the same.

    Until ranks have met it makes the calls of a look-up, which another rank may make instead.
    """
    index, rank = engine.keyspace.index, engine.groups.rank
    unknown = [name for name in names if name not in index]
    mine = sorted({index[name] for name in names if name in index})
    call = _verb(names, freeze=freeze)
    engine.prepare()
    agreement = engine.meet(
        FREEZES, digest_of_settings(f"{mine} {unknown}"), flag=freeze, fault=fault_of_table(mine[0] if mine else 0)
    )
    if agreement.settings_differ:
        chosen = torch.zeros(1 + len(index), dtype=torch.int64)
        chosen[[1 + table for table in mine]] = 1
        chosen[0] = len(unknown)
        of_ranks = gathered(engine, chosen)
        tables = list(index)
        odd = [table for at, table in enumerate(tables, 1) if len({one[at] for one in of_ranks}) > 1]
        others = [number for number, one in enumerate(of_ranks) if one != of_ranks[rank]]
        text = f"ranks {others} name other tables" + (f", differing in {', '.join(odd)}" if odd else "")
        raise EmbeddingError(f"rank {rank}: {call}: {text}", remedy=_SAME)
    if unknown or not names:
        raise EmbeddingError(
            f"{call}: no table {', '.join(unknown)}" if unknown else f"{call} names no table",
            remedy=f"one of {', '.join(index)}",
        )
    stored = [name for name in names if engine.keyspace.tables[index[name]].dtype == QUANTIZED]
    if stored and not freeze:
        raise EmbeddingError(
            f"{call}: rows of {QUANTIZED} cannot be trained: {', '.join(stored)}",
            remedy="train a table of another dtype that gather_table() and load_rows() give these values",
        )
    forget_lost(engine)
    if engine.passes or engine.summed is not None:
        raise EmbeddingError(
            f"{call}: gradients of {max(1, len(engine.passes))} look-ups wait for a step",
            remedy="call it between two steps: after optimizer.step(), before the next look-up for training",
        )


def _built(engine: RowEngine, keyspace: KeySpace, initial: InitialRows, call: str) -> RankRows:
    """Collective. Make the rows on every rank, or raise EmbeddingError on every rank."""
    after: RankRows | None = None
    error: Exception | None = None
    try:
        with engine.calling():
            after = engine.rows.regrouped(keyspace, initial)
    except Exception as fault:  # of memory, mostly: the other ranks must not go on alone
        error = fault
    failed = [rank for rank, (has,) in enumerate(gathered(engine, torch.tensor([int(after is None)]))) if has]
    if after is None or failed:
        if after is not None:
            after.close_others(engine.rows)
        raise EmbeddingError(
            f"{call}: ranks {failed} cannot make the rows anew" + (f": {error}" if error else ""),
            remedy="it needs memory for a copy of the rows of dim-groups that are divided or joined",
        ) from error
    return after
