"""Properties of training that change the bytes of a step: micro-batches, frozen tables, wire dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexd.core.errors import PlanError
from flexd.core.keyspace import DTYPE_BYTES, KeySpace, TableSpec


@dataclass(frozen=True)
class TrainingShape:
    """Defaults: one batch per optimizer step, every table trained, rows on the wire as they are stored.

    Attributes:
        micro_batches: forward passes for each optimizer step. Rows are looked up in every one; replicas are
            synchronised once per step.
        merged_backward: gradients of all micro-batches are merged before they travel, so that a row's gradient is
            pushed once per step, as ``flexd.EmbeddingCollection`` does. False: every pass is pushed by its own route.
        comm_dtype: of rows and gradients on the wire; None: the table's own.
        frozen_tables: names of tables that are read only: no backward pass, no synchronisation.

    Raises:
        PlanError: a number below its least, or a dtype that does not exist.
    """

    micro_batches: int = 1
    merged_backward: bool = False
    comm_dtype: str | None = None
    frozen_tables: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches: {self.micro_batches}", remedy="give at least 1")
        if self.comm_dtype is not None and self.comm_dtype not in DTYPE_BYTES:
            raise PlanError(f"comm_dtype: {self.comm_dtype!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")

    def check_names(self, keyspace: KeySpace) -> None:
        """Raise PlanError if a named table does not exist."""
        unknown = sorted(self.frozen_tables - set(keyspace.index))
        if unknown:
            raise PlanError(f"tables that do not exist: {', '.join(unknown)}", remedy="name tables of the job")

    def of_table(self, name: str) -> TrainingShape:
        """Return the shape of a job that has only this table."""
        return replace(self, frozen_tables=self.frozen_tables & {name})

    def wire_row_bytes(self, table: TableSpec) -> int:
        """Return the bytes of one row of the table on the wire."""
        return table.dim * DTYPE_BYTES[self.comm_dtype or table.dtype]

    def narrow_wire(self, table: TableSpec) -> bool:
        """Return whether the table's gradients travel in a narrower dtype than they are added in.

        They are added in float32, or the wider of table and wire.
        An all-reduce adds in the dtype that travels, so these are summed at their homes.
        """
        wire, stored = DTYPE_BYTES[self.comm_dtype or table.dtype], DTYPE_BYTES[table.dtype]
        return wire < max(DTYPE_BYTES["float32"], stored)
