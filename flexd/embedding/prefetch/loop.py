"""``flexd.prefetch``: iterate over batches and look up each one's rows during the step before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.prefetch.run_ahead import RunAhead
from flexd.embedding.prefetch.run_ahead_job import NextBatch

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_END = object()


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

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        run_ahead = RunAhead.begin(self._collection.engine, self._timeout_seconds, self._passes_per_step)
        try:
            batches = iter(self._loader)
            following: Any = next(batches, _END)
            run_ahead.announce(self._next_batch(following))
            while True:
                run_ahead.start_announced()
                if following is _END:
                    run_ahead.finish()
                    return
                batch, following = following, next(batches, _END)
                run_ahead.announce(self._next_batch(following))
                yield batch
        finally:
            if not run_ahead.close():
                logger.warning("rank %d: the run-ahead thread did not end", self._collection.rank)

    def _next_batch(self, batch: Any) -> NextBatch:
        if batch is _END:
            return NextBatch(None, None)
        given = self._features(batch)
        return NextBatch(given, lambda: self._collection.resolve(given))


def prefetch(
    loader: Iterable[Batch],
    collection: EmbeddingCollection,
    *,
    features: Callable[[Batch], Any] = _identity,
    passes_per_step: int = 1,
    timeout_seconds: float = 300.0,
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
        timeout_seconds: deadline of each collective of run-ahead, and of each wait for it.

    Returns:
        An iterable with the loader's length; it can be iterated again.

    Raises:
        EmbeddingError: an argument is not positive. While iterating: another such loop runs; on every rank: another
            rank has more or fewer batches, or a job did not end within the deadline.
    """
    return Prefetch(loader, collection, features, passes_per_step, timeout_seconds)
