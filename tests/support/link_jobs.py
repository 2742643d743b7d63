"""Ranks whose collectives an emulated link carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import flexd
from flexd.demo.link import EmulatedLink, limit_collectives


class _Charged(EmulatedLink):
    """Notes what it carries instead of waiting."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.sent = self.received = 0.0

    @contextmanager
    def carry(self, sent_bytes: float, received_bytes: float) -> Iterator[None]:
        self.sent += sent_bytes
        self.received += received_bytes
        yield


def charged(rank: int, exchange: str) -> dict[str, Any]:
    """Train three steps under a link, and one more after it was undone."""
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 100, 8)], layout=flexd.RankLayout(2, 2), exchange=exchange
    )
    link = _Charged()
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        ids = torch.randint(100, (40,), generator=generator)
        collection({"item": flexd.Jagged(ids, torch.full((4,), 10))})["item"].values.square().sum().backward()
        collection.optimizer.step()

    undo = limit_collectives(link)
    try:
        for _ in range(3):
            step()
        totals = collection.traffic.totals()
    finally:
        undo()
    sent = link.sent
    step()
    return {
        "sent_bytes": sent, "received_bytes": link.received, "after_undo": link.sent,
        "inter_bytes": totals["all_to_all_inter_bytes"] + totals["sync_inter_bytes"],
    }  # fmt: skip
