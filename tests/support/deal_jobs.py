"""Jobs of ranks that deal samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.dealing import Dealt, deal_batch
from flexd.core.layout import RankLayout
from flexd.core.shared_rows import BatchRows
from flexd.embedding.affinity import dealer
from flexd.embedding.affinity.deal_pacing import DealPacing
from flexd.embedding.affinity.deal_trial import DealTrial
from flexd.embedding.jagged import Jagged


def deal_at_random(batch: BatchRows, nodes: int) -> Dealt:
    """Exchange samples of equal group, whatever that costs."""
    rng = np.random.default_rng(len(batch.rows))
    to = batch.node.copy()
    for group in np.unique(batch.group):
        mine = np.flatnonzero(batch.group == group)
        to[mine] = rng.permutation(to[mine])
    priced = deal_batch(batch, nodes)
    return Dealt(to, priced.bytes_before, priced.bytes_after, int(batch.sample_bytes[to != batch.node].sum()))


def deal_always(*, at_random: bool) -> None:
    """Deal every batch of this process from now on, even where that does not pay."""
    vars(dealer)["DealPacing"] = lambda: DealPacing(trial=10**9)
    vars(dealer)["deal_batch"] = deal_at_random if at_random else deal_batch


@dataclass
class Batch:
    features: dict[str, Jagged]
    label: torch.Tensor
    extra: tuple[torch.Tensor, str, None]


def groups_of_rows(step: int, rank: int, samples: int, *, seed: int = 0) -> Batch:
    """Make samples of one of 8 groups of rows, whose number is their label."""
    rng = np.random.default_rng([seed, step, rank])
    group = rng.integers(0, 8, samples)
    lengths = rng.integers(1, 5, samples)
    ids = np.repeat(group, lengths) * 20 + rng.integers(0, 20, lengths.sum())
    features = {"item": Jagged(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))}
    number = torch.arange(samples) + 1000 * rank + 100_000 * step
    return Batch(features, torch.from_numpy(group), (number, "kept", None))


def mean_loss(
    rank: int, layout: RankLayout, deal: bool, steps: int, samples: int, one_thread: bool | None = None,
    deal_seconds: float | None = None, epochs: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Train with a mean over the samples of each rank; return the numbers of the samples, losses, table and bytes.

    Args:
        deal_seconds: dealing of a batch takes as long, and a byte between nodes a microsecond; blocks are of four
            steps, and trials 12 steps apart. None: steps are not measured.
    """
    vars(dealer)["DealPacing"], vars(dealer)["deal_batch"] = DealPacing, deal_batch
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 160, 32, dtype="float64", init_scale=0.5)], layout=layout,
        optimizer=flexd.Adagrad(0.1),
    )  # fmt: skip
    loader: Any = [groups_of_rows(step, rank, samples) for step in range(steps)]
    batches = flexd.prefetch(
        loader, collection, features=lambda batch: batch.features, deal=deal, one_thread=one_thread
    )
    losses, numbers, fits, dealt = [], [], True, [0]
    of_loops = {}
    before = collection.traffic.totals()

    def dealt_batches() -> int:
        of_loops[id(batches.dealt)] = batches.dealt
        return sum(totals.dealt_batches for totals in of_loops.values())

    def clock() -> float:
        sent = collection.traffic.totals()["all_to_all_inter_bytes"]
        return 1e-6 * sent + (deal_seconds or 0.0) * dealt_batches()

    collection.engine.deal_trial = DealTrial(
        measures=rank == 0 and deal_seconds is not None, steps=4, interval_steps=12, clock=clock
    )
    for batch in chain.from_iterable(batches for _ in range(epochs)):
        dealt.append(dealt_batches())
        rows = collection(batch.features)["item"]
        of_sample = torch.arange(samples).repeat_interleave(rows.lengths)
        sums = rows.values.new_zeros(samples, 32).index_add(0, of_sample, rows.values)
        ids = batch.features["item"].values
        fits &= bool((ids // 20 == batch.label[of_sample]).all()) and batch.extra[1:] == ("kept", None)
        loss = (sums.sum(1) - batch.label).square().mean()
        loss.backward()
        collection.optimizer.step()
        losses.append(float(loss.detach()))
        numbers.append(batch.extra[0].tolist())
    after = collection.traffic.totals()
    return {
        "losses": losses, "numbers": numbers, "fits": fits, "dealt": vars(batches.dealt), "dealt_steps": dealt,
        "saved": batches.dealt.saved_bytes, "table": collection.gather_table("item").numpy(),
        "inter": after["all_to_all_inter_bytes"] - before["all_to_all_inter_bytes"],
    }  # fmt: skip


def refused(rank: int, layout: RankLayout, kind: str, odd: int) -> tuple[int, str]:
    """Train with a batch that cannot be dealt on one rank, or on all; return steps and the error."""
    vars(dealer)["DealPacing"], vars(dealer)["deal_batch"] = DealPacing, deal_batch
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 8)], layout=layout)

    def loader() -> Iterator[dict[str, Any]]:
        for step in range(4):
            batch = groups_of_rows(step, rank, 6)
            made: dict[str, Any] = {"item": batch.features["item"], "label": batch.label}
            if step == 2 and rank == odd:
                made |= {
                    "set": {"more": {1, 2}},
                    "samples": {"label": batch.label[:3]},
                    "scalar": {"more": torch.tensor(1.0)},
                    "lengths": {"more": Jagged(torch.zeros(3), torch.ones(6, dtype=torch.int64))},
                    "structure": {"label": batch.label.float()},
                    "ids": {"item": Jagged(batch.features["item"].values - 1000, batch.features["item"].lengths)},
                }[kind]
            yield made

    steps = 0
    try:
        for made in flexd.prefetch(
            loader(), collection, features=lambda batch: {"item": batch["item"]}, deal=True, timeout_seconds=30.0
        ):
            collection({"item": made["item"]})["item"].values.sum().backward()
            collection.optimizer.step()
            steps += 1
    except Exception as error:
        return steps, f"{type(error).__name__}: {error}"
    return steps, ""


