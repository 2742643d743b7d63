"""``flexd.prefetch``: iterate over batches and look up each one's rows during the step before."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.exchange.hop import AgreementFlags, NextBatch
from flexd.embedding.meetings import agree_on_loop, agree_on_next
from flexd.embedding.prefetch.announced_input import AnnouncedInput, LoaderEnd
from flexd.embedding.prefetch.empty_batch import empty_batch
from flexd.embedding.prefetch.pipeline import PrefetchPipeline

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
ERROR, STOP, EMPTY = UNEVEN = ("error", "stop", "empty")


def _identity(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class _Read:
    """One batch read from a loader, or its end.

    Attributes:
        batch: a batch, an empty one after the last, or the end.
        flag: what the other ranks learn of it.
    """

    batch: Any
    flag: AgreementFlags


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
        uneven: str,
    ) -> None:
        if passes_per_step < 1 or (ahead is not None and ahead < 1):
            raise EmbeddingError(
                f"prefetch: {passes_per_step} passes per step, {ahead} batches ahead", remedy="give positive numbers"
            )
        if uneven not in UNEVEN:
            raise EmbeddingError(f"prefetch: uneven={uneven!r}", remedy=f"one of {', '.join(UNEVEN)}")
        self._loader = loader
        self._collection = collection
        self._features = features
        self._passes_per_step = passes_per_step
        self._one_thread = one_thread
        self._ahead = ahead
        self._uneven = uneven

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        engine = self._collection.engine
        if PrefetchPipeline.is_looping(engine):
            yield from self._nested()
            return
        prefetch_pipeline = PrefetchPipeline.begin(
            engine, self._passes_per_step, self._one_thread, self._ahead, self._uneven
        )
        prefetch_pipeline.fetches_rows = not self._collection.optimizer.moves_all_rows
        agrees = self._uneven != ERROR
        try:
            queue = self._read()
            ahead = [self._announced(next(queue)) for _ in range(prefetch_pipeline.batches_ahead)]
            prefetch_pipeline.announce(ahead[0][1], [announced for _, announced in ahead])
            if agrees:
                prefetch_pipeline.expect(ahead[0][0].flag)
            while True:
                prefetch_pipeline.start_announced()
                if agrees and not self._goes_on(prefetch_pipeline.agree_on_next()):
                    return
                given, now = ahead.pop(0)
                if isinstance(given.batch, LoaderEnd):
                    prefetch_pipeline.finish(given.batch)
                    return
                ahead.append(self._announced(next(queue)))
                *earlier, latest = (now, *(announced for _, announced in ahead))
                for one in earlier:
                    if isinstance(one, AnnouncedInput) and isinstance(latest, AnnouncedInput):
                        one.check_overwritten(latest)
                prefetch_pipeline.announce(ahead[0][1], [announced for _, announced in ahead])
                if agrees:
                    prefetch_pipeline.expect(ahead[0][0].flag)
                prefetch_pipeline.in_hand = now
                yield given.batch
        finally:
            if not prefetch_pipeline.close():
                logger.warning("rank %d: the prefetch pipeline thread did not end", self._collection.rank)

    def _nested(self) -> Iterator[Batch]:
        """Yield the batches of a loop inside another one of the collection, for validation say: each is looked up when
        it is given, and the next batch of the outer loop is located again if rows have changed."""
        engine = self._collection.engine
        engine.settle()
        queue = self._read()
        following = next(queue)
        loop = NextBatch(following.flag)
        if self._uneven != ERROR:
            engine.loops.append(loop)
        try:
            agree_on_loop(engine, f"a loop inside another one, uneven={self._uneven!r}")
            while self._uneven == ERROR or self._goes_on(agree_on_next(engine, loop)):
                given = following
                if isinstance(given.batch, LoaderEnd):
                    given.batch.agree(engine)
                    return
                following = next(queue)
                loop.set(following.flag)
                yield given.batch
        finally:
            if loop in engine.loops:
                engine.loops.remove(loop)

    def _goes_on(self, agreed: AgreementFlags) -> bool:
        """Return whether all ranks go on to the next batch, of what any rank has of it; a rank whose loader has failed
        lets the others know as it meets their look-up."""
        if AgreementFlags.LOADER_FAILED in agreed:
            return True
        return AgreementFlags.HAS_BATCH in agreed if self._uneven == EMPTY else AgreementFlags.NO_BATCH not in agreed

    def _read(self) -> Iterator[_Read]:
        """Yield the loader's batches, and then without end what ended it, or empty batches."""
        model: Any = None
        try:
            for batch in self._loader:
                if model is None and self._uneven == EMPTY:
                    model = empty_batch(batch)  # of a batch that the trainer has not changed
                yield _Read(batch, AgreementFlags.HAS_BATCH)
            if model is None and self._uneven == EMPTY:
                model = self._empty_input()
        except Exception as error:
            while True:
                yield _Read(LoaderEnd(error), AgreementFlags.LOADER_FAILED)
        while True:
            none = LoaderEnd() if model is None else model
            yield _Read(none if isinstance(none, LoaderEnd) else empty_batch(none), AgreementFlags.NO_BATCH)

    def _empty_input(self) -> Any:
        """Return the empty batch of a rank whose loader had none; where only the trainer knows its type, the end of
        the loader with the error that other ranks have some."""
        if self._features is _identity:
            return self._collection.empty_input()
        error = EmbeddingError(
            f"rank {self._collection.rank}: its loader has no batch of which it could make empty ones",
            remedy="let each loader yield at least one batch, which may be without samples",
        )
        return LoaderEnd(error)

    def _announced(self, read: _Read) -> tuple[_Read, AnnouncedInput | LoaderEnd]:
        """Return what was read, and what is announced of it."""
        batch = read.batch
        if isinstance(batch, LoaderEnd):
            return read, batch
        return read, AnnouncedInput(self._features(batch), self._collection.read, self._collection.keys_of)


