"""Batches of a dataset, dealt by the loader: each rank reads the samples whose rows are in its node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from flexd.core.dealing import BatchRows, deal_batch
from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection

Int64Array = npt.NDArray[np.int64]

_ID_BYTES = 8


class NodeSampler(Sampler[list[int]]):
    """Yields the indices of this rank's batches, for ``DataLoader(batch_sampler=...)``.

    The global batches are those of ``DistributedSampler``: equal samples in an order that the seed decides. Which rank
    trains which of them follows from the rows that they use, in equal numbers per rank. Every rank computes that alone,
    from where rows live when it begins to iterate: every rank begins at the same point of the program.

    Args:
        features: ids of all samples of the dataset, as ``collection`` takes them; on the device of the tables.
        collection: whose rows these are, on every rank.
        batch_size: samples of a rank and batch.
        shuffle: draw samples in a random order, another one each epoch (``set_epoch``).
        seed: equal on all ranks.

    Raises:
        EmbeddingError: ids are out of range, features differ in their samples, or ``batch_size`` is not positive.
    """

    def __init__(
        self, features: Any, collection: EmbeddingCollection, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if batch_size < 1:
            raise EmbeddingError(f"batches of {batch_size} samples", remedy="give a positive batch_size")
        by_name, found = collection.resolve(features)
        order = found.order
        sizes = {name: by_name[name].lengths.shape[0] for name in order}
        if len(set(sizes.values())) > 1:
            raise EmbeddingError(f"samples by feature: {sizes}", remedy="give every feature one length per sample")
        if found.faulty is not None and bool(found.faulty):
            raise EmbeddingError("ids of the dataset are out of range", remedy="give ids below the rows of the tables")
        self.samples = next(iter(sizes.values()), 0)
        device = found.keys.device
        sample = torch.arange(self.samples, device=device).repeat(len(order))
        if order:
            sample = sample.repeat_interleave(torch.cat([by_name[name].lengths for name in order]).to(torch.int64))
        groups, wire = collection.engine.homes.groups, collection.engine.router.wire
        end = groups[-1].end_key
        distinct = (sample * end + found.keys).unique().cpu().numpy()  # type: ignore[no-untyped-call]
        of_sample, self._keys = np.divmod(distinct, end)
        self._first_keys = np.array([group.first_key for group in groups])
        self._row_bytes = np.array(
            [2 * group.dim * of.itemsize + _ID_BYTES for group, of in zip(groups, wire, strict=True)]
        )
        """int64 [dim-groups] bytes of a row and its gradient with their ids, as they travel."""
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(of_sample, minlength=self.samples))])
        self._layout, self._rank = collection.layout, collection.rank
        self._nodes_of = collection.engine.migrator.nodes_of
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order; equal on all ranks."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.samples // (self._batch_size * self._layout.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self._nodes_of(self._keys))  # now, and not when the first batch is read

    def _batches(self, nodes: Int64Array) -> Iterator[list[int]]:
        layout, size = self._layout, self._batch_size * self._layout.world_size
        order = np.arange(self.samples)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self.samples)
        reader = np.arange(size) % layout.world_size
        node, group = reader // layout.local_ranks, reader % layout.local_ranks
        mine = group == layout.local_rank_of(self._rank)
        for number in range(len(self)):
            chosen = order[number * size : (number + 1) * size]
            to = deal_batch(self._rows(chosen, nodes, node, group), layout.nodes).to
            yield chosen[mine & (to == layout.node_of(self._rank))].tolist()

    def _rows(self, chosen: Int64Array, nodes: Int64Array, node: Int64Array, group: Int64Array) -> BatchRows:
        counts = self._offsets[chosen + 1] - self._offsets[chosen]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        at = np.repeat(self._offsets[chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
        rows = self._keys[at]
        row_bytes = self._row_bytes[np.searchsorted(self._first_keys, rows, side="right") - 1]
        return BatchRows(offsets, rows, row_bytes, nodes[at], node, group)
