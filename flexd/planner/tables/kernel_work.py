"""The work of sets of tables in the kernels of one rank: sums over the tables, in which every cost of kernels grows.

A piece of a table adds its terms to those of its rank, so the work of every rank under a placement is one sum. Each
term grows with rows, dim, look-ups, bags and distinct rows, and with every table that is added: a model that grows with
each term is monotone where physics is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexd.topology.kernel_file import TableSet

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

TERMS = (
    "tables", "ids", "bags", "distinct", "read_bytes", "sum_bytes", "distinct_bytes", "stored_bytes", "numbers",
    "lines", "sorted", "distinct_lines", "far_lines", "narrow_numbers", "dims",
)  # fmt: skip
"""Sums over tables, but the last: the number of different dims, which kernels are fused by."""
TABLES, IDS, BAGS, DISTINCT, READ_BYTES, SUM_BYTES, DISTINCT_BYTES = range(7)
DIMS_TERM = len(TERMS) - 1
STATE_BYTES = 4.0
"""Row-wise Adagrad's, which the probe runs."""
_LINE_BYTES = 64.0
_NEAR_BYTES = 2.0**20
"""A table of this size is taken as near to the processor: about a core's own cache."""


@dataclass(frozen=True)
class Pieces:
    """Tables, or pieces of tables, that a rank holds.

    Attributes:
        rows, dim, ids, bags, distinct: float64[n], as in ``TableSet``.
        row_bytes: float64[n].
    """

    rows: Float64Array
    dim: Float64Array
    ids: Float64Array
    bags: Float64Array
    distinct: Float64Array
    row_bytes: Float64Array

    @classmethod
    def of_sets(cls, sets: Sequence[TableSet]) -> tuple[Pieces, Int64Array]:
        """Return the tables of all sets, and int64[n] the set of each."""
        columns = [
            np.concatenate([getattr(one, name) for one in sets])
            for name in ("rows", "dim", "ids", "bags", "distinct", "row_bytes")
        ]
        return cls(*columns), np.repeat(np.arange(len(sets)), [len(one.rows) for one in sets])

    def chosen(self, at: Int64Array) -> Pieces:
        """Return the pieces with these numbers, each as often as it is named."""
        return Pieces(*(column[at] for column in vars(self).values()))

    def terms(self) -> Float64Array:
        """float64[n, TERMS], of each piece as a set of its own."""
        lines = np.ceil(self.row_bytes / _LINE_BYTES)
        distinct_lines = self.distinct * (lines + 1.0)  # and one of the optimizer's state
        stored = self.rows * self.row_bytes
        return np.stack(
            [
                np.ones(len(self.rows)), self.ids, self.bags, self.distinct, self.ids * self.row_bytes,
                4.0 * self.bags * self.dim, self.distinct * self.row_bytes, stored, self.ids * self.dim,
                self.ids * lines, self.ids * np.log2(self.ids + 1.0), distinct_lines,
                distinct_lines * np.log2(1.0 + stored / _NEAR_BYTES),
                # Numbers of rows in half precision, which are converted.
                self.distinct * self.dim * (self.row_bytes < 4.0 * self.dim), np.ones(len(self.rows)),
            ],
            axis=1,
        )  # fmt: skip

    def work(self, place: Int64Array, places: int) -> Float64Array:
        """Return float64[places, TERMS], the work of the pieces at each place."""
        terms = self.terms()
        work = np.stack([np.bincount(place, terms[:, at], places) for at in range(DIMS_TERM)], axis=1)
        pairs = np.unique(np.stack([place.astype(np.float64), self.dim], axis=1), axis=0)
        dims = np.bincount(pairs[:, 0].astype(np.int64), minlength=places).astype(np.float64)
        return np.concatenate([work, dims[:, None]], axis=1)


def analytic_bytes(work: Float64Array) -> Float64Array:
    """Return float64[n, 2]: bytes that look-up and update move, as the analytic model prices them
    (``chain_loads.kernel_bytes``)."""
    update = work[:, READ_BYTES] + 2.0 * (work[:, DISTINCT_BYTES] + STATE_BYTES * work[:, DISTINCT])
    return np.stack([work[:, READ_BYTES], update], axis=1)
