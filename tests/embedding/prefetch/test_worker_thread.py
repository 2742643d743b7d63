"""The thread of the prefetch pipeline: one job at a time, each with a deadline."""

from __future__ import annotations

import threading

import pytest
import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.prefetch.worker_thread import WorkerThread


def test_a_job_that_does_not_end_is_an_error_within_the_deadline() -> None:
    release = threading.Event()
    worker: WorkerThread[int] = WorkerThread("test", torch.device("cpu"))
    worker.submit(lambda: int(release.wait(60)))
    with pytest.raises(EmbeddingError, match="test: a job is under way"):
        worker.submit(lambda: 2)
    with pytest.raises(EmbeddingError, match=r"not done after 0\.01 s"):
        worker.result(0.01)
    assert not worker.stop(0.01)
    release.set()
    assert worker.result(60.0) == 1
    worker.submit(lambda: 3)  # a new thread
    assert worker.result(60.0) == 3
    assert worker.stop(60.0)
