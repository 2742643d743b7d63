"""``flexd.prefetch``: iterate over batches and look up each one's rows during the step before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.prefetch.run_ahead import RunAhead
from flexd.embedding.prefetch.run_ahead_job import NextBatch

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_END = object()


@dataclass(frozen=True)
class _Failure:
    """The loader's exception in place of a batch: the other ranks learn of it with the look-up of the batch."""

    error: Exception


def _following(batches: Iterator[Any]) -> Any:
    try:
        return next(batches, _END)
    except Exception as error:
        return _Failure(error)


def _identity(batch: Any) -> Any:
    return batch


class Prefetch(Generic[Batch]):
    """Result of ``prefetch``; each iteration reads the loader once."""

    def __init__(
        self,
        loader: Iterable[Batch],
        collection: EmbeddingCollection,
        features: Callable[[Batch], Any],
        passes_per_step: int,
        timeout_seconds: float,
        one_thread: bool | None,
    ) -> None:
        if passes_per_step < 1 or not timeout_seconds > 0:
            raise EmbeddingError(
                f"prefetch: {passes_per_step} passes a step, a deadline of {timeout_seconds} s",
                remedy="give positive numbers",
            )
        self._loader = loader
        self._collection = collection
        self._features = features
        self._passes_per_step = passes_per_step
        self._timeout_seconds = timeout_seconds
        self._one_thread = one_thread

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        run_ahead = RunAhead.begin(
            self._collection.engine, self._timeout_seconds, self._passes_per_step, self._one_thread
        )
        run_ahead.fetches_rows = not self._collection.optimizer.moves_all_rows
        try:
            batches, following = self._first()
            run_ahead.announce(self._next_batch(following))
            while True:
                run_ahead.start_announced()
                if isinstance(following, _Failure):
                    raise following.error
                if following is _END:
                    run_ahead.finish()
                    return
                batch, following = following, _following(batches)
                run_ahead.announce(self._next_batch(following))
                yield batch
        finally:
            if not run_ahead.close():
                logger.warning("rank %d: the run-ahead thread did not end", self._collection.rank)

    def _first(self) -> tuple[Iterator[Batch], Any]:
        """Return the loader's batches and the first, ``_END``, or the loader's exception."""
        try:
            batches = iter(self._loader)
        except Exception as error:
            return iter(()), _Failure(error)
        return batches, _following(batches)

    def _next_batch(self, batch: Any) -> NextBatch:
        if batch is _END or isinstance(batch, _Failure):
            return NextBatch(None, None, failed=batch is not _END)
        given = self._features(batch)
        return NextBatch(given, lambda: self._collection.resolve(given))


def prefetch(
    loader: Iterable[Batch],
    collection: EmbeddingCollection,
    *,
    features: Callable[[Batch], Any] = _identity,
    passes_per_step: int = 1,
    timeout_seconds: float = 300.0,
    one_thread: bool | None = None,
) -> Prefetch[Batch]:
    """Iterate over ``loader``, and exchange the rows of each batch while the step before it computes.

    ::

        for batch in flexd.prefetch(loader, collection, features=lambda batch: batch.features):
            rows = collection(batch.features)
            ...

    Losses and tables are those of training without it. Iterating is collective: every rank goes over equally many
    batches, and leaves the loop at the same one. While it runs, reading rows from outside a step (``state_dict``,
    ``gather_table``, evaluation on other batches) is collective too, since a step may have deferred gradients.

    Args:
        loader: batches whose ids are on the device of the tables. One batch more than usual is held.
        features: returns the part of a batch that the collection is called with: the same object, or a mapping of the
            same ones, each time. Default: the batch itself.
        passes_per_step: forward passes between two steps of the optimizer (gradient accumulation). With another number
            than this training is still exact, but less of the exchange overlaps.
        timeout_seconds: deadline of each collective of run-ahead, and of each wait for it; with ``one_thread`` that of
            the process group holds.
        one_thread: whether the training thread issues the collectives of run-ahead too; equal on all ranks. Default:
            on an accelerator, where it cannot be switched off. On a CPU nothing overlaps with it.

    Returns:
        An iterable with the loader's length; it can be iterated again.

    Raises:
        EmbeddingError: an argument is not positive. While iterating: another such loop runs; on every rank: another
            rank has more or fewer batches, the loader of another rank raised an error, or a job did not end within the
        deadline. The rank whose loader raised raises that error.
    """
    return Prefetch(loader, collection, features, passes_per_step, timeout_seconds, one_thread)
