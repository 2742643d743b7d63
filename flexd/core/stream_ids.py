"""Ids of a table in a stream, as ``flexd status`` and ``flexd advise`` show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from flexd.core import units
from flexd.core.keyspace import TableSpec
from flexd.core.model import Model, Show


class IdsOfStream(Model):
    """Ids of one table in the stream since it is read; shares are of about the newest half of the look-ups, as the
    table's own policy would have it with ``admit_after=1`` (``flexd.sketch.id_stream``)."""

    table: str
    rows: int
    look_ups: int
    distinct: Annotated[float, Show("distinct ids", unit="{:,.0f}".format)]
    """Within about 1 %."""
    new_per_hour: Annotated[float, Show("new ids per hour", unit="{:,.0f}".format)]
    once_share: Annotated[float, Show("seen once", unit=units.share)]
    """Share of the distinct ids that were seen once."""
    own_share_of_half_the_rows: Annotated[float, Show("own with half the rows", unit=units.share)]
    own_share: Annotated[float, Show("own", unit=units.share)]
    """Look-ups of ids that have a row of their own as a share of all."""
    own_share_of_twice_the_rows: Annotated[float, Show("own with twice the rows", unit=units.share)]
    evictions_per_1000: Annotated[float, Show("evictions per 1,000", unit="{:.1f}".format)]
    """Look-ups."""

    @classmethod
    def of_tables(cls, seen: Mapping[str, object], tables: Sequence[TableSpec]) -> tuple[IdsOfStream, ...]:
        """``seen``: ``flexd.sketch.id_stream.IdsSeen`` by the name of the table."""
        rows = {table.name: table.rows for table in tables}
        return tuple(cls.from_object(each, table=name, rows=rows[name]) for name, each in seen.items())
