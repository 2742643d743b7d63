"""Which unbounded ids have rows, in the saves of a series: sets of slots beside the rows, for any number of ranks.

A set goes as a whole from the file to its home, whose number alone depends on the ranks. Only where a table has another
number of rows do ids belong to other sets: each set keeps those that it would have evicted last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from flexd.core.arrays import Int64Array
from flexd.embedding.checkpoint import table_rows
from flexd.embedding.checkpoint.saved_rows import Manifest, RowWindow, read_windows
from flexd.embedding.checkpoint.saved_tables import SavedTables
from flexd.embedding.exchange.addressed_rows import AddressedRows
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.ids.id_sets import SLOTS, IdSets, UnboundedTable
from flexd.embedding.ids.slot_table import SlotTable, floor_log2, set_words
from flexd.embedding.ids.unbounded_ids import UnboundedIds

logger = logging.getLogger(__name__)


def id_windows(ids: UnboundedIds, groups: int, changed: torch.Tensor | None) -> Iterator[RowWindow]:
    """Yield copies of this rank's sets, in host memory, table by table in their order.

    Args:
        groups: number of dim-groups, behind which the tables are numbered.
        changed: bool [sets]: those that are wanted; None: all.
    """
    slots = ids.slots
    for number, table in enumerate(sorted(ids.sets.tables, key=lambda table: table.table)):
        sets, places = ids.sets.of_rank(ids.numbers[table.table], slots.rank, slots.world_size)
        mine = torch.div(sets, slots.world_size, rounding_mode="floor")
        if changed is not None:
            wanted = changed[mine]
            mine, places = mine[wanted], places[wanted]
        filters = table.admit_after > 1
        most = max(1, table_rows.MAX_WINDOW_BYTES // (8 * set_words(filters=filters)))
        for first in range(0, len(mine), most):
            words = slots.packed(mine[first : first + most], filters=filters).cpu().numpy()
            yield RowWindow(groups + number, 0, 1, places[first : first + most].cpu().numpy(), words.view(np.uint8))


@dataclass(frozen=True)
class _Target:
    """Where the sets of a table of a save are brought.

    Attributes:
        number: of the table in ``sets``.
        sets, slots: of this job, or of the save if it has another number of rows of the table.
        words: of a set of the save.
        filters: whether filters are loaded.
    """

    number: int
    sets: IdSets
    slots: SlotTable
    words: int
    filters: bool

    def write(self, world: Peers, window: RowWindow | None) -> None:
        """Collective. Bring sets of a file to their homes."""
        sets = torch.empty(0, dtype=torch.int64, device=self.slots.ids.device)
        given = sets.view(0, self.words)
        if window is not None:
            sets = self.sets.of_table(torch.from_numpy(window.slots).to(sets.device), self.number)
            given = torch.from_numpy(window.packed.view(np.int64)).to(sets.device)
        sets, given = _at_home(world, sets, given)
        self.slots.unpack(torch.div(sets, world.size, rounding_mode="floor"), given, filters=self.filters)


def load_ids(directory: Path, chain: Sequence[Manifest], tables: SavedTables, ids: UnboundedIds, world: Peers) -> None:
    """Collective. Replace all slots by those of a save, and note in ``tables.moved`` where rows go.

    Args:
        chain: the save with all that it builds on, the one with all rows first.
        tables: of the last of it.

    Raises:
        CheckpointError: a file cannot be read. Slots may have been replaced then.
    """
    ids.reset()
    targets = {name: _target(ids, tables, name) for name in tables.admit_after}
    for manifest in chain:
        of_save = SavedTables(manifest.tables, tables.keyspace)  # perhaps in another order
        of_ranks = [manifest.files[rank :: world.size] for rank in range(world.size)]
        with ExitStack() as opened:
            readers = [
                opened.enter_context(closing(read_windows(directory / manifest.name / file.name)))
                for file in of_ranks[world.index]
            ]
            for number, name in enumerate(of_save.admit_after, len(of_save.saved.groups)):
                windows = (
                    window
                    for reader, file in zip(readers, of_ranks[world.index], strict=True)
                    for window in islice(reader, file.windows[number])
                )
                for _ in range(max(sum(file.windows[number] for file in files) for files in of_ranks)):
                    window = next(windows, None)
                    if (target := targets[name]) is not None:
                        target.write(world, window)
    ids.load_progress(chain[-1].ids or {})
    tables.moved = {
        name: _moved(world, ids, name, target)
        for name, target in targets.items()
        if target is not None and target.sets is not ids.sets
    }


def _target(ids: UnboundedIds, tables: SavedTables, name: str) -> _Target | None:
    """Return None if this job lacks the table."""
    if name not in ids.admit_after:
        return None
    number = ids.sets.index[name]
    words, filters = set_words(filters=tables.admit_after[name] > 1), ids.admit_after[name] > 1
    rows = tables.saved.tables[tables.saved.index[name]].rows
    if rows == ids.sets.tables[number].rows:
        return _Target(number, ids.sets, ids.slots, words, filters)
    device = ids.slots.ids.device
    sets = IdSets([UnboundedTable(name, 0, rows, 0, 1)], device)
    return _Target(0, sets, SlotTable(sets, ids.slots.rank, ids.slots.world_size, device), words, filters=False)


def _moved(world: Peers, ids: UnboundedIds, name: str, old: _Target) -> Int64Array:
    """Collective. Give rows to the ids of a table that had another number of rows, and return those that they had
    before, as in ``SavedTables.moved``."""
    sets, slots, table = ids.sets, ids.slots, old.sets.tables[0]
    number = sets.index[name]
    at = (old.slots.uses[:-1].view(-1) != 0).nonzero().view(-1)
    rows = old.sets.keys(old.slots.global_sets(torch.div(at, SLOTS, rounding_mode="floor")), at % SLOTS)
    columns = [column.view(-1)[at].to(torch.int64) for column in (old.slots.ids, old.slots.last, old.slots.uses)]
    known = len(at)
    of_ids = sets.of_ids(columns[0], torch.full_like(at, number))
    of_ids, words = _at_home(world, of_ids, torch.stack([*columns, rows], dim=1))
    found, last, uses, rows = words.T.contiguous()
    score = last + ids.bonus(of_ids, ids.seen_steps, ids.seen_look_ups) * floor_log2(uses.abs())
    order = rows.argsort()
    order = order[score[order].argsort(descending=True, stable=True)]
    order = order[of_ids[order].argsort(stable=True)]
    mine = of_ids[order]
    slot = torch.arange(len(mine), device=mine.device) - torch.searchsorted(mine, mine)
    kept = slot < sets.slots(mine)
    order, mine, slot = order[kept], mine[kept], slot[kept]
    place = torch.div(mine, world.size, rounding_mode="floor") * SLOTS + slot
    for column, values in ((slots.ids, found), (slots.last, last), (slots.uses, uses)):
        column.view(-1)[place] = values[order].to(column.dtype)
    moved = torch.full((table.rows,), -1, dtype=torch.int64, device=mine.device)
    moved[rows[order]] = sets.keys(mine, slot) - sets.tables[number].first_key
    moved[-1] = sets.tables[number].slots
    lost = torch.tensor([known, known - len(order)], device=mine.device)
    world.all_reduce(moved, dist.ReduceOp.MAX)
    world.all_reduce(lost)
    if world.index == 0 and lost[1]:
        logger.warning("table %r: %d of %d ids have no row any more, of those used longest ago", name, lost[1], lost[0])
    return moved.cpu().numpy()


def _at_home(world: Peers, sets: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective. Send int64 [n, w] words of int64 [n] sets to the homes of the sets; return those that arrive."""
    joined = torch.cat([sets.unsqueeze(1), words], dim=1)
    arrived = AddressedRows.exchanged(world, sets % world.size, joined).arrived
    return arrived[:, 0].contiguous(), arrived[:, 1:]
