"""Topics of five shapes, from a real broker into the counters."""

from collections import Counter

import numpy as np
import pytest

from flexd.config.model import parse_config
from flexd.daemon.config_file import make_decoder, make_source, sketch_settings
from flexd.sketch.ingestor import Ingestor
from flexd.stream.kafka.sink import KafkaSink
from tests.support import event_shapes
from tests.support.until import until


@pytest.mark.parametrize("name", event_shapes.MAKERS)
def test_counts_of_a_topic_equal_those_of_an_independent_conversion(name, tansu, tmp_path):
    shape = event_shapes.shape(name, tmp_path)
    tansu.create_topic(name, 2)
    sink = KafkaSink(tansu.bootstrap_servers, name)
    bad = [b"\xef\xbb\xbf{}", b"[" * 3000]
    for message in [*shape.messages[:40], *bad, *shape.messages[40:]]:
        sink.send(message)
    sink.close()
    source = {"kind": "kafka", "bootstrap_servers": tansu.bootstrap_servers, "topic": name, "group_id": name}
    config = parse_config(
        {
            "job": "j",
            "tables": [{"name": table, "rows": rows, "dim": 4} for table, rows in shape.tables.items()],
            "stream": {"source": source, "mapping": shape.mapping},
            "sketch": {"half_life_seconds": None, "memory_bytes": 2**24},
        }
    )
    ingestor = Ingestor(
        make_source(config), config.keyspace().tables, sketch_settings(config), None, decoder=make_decoder(config)
    )
    ingestor.start()
    try:
        until(lambda: ingestor.counter.messages == len(shape.messages) + len(bad), 60.0)
    finally:
        assert ingestor.stop(20.0)
    assert sum(ingestor.counter.rejected.values()) == len(bad)
    wanted: dict[str, Counter[int]] = {table: Counter() for table in shape.tables}
    for table, rows, _, _ in shape.accesses:
        wanted[table].update(rows)
    for table, rows in shape.tables.items():
        counted = ingestor.sketches.query(table, np.arange(rows))
        assert {row: int(counted[row]) for row in np.flatnonzero(counted)} == wanted[table]
    assert ingestor.counter.accesses.accepted == sum(counts.total() for counts in wanted.values())
