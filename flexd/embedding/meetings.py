"""Calls in which ranks meet beside look-ups: each sends the messages of a look-up without keys, so that it also meets
the call of a rank that looks rows up instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.hop import (
    BEGINS_LOOP,
    CONTINUES_LOOP,
    ENDS_LOOP,
    READS_TABLES,
    AgreementFlags,
    NextBatch,
    digest_of_settings,
)

if TYPE_CHECKING:
    from flexd.embedding.engine import RowEngine


def agree_on_end(engine: RowEngine, *, failed: bool) -> None:
    """Collective. Meet the other ranks at the end of a loop of ``flexd.prefetch`` whose batches were not located
    ahead.

    Args:
        failed: the loader of this rank raised an error.

    Raises:
        EmbeddingError: on every rank, if another one has a further batch or its loader failed.
    """
    engine.meet(ENDS_LOOP, engine.settings_digest, flag=failed)


def agree_on_reading(engine: RowEngine) -> None:
    """Collective. Settle, before whole tables are read, loaded or saved, and meet the other ranks.

    Raises:
        EmbeddingError: on every rank, if a rank looks rows up instead.
    """
    engine.settle()
    engine.meet(READS_TABLES, engine.settings_digest)


def agree_on_next(engine: RowEngine, loop: NextBatch) -> AgreementFlags:
    """Return what all ranks have of a loop's next batch. Collective if no look-up has told it.

    Raises:
        EmbeddingError: on every rank, if a rank makes another call.
    """
    del engine.loops[engine.loops.index(loop) + 1 :]  # loops within it that were given up
    return engine.meet(CONTINUES_LOOP, engine.settings_digest).flags if loop.agreed is None else loop.agreed


def agree_on_loop(engine: RowEngine, settings: str) -> None:
    """Collective. Compare the settings with which ranks begin a loop of ``flexd.prefetch``.

    Raises:
        EmbeddingError: on every rank, if settings differ or a rank makes another call.
    """
    digest = digest_of_settings(settings)
    if not engine.meet(BEGINS_LOOP, digest).settings_differ:
        return
    everyone = gathered(engine, torch.tensor([digest]))
    odd = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    raise EmbeddingError(
        f"ranks {odd} begin a loop of flexd.prefetch with other settings than rank 0; rank {engine.groups.rank}: "
        f"{settings}",
        remedy="call flexd.prefetch with the same arguments on every rank",
    )


def gathered(engine: RowEngine, numbers: torch.Tensor) -> list[list[int]]:
    """Collective. Return the int64 [n] numbers of every rank."""
    with engine.calling(), engine.router.traffic.uncounted():
        mine = numbers.to(engine.stores[0].rows.device)
        found: list[list[int]] = engine.groups.world.all_gather(mine).view(-1, len(numbers)).tolist()
    return found
