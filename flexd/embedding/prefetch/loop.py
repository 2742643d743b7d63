"""``flexd.prefetch``: iterate over batches and look up each one's rows during the step before."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.prefetch.announced_input import AnnouncedInput, LoaderEnd
from flexd.embedding.prefetch.pipeline import PrefetchPipeline

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")


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
        one_thread: bool | None,
        ahead: int | None,
    ) -> None:
        if passes_per_step < 1 or (ahead is not None and ahead < 1):
            raise EmbeddingError(
                f"prefetch: {passes_per_step} passes per step, {ahead} batches ahead", remedy="give positive numbers"
            )
        self._loader = loader
        self._collection = collection
        self._features = features
        self._passes_per_step = passes_per_step
        self._one_thread = one_thread
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        engine = self._collection.engine
        if PrefetchPipeline.is_looping(engine):
            yield from self._nested()
            return
        prefetch_pipeline = PrefetchPipeline.begin(engine, self._passes_per_step, self._one_thread, self._ahead)
        prefetch_pipeline.fetches_rows = not self._collection.optimizer.moves_all_rows
        try:
            queue = self._read()
            ahead = [self._announced(next(queue)) for _ in range(prefetch_pipeline.batches_ahead)]
            prefetch_pipeline.announce(ahead[0][1], [announced for _, announced in ahead])
            while True:
                prefetch_pipeline.start_announced()
                batch, now = ahead.pop(0)
                if isinstance(batch, LoaderEnd):
                    prefetch_pipeline.finish(batch)
                    return
                ahead.append(self._announced(next(queue)))
                *earlier, latest = (now, *(announced for _, announced in ahead))
                for one in earlier:
                    if isinstance(one, AnnouncedInput) and isinstance(latest, AnnouncedInput):
                        one.check_overwritten(latest)
                prefetch_pipeline.announce(ahead[0][1], [announced for _, announced in ahead])
                yield batch
        finally:
            if not prefetch_pipeline.close():
                logger.warning("rank %d: the prefetch pipeline thread did not end", self._collection.rank)

    def _nested(self) -> Iterator[Batch]:
        """Yield the batches of a loop inside another one of the collection, for validation say: each is looked up when
        it is given, and the next batch of the outer loop is located again if rows have changed."""
        engine = self._collection.engine
        engine.settle()
        engine.agree_on_loop("a loop inside another one")
        for batch in self._read():
            if isinstance(batch, LoaderEnd):
                batch.agree(engine)
                return
            yield batch

    def _read(self) -> Iterator[Any]:
        """Yield the loader's batches, and then without end what ended it."""
        ended = LoaderEnd()
        try:
            for batch in self._loader:  # noqa: UP028 - "yield from" would close a generator that is left early
                yield batch
        except Exception as error:
            ended = LoaderEnd(error)
        while True:
            yield ended

    def _announced(self, batch: Any) -> tuple[Any, AnnouncedInput | LoaderEnd]:
        """Return a batch, or what ended the loader, and what is announced of it."""
        if isinstance(batch, LoaderEnd):
            return batch, batch
        return batch, AnnouncedInput(self._features(batch), self._collection.read, self._collection.keys_of)


def prefetch(
    loader: Iterable[Batch],
    collection: EmbeddingCollection,
    *,
    features: Callable[[Batch], Any] = _identity,
    passes_per_step: int = 1,
    one_thread: bool | None = None,
    ahead: int | None = None,
) -> Prefetch[Batch]:
    """Iterate over ``loader``, and exchange the rows of each batch while the step before it computes, where that wins.

    ::

        for batch in flexd.prefetch(loader, collection, features=lambda batch: batch.features):
            rows = collection(batch.features)
            ...

    Losses and tables are those of training without it. Iterating is collective: every rank goes over equally many
    batches, and leaves the loop at the same one. While it runs, reading rows from outside a step (``state_dict``,
    ``gather_table``, evaluation on other batches) is collective too, since a step may have deferred gradients.

    Args:
        loader: batches whose ids are on the device of the tables. ``ahead`` batches more than usual are held.
        features: returns the part of a batch that the collection is called with. Default: the batch itself. If its ids
            or lengths are others when it is looked up, on any rank, all ranks look the batch up again.
        passes_per_step: forward passes between two steps of the optimizer (gradient accumulation). With another number
            than this training is still exact, but less of the exchange overlaps.
        one_thread: whether the training thread issues the collectives of the prefetch pipeline too; equal on all
            ranks. Default: on an accelerator, where it cannot be switched off. On a CPU nothing overlaps with it.
        ahead: batches that are read ahead, the first of them exchanged ahead in every step; equal on all ranks.
            Default: none, one, or four where any rank has tiered storage, whichever is measured to win
            (``EmbeddingCollection.tuning``); as many as may win are read ahead. Only tiered storage uses more than one:
            the homes receive which rows the batches look up, at 4 bytes per id, and these stay in fast memory.

    Returns:
        An iterable with the loader's length; it can be iterated again.

    Raises:
        EmbeddingError: an argument is not positive. While iterating: another such loop runs; on every rank: another
            rank has more or fewer batches, the loader of another rank raised an error, or a job did not end
            within the timeout of the process group. The rank whose loader raised raises that error.
    """
    return Prefetch(loader, collection, features, passes_per_step, one_thread, ahead)
