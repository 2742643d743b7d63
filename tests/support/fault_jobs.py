"""Jobs of ranks: one dies, hangs or makes other calls than the rest."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from flexd.core.errors import FlexdError
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Delta
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.jagged import Jagged
from flexd.embedding.prefetch.loop import prefetch

IDS = {"item": Jagged(torch.arange(50), torch.tensor([50]))}


def _step(collection: EmbeddingCollection) -> None:
    collection(IDS)["item"].values.sum().backward()
    collection.optimizer.step()


def timeouts(rank: int, layout: RankLayout) -> list[float]:
    """Return the timeouts of the collectives of world, node and rail in seconds."""
    groups = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)._groups
    backends = [peers.group._get_backend(torch.device("cpu")) for peers in (groups.world, groups.node, groups.rail)]
    return [backend.options._timeout.total_seconds() for backend in backends]


def lose_a_rank(rank: int, layout: RankLayout, victim: int, fault: str, timeout_seconds: float) -> tuple[str, float]:
    """Train; the victim ends, hangs or does one more forward pass. Return the error of this rank and its time."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    _step(collection)
    # Set after the first step: on a busy machine processes may start more slowly than this timeout.
    for peers in (collection._groups.node, collection._groups.rail):
        peers.group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_seconds))
    if rank == victim and fault == "dies":
        os._exit(1)
    started = time.monotonic()
    try:
        if rank == victim and fault == "hangs":
            time.sleep(3 * timeout_seconds)
        if rank == victim and fault == "extra look-up":
            with torch.no_grad():
                collection(IDS)
        for _ in range(3):
            _step(collection)
    except FlexdError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    except Exception as error:
        return f"torch's own {error!r}", time.monotonic() - started
    return "no error", time.monotonic() - started


def diverge(rank: int, layout: RankLayout, odd: int, fault: str, exchange: str) -> tuple[str, bool]:
    """Let one rank diverge from the rest; return the error of this rank, and whether all can continue."""
    collection = EmbeddingCollection(
        [EmbeddingTable("item", 50, 4)], layout=layout, exchange=exchange, replica_slots=[20]
    )
    keys = np.arange(20, dtype=np.int64)
    collection.engine.inbox.offer(1, Delta(keys, np.zeros(20, np.uint8), np.full(20, Tier.DEVICE, np.uint8)))
    for _ in range(3):
        _step(collection)
    text = "no error"
    if rank == odd and fault == "evaluates":
        collection.eval()
    if rank == odd and fault == "skips a step":
        collection.engine.steps += 1
    try:
        collection(IDS)
    except FlexdError as error:
        text = f"{type(error).__name__}: {error}"
    collection.train()
    if rank == odd and fault == "skips a step":
        collection.engine.steps -= 1
    _step(collection)
    return text, collection.replicas_bit_equal()


def other_loop(rank: int, layout: RankLayout, odd: int, arguments: dict[str, Any]) -> tuple[str, int]:
    """Begin a loop of ``prefetch`` with other arguments on one rank; return the error of this rank, and the steps
    of a loop with equal arguments after it."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    text = "no error"
    try:
        for ids in prefetch([IDS], collection, **(arguments if rank == odd else {})):
            collection(ids)["item"].values.sum().backward()
            collection.optimizer.step()
    except FlexdError as error:
        text = f"{type(error).__name__}: {error}"
    for ids in prefetch([IDS] * 3, collection):
        collection(ids)["item"].values.sum().backward()
        collection.optimizer.step()
    return text, collection.steps


def other_settings(rank: int, layout: RankLayout, odd: int, ahead: bool) -> tuple[int, str]:
    """Train with another learning rate on one rank from step 2 on; return the steps done and the error of this rank."""
    collection = EmbeddingCollection([EmbeddingTable("item", 50, 4)], layout=layout)
    batches = [IDS] * 6
    try:
        for number, ids in enumerate(prefetch(batches, collection) if ahead else batches):
            if number == 2 and rank == odd:
                collection.optimizer.param_groups[0]["lr"] *= 0.5
            collection(ids)["item"].values.sum().backward()
            collection.optimizer.step()
    except FlexdError as error:
        return collection.steps, f"{type(error).__name__}: {error}"
    return collection.steps, "no error"


def fails_in_a_step(rank: int, layout: RankLayout, odd: int, where: str, ahead: bool, exchange: str) -> tuple[str, int]:
    """Run out of memory on one rank at a point of step 2, which then stays alive; return the error and steps done."""
    make = EmbeddingBagCollection if where in ("_pooled", "sums", "spread") else EmbeddingCollection
    summed = where in ("sums", "spread")
    table = EmbeddingBagTable("item", 50, 4, answer="sums") if summed else EmbeddingTable("item", 50, 4)
    collection = make([table], layout=layout, exchange=exchange)

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    batches = [{"item": Jagged(torch.arange(50), torch.tensor([50]))} for _ in range(8)]

    def train() -> None:
        for number, ids in enumerate(prefetch(batches, collection) if ahead else batches):
            if number == 2 and rank == odd:
                job = getattr(collection.engine.hooks, "_job", None)
                router = job._router if where == "job" and job is not None else collection.engine.router
                if where == "tap":
                    collection.after_lookup = out_of_memory
                elif where == "_pooled":
                    setattr(collection, where, out_of_memory)
                elif where == "dense part":
                    out_of_memory()
                else:
                    setattr(router, "fetch" if where == "job" else where, out_of_memory)
            rows = collection(ids)["item"]
            (rows if isinstance(rows, torch.Tensor) else rows.values).sum().backward()
            collection.optimizer.step()

    try:
        with collection if where == "dense part" else nullcontext():
            train()
    except Exception as error:
        return f"{type(error).__name__}: {error}", collection.steps
    return "no error", collection.steps
