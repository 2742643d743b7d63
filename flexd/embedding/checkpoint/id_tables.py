"""Which unbounded ids have rows, in checkpoints of whole tables: sets of slots as rows of a table, in their order.

A table of sets has the homes of the sets; so it is collected and distributed as tables of rows are. A set has the words
of ``SlotTable.packed``. Tables that had another number of rows, whose ids belong to other sets, are refused here:
``CheckpointSeries`` can load them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.embedding.checkpoint.table_rows import TableHomes
from flexd.embedding.checkpoint.whole_tables import WholeTable
from flexd.embedding.ids.slot_table import set_words

if TYPE_CHECKING:
    from flexd.embedding.collection import EmbeddingCollection
    from flexd.embedding.ids.unbounded_ids import UnboundedIds


class IdTables:
    """The sets of a collection, copied; ``load`` makes the copies its sets, after they were replaced.

    Attributes:
        tables: one for each table of unbounded ids.
        names: of the tables of rows, in this order.
    """

    def __init__(self, collection: EmbeddingCollection, ids: UnboundedIds) -> None:
        self._ids, engine = ids, collection.engine
        slots, self.names = ids.slots, list(ids.admit_after)
        widths = [set_words(filters=after > 1) for after in ids.admit_after.values()]
        mine = torch.arange(slots.sets, device=slots.ids.device)
        self._gated = mine[: 0 if slots.refused is None else slots.refused.sets]
        self._others = mine[len(self._gated) :]
        self._words = torch.zeros((slots.sets, max(widths)), dtype=torch.int64, device=mine.device)
        self._words[self._gated] = slots.packed(self._gated, filters=True)
        self._words[self._others, : set_words(filters=False)] = slots.packed(self._others, filters=False)
        specs = [TableSpec(f"ids of {table.name}", table.sets, 1) for table in ids.sets.tables]
        homes = Homes(KeySpace(specs), collection.layout)
        rows = len(collection.keyspace.tables)
        self.tables = []
        for number, (spec, name, width) in enumerate(zip(specs, self.names, widths, strict=True)):
            columns = {_sets_key(name): self._words.narrow(1, 0, width)}
            at = TableHomes(homes, number, engine.groups.rank)
            self.tables.append(WholeTable(rows + number, spec, at, columns, None, spec.rows))

    def progress(self) -> dict[str, torch.Tensor]:
        """Return for each table int64 [4]: the values of ``UnboundedIds.progress``, in host memory."""
        progress = self._ids.progress()
        common = [progress["step"], progress["seen_steps"], int(progress["stepped"])]
        return {
            _progress_key(name): torch.tensor([*common, progress["look_ups"][name]], device="cpu")
            for name in self.names
        }

    def progress_shapes(self, loaded: Sequence[WholeTable]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of what ``progress`` has of the tables that are loaded."""
        specs = {table.spec.name for table in loaded}
        return {
            _progress_key(name): ((4,), torch.int64)
            for table, name in zip(self.tables, self.names, strict=True)
            if table.spec.name in specs
        }

    def load(self, progress: Mapping[str, torch.Tensor]) -> None:
        """Go on with the words of ``tables`` and what ``progress`` returned, after ``RowEngine.steps`` was set. Tables
        of which it has nothing begin without ids."""
        self._ids.reset()
        slots, sets = self._ids.slots, self._ids.sets
        found = {name: progress[key].tolist() for name in self.names if (key := _progress_key(name)) in progress}
        for number, name in enumerate(self.names):
            if name not in found:
                mine, _ = sets.of_rank(number, slots.rank, slots.world_size)
                self._words[torch.div(mine, slots.world_size, rounding_mode="floor")] = 0
        slots.unpack(self._gated, self._words[self._gated], filters=True)
        slots.unpack(self._others, self._words[self._others, : set_words(filters=False)], filters=False)
        step, seen_steps, stepped, _ = next(iter(found.values()), (0, 0, 1, 0))
        look_ups = {name: of_table[3] for name, of_table in found.items()}
        self._ids.load_progress(
            {"step": step, "seen_steps": seen_steps, "stepped": bool(stepped), "look_ups": look_ups}
        )


def _sets_key(name: str) -> str:
    return f"ids.{name}.sets"


def _progress_key(name: str) -> str:
    return f"ids.{name}.progress"
