"""Mistakes of a trainer, made on the ranks of a real job that is connected to a daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.layout import RankLayout
from flexd.core.mistakes import MISTAKES
from flexd.embedding.jagged import Jagged
from tests.support.collection_jobs import tables


@contextmanager
def refused() -> Iterator[None]:
    try:
        yield
    except EmbeddingError:
        return
    raise AssertionError("the mistake was not refused")


def batch(shift: int) -> dict[str, Jagged]:
    return {"item": Jagged((torch.arange(4) + shift) % 61, torch.tensor([4]))}


def make_mistakes(rank: int, port: int) -> dict[str, str]:
    """Make one mistake of each kind but that of an installation; return what this rank says of them by kind."""
    collection = flexd.EmbeddingCollection(tables(), layout=RankLayout(2, 1))
    with refused():  # a checkpoint of a model with other row counts, loaded before the connection
        collection.load_rows("item", 0, torch.zeros(62, collection.tables[0].dim, dtype=torch.float64))
    connection = flexd.connect(collection, f"127.0.0.1:{port}", job="job", timeout_seconds=5.0)
    deadline = time.monotonic() + 30  # a report waits for the daemon to know all ranks
    while not connection.agent.counters.get("reports") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert connection.agent.counters.get("reports"), "what was noted before is reported without a step"
    with refused():  # values made from another seed on each rank
        generator = torch.Generator().manual_seed(rank)
        collection.load_rows("item", 0, torch.rand(61, collection.tables[0].dim, generator=generator).double())
    if rank == 0:  # a framework that saves on rank 0
        collection.state_dict()
    for features in flexd.prefetch([batch(shift) for shift in range(4)], collection):
        masked = {name: Jagged(jagged.values.flip(0), jagged.lengths) for name, jagged in features.items()}
        collection(masked)["item"].values.sum().backward()
        collection.optimizer.step()
    connection.close(5.0)
    collection.close()
    return {report.kind: report.text for report in MISTAKES.reports()}
