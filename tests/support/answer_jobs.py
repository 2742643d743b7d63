"""Jobs of ranks whose tables change their answers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import flexd
from flexd.core.answers import AnswerChange
from flexd.core.errors import ChunkRefusedError
from flexd.core.layout import RankLayout
from flexd.core.placement import Delta
from flexd.embedding.exchange.collectives import Peers


def ids(*rows: int, bags: int = 2) -> flexd.Jagged:
    first = len(rows) // bags
    return flexd.Jagged(torch.tensor(rows), torch.tensor([first] * (bags - 1) + [len(rows) - first * (bags - 1)]))


def offer(collection: flexd.EmbeddingCollection, *, rows: tuple[int, ...] = (), sums: tuple[int, ...] = ()) -> None:
    inbox = collection.engine.inbox
    inbox.offer(inbox._received_version + 1, Delta.of_answers(AnswerChange(rows, sums)))


def evaluate_between(rank: int, layout: RankLayout) -> dict[str, Any]:
    """Evaluate members one after the other, with a look-up in between that applies a change of answers."""
    given: dict[str, Any] = {"layout": layout, "optimizer": flexd.SGD(lr=0.1)}
    first = flexd.EmbeddingBagCollection([flexd.EmbeddingBagTable("item", 20, 4, dtype="float64")], **given)
    second = flexd.EmbeddingBagCollection(
        [flexd.EmbeddingBagTable("shop", 9, 4, dtype="float64", pooling="mean", answer="sums")], **given
    )
    joined = flexd.join_collections(first, second)
    both = {"item": ids(3, 4, 5, 1)}, {"shop": ids(1, 2, 8, 0)}
    with torch.no_grad():
        for each in (joined, first, second):
            each.eval()
        early = [part[name] for part, name in zip(joined(both), ("item", "shop"), strict=True)]
        joined._begin(both, False)
        late = [first(both[0])["item"]]
        offer(joined, rows=(1,), sums=(0,))
        for _ in range(2):  # agreed on, and applied
            first({"item": ids(7, 7)})
        late.append(second(both[1])["shop"])
    return {"version": joined.placement_version, "early": torch.cat(early), "late": torch.cat(late)}


def collectives(rank: int, layout: RankLayout) -> list[int]:
    """Return the messages of a step before, with and after a table that answers by sums."""
    tables = [flexd.EmbeddingBagTable(name, 40, 4, dtype="float64") for name in ("item", "shop")]
    collection = flexd.EmbeddingBagCollection(tables, layout=layout, optimizer=flexd.SGD(lr=0.1))
    counts = []
    for change in ({}, {"sums": (1,)}, {"rows": (1,)}):
        if change:
            offer(collection, **change)
        for _ in range(3):
            with mock.patch.object(Peers, "all_to_all", autospec=True, side_effect=Peers.all_to_all) as sent:
                out = collection({"item": ids(1, 2, 3, 4), "shop": ids(5, 6, 7, 8, rank)})
                torch.cat(list(out.values())).sum().backward()
                collection.optimizer.step()
        counts.append(sent.call_count)
    return counts


def refused(rank: int, layout: RankLayout) -> list[str]:
    """Return why changes of answers are refused."""
    pooled = flexd.EmbeddingBagCollection(
        [
            flexd.EmbeddingBagTable("item", 20, 4),
            flexd.EmbeddingBagTable("shop", 9, 4, answer="sums"),
            flexd.EmbeddingBagTable("copied", 9, 4, homes="every rank"),
            flexd.EmbeddingTable("plain", 9, 4),
        ],
        layout=layout,
    )
    plain = flexd.EmbeddingCollection([flexd.EmbeddingBagTable("item", 20, 4)], layout=layout)
    found = []

    def attempt(collection: flexd.EmbeddingCollection, **change: tuple[int, ...]) -> None:
        try:
            offer(collection, **change)
        except ChunkRefusedError as error:
            found.append(str(error))

    attempt(pooled, rows=(0,))
    attempt(pooled, sums=(1,))
    attempt(pooled, sums=(2,))
    attempt(pooled, sums=(3,))
    attempt(pooled, sums=(9,))
    attempt(pooled, sums=(0,))
    attempt(pooled, sums=(0,))
    attempt(plain, sums=(0,))
    return found


def farther_ahead(rank: int, layout: RankLayout, changes: bool) -> dict[str, Any]:
    """Train on batches that are announced to the homes three steps ahead, while the only table changes its answer."""
    collection = flexd.EmbeddingBagCollection(
        [flexd.EmbeddingBagTable("item", 40, 4, dtype="float64", answer="sums")],
        layout=layout, optimizer=flexd.SGD(lr=0.1), fast_memory_bytes=600,
    )  # fmt: skip
    batches = [{"item": ids(*((7 * step + 3 * at + rank) % 40 for at in range(6)))} for step in range(16)]
    losses, by_sums = [], True
    for step, features in enumerate(flexd.prefetch(batches, collection, depth=3)):
        if changes and step % 3 == 0:
            offer(collection, **({"rows": (0,)} if by_sums else {"sums": (0,)}))
            by_sums = not by_sums
        loss = collection(features)["item"].sin().sum()
        loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "changes": collection.engine.answers.changes}