def turns(rank: int, layout: RankLayout, steps: int, fails: int | None = None) -> tuple[int, int, str]:
    """Train; return the steps, how many batches this rank has dealt for all, and the error.

    Args:
        fails: dealing raises on this rank.
    """
    times = 0

    def counted(batch: BatchRows, nodes: int) -> Dealt:
        nonlocal times
        if rank == fails:
            raise MemoryError("no memory for prices")
        times += 1
        return deal_batch(batch, nodes)

    vars(dealer)["DealPacing"], vars(dealer)["deal_batch"] = DealPacing, counted
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 32)], layout=layout)
    loader = [groups_of_rows(step, rank, 24).features for step in range(steps)]
    done, text = 0, ""
    try:
        for features in flexd.prefetch(loader, collection, deal=True, timeout_seconds=30.0):
            collection(features)["item"].values.sum().backward()
            collection.optimizer.step()
            done += 1
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    vars(dealer)["deal_batch"] = deal_batch
    return done, times, text


def uneven(rank: int, layout: RankLayout, batches: list[int]) -> tuple[int, str]:
    """Train each rank on its own number of batches, dealt; return the steps and the error."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 8)], layout=layout)
    loader = [groups_of_rows(step, rank, 5 + rank).features for step in range(batches[rank])]
    steps, text = 0, ""
    try:
        for features in flexd.prefetch(loader, collection, timeout_seconds=20.0, deal=True):
            collection(features)["item"].values.sum().backward()
            collection.optimizer.step()
            steps += 1
    except flexd.core.errors.EmbeddingError as error:
        text = str(error)
    return steps, text


def sampled(rank: int, layout: RankLayout, batch_size: int, epochs: int) -> dict[str, Any]:
    """Return the indices that this rank reads in each epoch, and the bytes a step sends dealt and undealt."""
    everything = groups_of_rows(0, 0, 200)
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable("item", 160, 32)], layout=layout)
    sampler = flexd.affinity.NodeSampler(everything.features, collection, batch_size, seed=3)
    indices = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices.append(list(sampler))
    ids = torch.split(everything.features["item"].values, everything.features["item"].lengths.tolist())
    size = batch_size * layout.world_size
    order = np.random.default_rng([3, 0]).permutation(200)
    undealt = [order[at * size : (at + 1) * size][rank :: layout.world_size].tolist() for at in range(len(sampler))]
    sent = []
    for batches in (undealt, indices[0]):
        before = collection.traffic.totals()["all_to_all_inter_bytes"]
        for chosen in batches:
            values = torch.cat([ids[at] for at in chosen])
            collection({"item": Jagged(values, torch.tensor([len(values)]))})["item"].values.sum().backward()
            collection.optimizer.step()
        sent.append(collection.traffic.totals()["all_to_all_inter_bytes"] - before)
    return {"indices": indices, "undealt": undealt, "length": len(sampler), "sent": sent}
