"""``flexd.EmbeddingTable``: what a user says of one table."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import QUANTIZED
from flexd.core.sharding_types import ROW_WISE
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.store.store import TORCH_DTYPES

BOUNDED, UNBOUNDED = "rows", "unbounded"


@dataclass(frozen=True)
class EmbeddingTable:
    """One table of a collection.

    Attributes:
        features: names of the inputs that look up rows of the table; default: the name of the table.
        init_scale: initial values are uniform in [-init_scale, init_scale); default 1/sqrt(rows), as in TorchRec, and 0
            for int8, whose rows are loaded.
        lr: learning rate of the table, a group of ``collection.optimizer.param_groups``; default: the optimizer's.
        sharding: sharding type, the ranks that hold the rows: "row_wise" (spread over all ranks), "table_row_wise:N"
            (over the ranks of node N), "table_wise:R" (whole on rank R) or "data_parallel" (spread, with a copy of
            each row on every rank). It does not change the result. The daemon's configuration must name the same.
        optimizer: of the table's rows; default: the collection's. Tables with the same kind of optimizer may differ in
            ``lr`` alone.
        trainable: False: the rows are read only, as those of a frozen ``nn.Embedding``: look-ups have no gradient, and
            there is no optimizer state.
        dtype: of the stored rows; "int8", for read-only rows alone, has a scale a row (``flexd.int8_rows``).
        output_dtype: of what is looked up; default: ``dtype``, of int8 rows "float32".
        ids: "rows" (an id is the number of a row) or "unbounded" (any int64 number). Of unbounded ids those have rows
            of their own that are used most and latest; the others share the last row.
        admit_after: look-ups after which an unbounded id gets a row of its own: 1, or 2 where most ids come once.

    Raises:
        EmbeddingError: rows of int8 that are trained, an unknown ``output_dtype`` or ``ids``, ``admit_after``
            without unbounded ids, or a single row with them.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()
    dtype: str = "float32"
    init_scale: float | None = None
    lr: float | None = None
    sharding: str = ROW_WISE
    optimizer: RowOptimizer | None = None
    trainable: bool = True
    output_dtype: str | None = None
    ids: str = BOUNDED
    admit_after: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # a list may change later
        if self.dtype == QUANTIZED and self.trainable:
            raise EmbeddingError(
                f"table {self.name!r}: rows of {QUANTIZED} cannot be trained",
                remedy="trainable=False, or another dtype",
            )
        if self.output_dtype == QUANTIZED or not {self.output_dtype} <= {None, *TORCH_DTYPES}:
            raise EmbeddingError(
                f"table {self.name!r}: output_dtype {self.output_dtype!r}",
                remedy=f"one of {', '.join(name for name in TORCH_DTYPES if name != QUANTIZED)}",
            )
        if self.ids == UNBOUNDED:
            allowed = self.rows > 1 and self.admit_after in (1, 2)
        else:
            allowed = self.ids == BOUNDED and self.admit_after == 1
        if not allowed:
            raise EmbeddingError(
                f"table {self.name!r}: {self.rows} rows, ids={self.ids!r}, admit_after={self.admit_after}",
                remedy=f'ids="{UNBOUNDED}" for any numbers, with admit_after 1 or 2 and at least 2 rows, of which ids '
                f'without a row of their own share the last; ids="{BOUNDED}" without admit_after',
            )

    @property
    def scale(self) -> float:
        if self.init_scale is None:
            return 0.0 if self.dtype == QUANTIZED else self.rows**-0.5
        return self.init_scale

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (self.name,)
