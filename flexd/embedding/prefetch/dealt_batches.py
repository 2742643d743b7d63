"""Batches of a loader, dealt one batch farther ahead than they are looked up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flexd.core.errors import CollectiveError
from flexd.embedding.affinity.dealer import Dealer
from flexd.embedding.affinity.sample_parts import SampleParts
from flexd.embedding.jagged import Jagged
from flexd.embedding.prefetch.run_ahead import RunAhead

END = object()
"""In place of a batch: the loader has no further one."""


@dataclass(frozen=True)
class LoaderFailure:
    """An exception in place of a batch: the other ranks learn of it with the look-up of the batch."""

    error: Exception


class DealtBatches:
    """Iterates over dealt batches.

    The next batch is dealt at the end of the job that ``RunAhead`` has announced, or, where there was none since the
    last one, at once. Every rank iterates at the same points.

    Args:
        read: batches and what ended them, without end.
    """

    def __init__(self, read: Iterator[Any], dealer: Dealer, run_ahead: RunAhead) -> None:
        self._read, self._dealer, self._run_ahead = read, dealer, run_ahead
        self._next = self._read_next()

    def __iter__(self) -> DealtBatches:
        return self

    def __next__(self) -> Any:
        dealt = self._run_ahead.beside_result()
        if dealt is None:
            dealt = self._run_ahead.run(self._next)
        self._dealer.count_step()
        if dealt.shipped and self._run_ahead.on_stream:
            _record_stream(dealt.batch)
        self._next = self._run_ahead.beside = self._read_next()
        return dealt.batch

    def _read_next(self) -> partial[_Dealt]:
        return partial(_deal, self._dealer, next(self._read))


@dataclass(frozen=True)
class _Dealt:
    batch: Any
    shipped: bool = False


def _deal(dealer: Dealer, batch: Any) -> _Dealt:
    ready = batch is not END and not isinstance(batch, LoaderFailure)
    try:
        dealt = dealer.deal(batch, ready=ready)
    except CollectiveError:  # no rank can go on
        raise
    except Exception as error:
        return _Dealt(LoaderFailure(error))
    return _Dealt(dealt, shipped=dealt is not batch)


def _record_stream(batch: Any) -> None:
    """Keep memory of tensors that the stream of the jobs made until the work of this stream is done."""
    for part in SampleParts.of(batch).values:
        for tensor in (part.values, part.lengths) if isinstance(part, Jagged) else (part,):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
