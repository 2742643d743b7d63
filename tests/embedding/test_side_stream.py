"""The agent's thread works on a CUDA stream of its own; recorded, without a GPU."""

from __future__ import annotations

import threading

from flexd.core.placement import RankLayout
from tests.embedding.test_on_cuda import job, placement


def test_chunks_are_prepared_on_a_stream_of_their_own_and_training_waits_for_their_event() -> None:
    with job(RankLayout(2, 2), copies=0.0) as made:
        cuda, engine = made.cuda, made.collection.engine
        given = made.batches(1)[0]
        chunk = placement(type(made.case)("", made.case.layout, 3, 64, 0.05), made.collection.keyspace)

        def agent() -> None:
            with cuda:
                engine.inbox.offer(1, chunk)
                assert len(engine.migrator.placement()[0]) == 0

        cuda.queued.clear()
        cuda.streams.calls.clear()
        thread = threading.Thread(target=agent, name="agent")
        thread.start()
        thread.join(60)
        streams = {stream for (name, stream), _ in cuda.queued.items() if name == "agent"}
        assert len(streams) == 1
        assert streams != {"default"}
        ((_, event, recorded_on),) = cuda.streams.of("record")
        assert {recorded_on} == streams
        made.step(given)
        made.step(given)
        assert made.collection.placement_version == 1
        assert cuda.streams.of("wait_event") == [(threading.current_thread().name, "default", event)]
        # Directories and slots that the other stream made stay until training has read them.
        assert len({shape for _, shape, _ in cuda.streams.of("record_stream")}) > 1
        assert {stream for *_, stream in cuda.streams.of("record_stream")} == {"default"}
        assert not cuda.streams.of("synchronize")
