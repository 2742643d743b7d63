"""``flexd.prefetch``: a trainer's loop over batches that are looked up ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.prefetch.job import Upcoming
from flexd.embedding.prefetch.run_ahead import RunAhead

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_END = object()


def _itself(batch: Any) -> Any:
    return batch


class Prefetch(Generic[Batch]):
    """Made by ``prefetch``; each iteration goes over the loader once."""

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
        engine = self._collection.engine
        ahead = engine.run_ahead(self._timeout_seconds, self._passes_per_step)
        try:
            batches = iter(self._loader)
            upcoming: Any = next(batches, _END)
            ahead.announce(self._upcoming(upcoming))
            while True:
                engine.start_ahead()
                if upcoming is _END:
                    ahead.finish()
                    return
                batch, upcoming = upcoming, next(batches, _END)
                ahead.announce(self._upcoming(upcoming))
                yield batch
        finally:
            self._close(ahead)

    def _upcoming(self, batch: Any) -> Upcoming:
        if batch is _END:
            return Upcoming(None, None)
        given = self._features(batch)
        return Upcoming(given, lambda: self._collection.resolve(given))

    def _close(self, ahead: RunAhead) -> None:
        if not ahead.close():
            logger.warning("rank %d: the exchange ahead does not end", self._collection.rank)


def prefetch(
    loader: Iterable[Batch],
    collection: EmbeddingCollection,
    *,
    features: Callable[[Batch], Any] = _itself,
    passes_per_step: int = 1,
    timeout_seconds: float = 300.0,
) -> Prefetch[Batch]:
    """Iterates over ``loader``, and exchanges the rows of each batch while the step before it computes.

    ::

        for batch in flexd.prefetch(loader, collection, features=lambda batch: batch.features):
            rows = collection(batch.features)
            ...

    Losses and tables are as without it. Iterating is collective: every rank goes over equally many batches, and leaves
    the loop at the same one. While it runs, reading rows from outside a step (``state_dict``, ``gather_table``,
    evaluation on other batches) is collective too, since a step may have left gradients to be pushed.

    Args:
        loader: gives batches whose ids are where the tables are. One batch more than usual is held.
        features: what of a batch the collection is called with; the same object, or a mapping of the same ones, each
            time. Default: the batch itself.
        passes_per_step: forward passes between two steps of the optimizer (gradient accumulation). With another number
            than this everything is still exact, only less of it is ahead.
        timeout_seconds: of each collective and of each wait for the exchange ahead.

    Returns:
        an iterable with the loader's length; it can be gone over again.

    Raises:
        EmbeddingError: an argument is not positive. While iterating: another such loop runs; on every rank: another
            rank has more or fewer batches, or an exchange ahead did not end within the deadline.
    """
    return Prefetch(loader, collection, features, passes_per_step, timeout_seconds)
