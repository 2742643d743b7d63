"""``flexd.CheckpointSeries``: checkpoints of a collection in one directory, of which the newest are kept.

Between checkpoints with all rows it writes only those that changed since the one before. Saves and loads go window by
window from wherever the rows are (32 MiB), so tables that fit no memory are saved too. A save is complete or not there,
whenever a job ends, and any number of ranks can load it.
"""

from __future__ import annotations

import io
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch

from flexd.core.errors import CheckpointError, FlexdError
from flexd.embedding.checkpoint.background_save import STATE_FILE, BackgroundSave
from flexd.embedding.checkpoint.changed_rows import ChangedRows, HomeRows
from flexd.embedding.checkpoint.saved_rows import (
    Manifest,
    RowWindow,
    SavedFile,
    SeriesDirectory,
    check_files,
    gathered_files,
    rank_file,
    windows_of,
    write_windows,
)
from flexd.embedding.checkpoint.saved_tables import ChangedTablesOption, SavedTables, load_rows_of, table_fields
from flexd.embedding.checkpoint.sharded_state import begin_untrained, raise_if_any_rank_refuses
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.meetings import agree_on_reading

logger = logging.getLogger(__name__)

_WRITE_REMEDY = "make room or give another directory; the checkpoints before it are whole"
# States of a background save on a rank, in the order in which the worst of all ranks decides.
_ENDED, _LATE, _FAILED = range(3)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The checkpoint that ``CheckpointSeries.load`` has loaded.

    Attributes:
        number: of the save.
        steps: of the optimizer.
        state: what rank 0 gave ``save``, in host memory; None if it gave nothing.
        interrupted: numbers of newer checkpoints that were being written when their job ended, and are not whole.
    """

    number: int
    steps: int
    state: Any
    interrupted: tuple[int, ...]


class CheckpointSeries:
    """Checkpoints of a collection in one directory that all ranks can access; one job at a time saves there.

    All methods and the constructor are collective. Rows that change are noted from the constructor on, in a byte a row,
    if ``whole_every`` is above 1. A collection has one series at a time.

    Args:
        keep: number of newest checkpoints that are kept, and those that they build on.
        whole_every: every so many checkpoints one has all rows; 1: all have.

    Raises:
        CheckpointError: on every rank, if the collection has a series, or the settings differ between ranks or are
            below 1.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        whole_every: int = 10,
    ) -> None:
        self._collection = collection
        self._directory = SeriesDirectory(Path(directory))
        self._keep, self._whole_every = keep, whole_every
        # The checkpoint from which on changed rows are noted.
        self._newest: Manifest | None = None
        # Checkpoints from the last one with all rows to ``_newest``.
        self._length = 0
        # A checkpoint that is written in the background, the rows that it drained, and whether it has all rows.
        self._pending: tuple[BackgroundSave, HomeRows | None, bool] | None = None
        self._marks = collection.engine.join(ChangedRows, collection.engine.stores)
        settings = torch.tensor([keep, whole_every], device=collection.device)
        differ = any(other != settings.tolist() for other in self._gather(settings))
        with self._on_every_rank("keep and whole_every"):
            given = f"keep={keep}, whole_every={whole_every}"
            if keep < 1 or whole_every < 1:
                raise CheckpointError(f"{given}: both must be at least 1", remedy="keep and whole_every from 1 on")
            if differ:
                raise CheckpointError(f"{given} differ between ranks", remedy="give every rank the same settings")
            if self._marks.active:
                raise CheckpointError(
                    "the collection has a CheckpointSeries already", remedy="close() the other series first"
                )
        if whole_every > 1:
            self._marks.begin()

    @overload
    def save(self, state: Any = None, *, background: Literal[False] = False) -> Manifest: ...

    @overload
    def save(self, state: Any = None, *, background: bool) -> Manifest | None: ...

    @torch.no_grad()
    def save(self, state: Any = None, *, background: bool = False) -> Manifest | None:
        """Collective. Write a checkpoint, and remove those that are not kept any more.

        Args:
            state: what ``torch.save`` stores and ``torch.load(weights_only=True)`` reads, for instance the model's and
                the dense optimizer's ``state_dict()``; that of rank 0 is saved with the rows.
            background: copy the rows and the state, return None, and let a thread write them while training goes on. It
                needs host memory for the rows that are written: all of a rank where the checkpoint has all rows. The
                next ``save``, ``load`` or ``wait`` waits for it first.

        Raises:
            CheckpointError: on every rank, if any cannot write, or could not write the one before in the background.
                The checkpoints before stay, and rows that changed are written by the next one.
        """
        self.wait()
        agree_on_reading(self._collection.engine)
        number, whole = self._begin()
        drained = self._drain()
        try:
            rows = HomeRows(self._collection.engine.stores, None) if whole or drained is None else drained
            base = None if whole else self._newest
            if background:
                started = self._start(number, rows, base, state)
            else:
                saved = self._write(number, rows, base, state)
        except BaseException:
            self._not_saved(drained)
            raise
        if background:
            self._pending = started, drained, whole
            return None
        self._saved(saved, whole)
        if self._collection.rank == 0:
            self._directory.rotate_or_warn(self._keep)
        return saved

    def wait(self, timeout_seconds: float | None = None) -> Manifest | None:
        """Collective. Wait until the checkpoint that is written in the background is complete, and return it; None
        without one.

        Args:
            timeout_seconds: default: half the timeout of the process group.

        Raises:
            CheckpointError: on every rank: any could not write it (rows that changed are written by the next one), or
                it is still being written after the timeout.
        """
        if self._pending is None:
            return None
        saving, drained, whole = self._pending
        wait_seconds = (
            self._collection.engine.groups.timeout_seconds / 2 if timeout_seconds is None else timeout_seconds
        )
        deadline = time.monotonic() + wait_seconds
        ended = saving.wait_written(wait_seconds)
        if self._worst(ended, saving.error) == _FAILED:
            saving.give_up()
        # That of rank 0 completes the save.
        ended = saving.join(max(1.0, deadline - time.monotonic()))
        worst = self._worst(ended, saving.error)
        text = f"checkpoint {saving.number} of {self._directory.path}"
        if worst == _LATE:
            faults = [] if ended else [f"{text} is still being written after {wait_seconds:.0f} s"]
            raise_if_any_rank_refuses(self._collection, faults, remedy="wait longer: wait(timeout_seconds=...)")
        self._pending = None
        if worst == _FAILED:
            self._not_saved(drained)
            faults = [f"{text} was not written: {saving.error}"] if saving.error else []
            raise_if_any_rank_refuses(self._collection, faults, remedy=_WRITE_REMEDY)
        with self._on_every_rank(f"cannot read {self._directory.path}"):
            saved = self._directory.manifest(saving.number)
        self._saved(saved, whole)
        return saved

    @torch.no_grad()
    def load(self, number: int | None = None, *, changed_tables: ChangedTablesOption = "error") -> LoadedCheckpoint:
        """Collective. Replace all rows, their optimizer state and the number of steps by those of a checkpoint.

        Any number of ranks can load it. What it builds on is loaded first, each file read by one rank. Tables that are
        read only here alone get their rows, those that were so there alone get rows and begin their optimizer state
        anew; a warning names them.

        Args:
            number: of the checkpoint; None: the newest.
            changed_tables: "error": the tables are those of the checkpoint. "init": tables that it lacks, and rows
                behind those that it has of a table, keep the collection's values, which are those of the seed if it
                was not trained before, and are set to them if it was; tables that the collection lacks are left out.
                A table of unbounded ids may have more or fewer rows and another ``admit_after``: with fewer those
                ids keep theirs that would have kept them in training. Warnings name them.

        Raises:
            CheckpointError: on every rank, if there is no such checkpoint, one that it builds on is missing, files are
                missing or damaged, or it is of other tables. The collection is unchanged.
        """
        collection = self._collection
        self.wait()
        chain, state, changes = self._read_chain(number, changed_tables)
        stores, world = collection.engine.stores, collection.engine.groups.world
        collection.engine.before_rows_load()
        if changes:
            begin_untrained(collection)
        newest = chain[-1]
        tables = SavedTables(newest.tables, collection.keyspace, collection.engine.admit_after)
        collection.engine.steps = newest.steps
        try:
            with collection.traffic.uncounted():
                if collection.engine.ids is not None:
                    from flexd.embedding.checkpoint.saved_ids import load_ids  # loaded where a job has unbounded ids

                    load_ids(self._directory.path, chain, tables, collection.engine.ids, world)
                for manifest in chain:
                    of_save = SavedTables(manifest.tables, collection.keyspace)
                    of_save.moved = tables.moved
                    load_rows_of(self._directory.path / manifest.name, manifest, of_save, world, stores)
            collection.engine.rows.begin_state(tables.begun, collection.optimizer.initial_states)
        except FlexdError as error:
            collection.engine.guard.publish(error)  # the other ranks wait for rows
            raise
        if self._marks.active:
            self._marks.begin()
            self._drain()
        # What changes later does not build on a checkpoint that has other tables.
        self._newest, self._length = None if changes or tables.begun else newest, len(chain)
        if changes and collection.rank == 0:
            logger.warning("%s is of other tables: %s", newest.name, "; ".join(changes))
        for names, text in (
            (tables.left_out, "were trained and are read only now: their optimizer state is left out"),
            (tables.begun, "were read only and are trained now: their optimizer state begins anew"),
        ):
            if names and collection.rank == 0:
                logger.warning("tables %s of %s %s", ", ".join(names), newest.name, text)
        interrupted = tuple(other for other in self._directory.interrupted() if other > newest.number)
        for other in interrupted if collection.rank == 0 else ():
            logger.warning(
                "%s was being written when its job ended and is not whole; loaded %s",
                self._directory.partial(other), newest.name,
            )  # fmt: skip
        return LoadedCheckpoint(newest.number, newest.steps, state, interrupted)

    def numbers(self) -> list[int]:
        """Return the numbers of the complete checkpoints, ascending. Not collective."""
        return self._directory.numbers()

    def close(self) -> None:
        """Note changed rows no more. Not collective; checkpoints stay. One that is written in the background is waited
        for, and a warning says if it was not written: call ``wait`` before."""
        if self._pending is not None:
            saving = self._pending[0]
            ended = saving.join(self._collection.engine.groups.timeout_seconds / 2)
            if saving.error or not ended:
                logger.warning("checkpoint %d was not written: %s", saving.number, saving.error or "it takes too long")
            self._pending = None
        self._marks.end()

    def _begin(self) -> tuple[int, bool]:
        """Collective. Make the directory of a checkpoint, and agree on its number and whether it has all rows."""
        numbers = torch.zeros(2, dtype=torch.int64, device=self._collection.device)
        with self._on_every_rank(f"cannot write {self._directory.path}"):
            if self._collection.rank == 0:
                numbers[0] = self._directory.next_number()
                numbers[1] = self._is_whole()
                self._directory.begin(int(numbers[0]))
        number, whole = self._gather(numbers)[0]
        return number, bool(whole)

    def _is_whole(self) -> bool:
        """Return whether the next checkpoint has all rows. Its base may have been removed from outside."""
        if self._newest is None or self._length >= self._whole_every or self._marks.all_changed:
            return True
        try:
            return self._directory.chain(self._newest.number)[-1].identity != self._newest.identity
        except CheckpointError:
            return True

    def _start(self, number: int, rows: HomeRows, base: Manifest | None, state: Any) -> BackgroundSave:
        """Collective. Copy rows and state, and begin to write them."""
        collection, engine, partial = self._collection, self._collection.engine, self._directory.partial(number)
        content = io.BytesIO()
        with self._on_every_rank(f"cannot write {partial}"):
            partial.mkdir(parents=True, exist_ok=True)  # a network's file system may show it late
            windows = list(self._windows(rows))
            if state is not None and collection.rank == 0:
                torch.save(state, content)
        saving = BackgroundSave(
            self._directory, number, collection.rank, collection.layout.world_size, windows, self._groups,
            content.getvalue() or None, self._manifest(number, base, has_state=state is not None), self._keep,
            engine.groups.timeout_seconds / 2,
        )  # fmt: skip
        saving.start()
        return saving

    def _worst(self, ended: bool, error: str) -> int:
        """Collective. Return the worst state of a background save on any rank."""
        mine = _FAILED if error else _ENDED if ended else _LATE
        return max(state for (state,) in self._gather(torch.tensor([mine], device=self._collection.device)))

    def _saved(self, manifest: Manifest, whole: bool) -> None:
        self._length = 1 if whole else self._length + 1
        self._newest = manifest

    def _drain(self) -> HomeRows | None:
        """Return what has changed and note further changes anew; None where none are noted."""
        if not self._marks.active:
            return None
        drained, ids = self._marks.drain(), self._collection.engine.ids
        if ids is None:
            return drained
        changed = ids.slots.changed.clone()
        ids.slots.changed.zero_()
        return replace(drained, sets=changed)

    def _not_saved(self, drained: HomeRows | None) -> None:
        if drained is None:
            return
        self._marks.restore(drained)
        if drained.sets is not None and (ids := self._collection.engine.ids) is not None:
            ids.slots.changed |= drained.sets

    @property
    def _groups(self) -> int:
        """Number of dim-groups and tables of unbounded ids."""
        engine = self._collection.engine
        return len(engine.stores) + (0 if engine.ids is None else len(engine.ids.sets.tables))

    def _windows(self, rows: HomeRows) -> Iterator[RowWindow]:
        engine = self._collection.engine
        if engine.ids is not None:
            from flexd.embedding.checkpoint.saved_ids import id_windows  # loaded where a job has unbounded ids

            yield from id_windows(engine.ids, len(engine.stores), rows.sets)
        yield from windows_of(engine.stores, rows)

    def _manifest(
        self, number: int, base: Manifest | None, *, has_state: bool
    ) -> Callable[[tuple[SavedFile, ...]], Manifest]:
        """Return what makes the manifest of the rows of now, of the files of all ranks."""
        engine = self._collection.engine
        base_number, base_identity = (None, None) if base is None else (base.number, base.identity)
        steps, tables = engine.steps, table_fields(self._collection.keyspace, engine.admit_after)
        ids = None if engine.ids is None else engine.ids.progress()
        return lambda files: Manifest(
            number, uuid.uuid4().hex[:16], base_number, base_identity, steps, tables, files, has_state, ids
        )

    def _write(self, number: int, rows: HomeRows, base: Manifest | None, state: Any) -> Manifest:
        collection, partial = self._collection, self._directory.partial(number)
        with self._on_every_rank(f"cannot write {partial}"):
            partial.mkdir(parents=True, exist_ok=True)  # a network's file system may show it late
            mine = write_windows(partial / rank_file(collection.rank), self._windows(rows), self._groups)
            if state is not None and collection.rank == 0:
                _write_state(partial / STATE_FILE, state)
        with collection.traffic.uncounted():
            files = gathered_files(collection.engine.groups.world, mine, collection.device)
        manifest = self._manifest(number, base, has_state=state is not None)(files)  # that of rank 0 counts
        with self._on_every_rank(f"cannot complete {partial}"):
            if collection.rank == 0:
                self._directory.complete(manifest)
        return manifest

    def _read_chain(
        self, number: int | None, changed_tables: ChangedTablesOption
    ) -> tuple[list[Manifest], Any, list[str]]:
        """Collective. Return a checkpoint with all that it builds on, its other state, and how tables have changed.

        Raises:
            CheckpointError: on every rank, if it cannot be loaded.
        """
        collection = self._collection
        state: Any = None
        chosen = torch.zeros(1, dtype=torch.int64, device=collection.device)
        with self._on_every_rank(f"cannot read {self._directory.path}"):
            if collection.rank == 0:
                chosen[0] = self._directory.chain(number)[-1].number
        agreed = self._gather(chosen)[0][0]
        with self._on_every_rank(f"cannot read {self._directory.path}"):
            chain = self._directory.chain(agreed)
            saved = SavedTables(chain[-1].tables, collection.keyspace, collection.engine.admit_after)
            changes = saved.check(changed_tables)
            for manifest in chain:
                mine = manifest.files[collection.rank :: collection.layout.world_size]
                check_files(self._directory.path / manifest.name, mine)
            if chain[-1].has_state:
                state = _read_state(self._directory.path / chain[-1].name / STATE_FILE)
        return chain, state, changes

    def _gather(self, numbers: torch.Tensor) -> list[list[int]]:
        with self._collection.traffic.uncounted():
            found: list[list[int]] = self._collection.engine.groups.world.all_gather(numbers).tolist()
        return found

    @contextmanager
    def _on_every_rank(self, doing: str) -> Iterator[None]:
        """Collective. Raise an error of this rank on every rank: one that raised alone would leave the others
        waiting."""
        faults: list[str] = []
        remedy = _WRITE_REMEDY
        try:
            yield
        except CheckpointError as error:
            faults, remedy = [error.message], error.remedy
        except OSError as error:
            faults = [f"{doing}: {error.strerror or error}"]
        except Exception as error:  # slow memory, or what ``torch.save`` raises
            faults = [f"{doing}: {type(error).__name__}: {error}"]
        raise_if_any_rank_refuses(self._collection, faults, remedy=remedy)


def _read_state(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unreadable bytes lead to errors of many types
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error})", remedy="load another checkpoint"
        ) from error


def _write_state(path: Path, state: Any) -> None:
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