def prefetch(
    loader: Iterable[Batch],
    collection: EmbeddingCollection,
    *,
    features: Callable[[Batch], Any] = _identity,
    passes_per_step: int = 1,
    one_thread: bool | None = None,
    ahead: int | None = None,
    uneven: str = ERROR,
) -> Prefetch[Batch]:
    """Iterate over ``loader``, and exchange the rows of each batch while the step before it computes, where that wins.

    ::

        for batch in flexd.prefetch(loader, collection, features=lambda batch: batch.features):
            rows = collection(batch.features)
            ...

    Losses and tables are those of training without it. Iterating is collective: every rank goes over equally many
    batches (see ``uneven``), and leaves the loop at the same one. While it runs, reading rows from outside a step
    (``state_dict``, ``gather_table``, evaluation on other batches) is collective too, since a step may have deferred
    gradients.

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
        uneven: what happens where the loader of a rank ends before another's; equal on all ranks. "error": every rank
            raises an error that names it. "stop": all loops end with it, and further batches of the others are not
            used. "empty": that rank goes on with empty batches until all loaders have ended: copies of its first batch
            in which tensors, arrays, ``Jagged`` and ``KeyedJaggedTensor`` have no samples and lists of numbers or
            strings are empty, also within mappings, sequences and dataclasses; other numbers and strings stay. A sum
            over the samples of all ranks is then that of one process; a mean of no samples is NaN.

    Returns:
        An iterable with the loader's length; it can be iterated again.

    Raises:
        EmbeddingError: an argument is not positive, or ``uneven`` unknown. While iterating, on every rank: another
            rank has more or fewer batches and ``uneven`` is "error", the loader of another rank raised an error or has
            a batch of which no empty one can be made, or a job did not end within the timeout of the process group. The
            rank whose loader raised raises that error.
    """
    return Prefetch(loader, collection, features, passes_per_step, one_thread, ahead, uneven)
