"""Names of a table's counters in ``flexd status``."""

from __future__ import annotations

import io

from flexd.api.sketch import SketchStatus, TableSketchStatus
from flexd.api.status import Status
from flexd.api.stream import StreamStatus
from flexd.cli.status_command import status_blocks
from flexd.cli.view import show


def test_how_a_table_is_counted_and_how_far_it_may_be_off():
    tables = (
        TableSketchStatus(table="a", kind="dense", bytes=3, error_bound=0.0),
        TableSketchStatus(table="b", kind="logarithmic", bytes=2, counter_bits=3, relative_error=0.447),
        TableSketchStatus(table="c", kind="count_min", bytes=1, width=1024, error_bound=0.0027),
    )
    status = Status(job="j", version="1", stream=StreamStatus(source="kafka"), sketch=SketchStatus(tables=tables))
    stream = io.StringIO()
    show(status_blocks(status), stream)
    for expected in (("a", "dense"), ("b", "logarithmic, 3 bits", "44.7"), ("c", "count-min", "0.27")):
        assert any(all(part in line for part in expected) for line in stream.getvalue().splitlines()), expected
