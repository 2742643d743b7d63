"""Deals global batches: ranks agree which node trains which sample, and ship those that move.

For each batch, by one thread, over node and rail of each rank::

    1. all-gather a header: samples, ids, whether there is a batch, digest of its structure, pause (``DealTrial``)
    2. gather the rows' codes of all samples, over the rail and then in the node, so that they cross once a node
    3. every rank computes the same nodes of all samples (``core.dealing``)
    4. ship samples over the rail

A sample keeps its local rank, and every rank its number of samples: those that stay keep their order, and those that
arrive follow, node by node. Where a rank has no batch, or ids that its look-up will refuse, nothing is shipped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.dealing import Dealt, deal_batch
from flexd.core.errors import EmbeddingError
from flexd.core.shared_rows import BatchRows
from flexd.embedding.affinity.deal_pacing import DealPacing, DealtTotals
from flexd.embedding.affinity.deal_trial import DealTrial
from flexd.embedding.affinity.row_codes import RowCodes, SampleKeys
from flexd.embedding.affinity.sample_blocks import BlockLayout, SampleBlocks
from flexd.embedding.affinity.sample_parts import SampleParts
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.features import FeatureKeys
from flexd.embedding.jagged import Jagged

Int64Array = npt.NDArray[np.int64]
Resolved = tuple[tuple[dict[str, Jagged], list[str]], FeatureKeys]

_HEADER = 5
_ID_BYTES = 8


class _State(IntEnum):
    READY = 0
    KEEP = 1
    """No batch, or one that is not dealt."""
    FAILED = 2


@dataclass(frozen=True)
class RowPrices:
    """What a row costs that crosses between nodes.

    Attributes:
        first_addresses: int64 [dim-groups], the first address of each (``core.homes``).
        end_address: after the last.
        row_bytes: int64 [dim-groups], of a row and its gradient with their ids.
    """

    first_addresses: Int64Array
    end_address: int
    row_bytes: Int64Array

    @staticmethod
    def of_engine(engine: RowEngine) -> RowPrices:
        """Return the prices of rows and gradients as they travel in this job."""
        groups = engine.homes.groups
        each = [
            2 * group.dim * dtype.itemsize + _ID_BYTES for group, dtype in zip(groups, engine.router.wire, strict=True)
        ]
        return RowPrices(np.array([group.first_key for group in groups]), groups[-1].end_key, np.array(each))

    def group_of(self, addresses: Int64Array) -> Int64Array:
        return np.searchsorted(self.first_addresses, addresses, side="right") - 1


@dataclass(frozen=True)
class _Read:
    """A batch of this rank, taken apart."""

    batch: Any
    batch_parts: SampleParts
    layout: BlockLayout
    blocks: SampleBlocks
    keys: SampleKeys


class Dealer:
    """Deals the batches of a loop. ``deal`` is collective and called for equally many batches on every rank.

    Args:
        groups: node and rail of the thread that calls it.
        homes: returns int64 [n] nodes of the homes of int64 [n] addresses.
        resolve: returns the features of a batch and their keys, as ``EmbeddingCollection.resolve``.
        device: of the tables.
        trial: whether steps are shorter with dealing.
    """

    def __init__(
        self,
        groups: ChainGroups,
        prices: RowPrices,
        homes: Callable[[Int64Array], Int64Array],
        resolve: Callable[[Any], Resolved],
        device: torch.device,
        trial: DealTrial,
        pacing: DealPacing | None = None,
    ) -> None:
        self.totals = DealtTotals()
        self._groups = groups
        self._prices = prices
        self._homes = homes
        self._resolve = resolve
        self._device = device
        self._trial = trial
        self._pacing = pacing or DealPacing()
        self._counted_batches = 0
        self._nodes, self._local_ranks = groups.layout.nodes, groups.layout.local_ranks

    def deal(self, batch: Any, *, ready: bool) -> Any:
        """Collective. Return the batch to train on here instead of ``batch``.

        Args:
            ready: ``batch`` is one; otherwise it is returned as it is.

        Raises:
            EmbeddingError: this rank's batch cannot be taken apart; on every rank: they are not of one structure.
        """
        may_deal = self._trial.may_deal()
        deals = self._nodes > 1 and may_deal and self._pacing.deals(self.totals)
        self.totals.batches += 1
        self.totals.time_paused_batches += not may_deal
        if not deals:
            return batch
        read, error = None, None
        if ready:
            try:
                read = self._read(batch)
            except Exception as fault:  # a rank that stops alone would leave the others waiting
                error = fault
        headers = self._gather_headers(read, failed=error is not None)
        may_deal = self._trial.pause(int(headers[0, 0, 4]))  # of rank 0, on every rank
        self.totals.time_paused_batches += not may_deal
        if error is not None:
            raise error
        if not may_deal or (headers[..., 2] != _State.READY).any() or read is None:
            return batch
        self._check_structure(headers, read)
        codes = RowCodes.for_batch(self._nodes, len(self._prices.row_bytes), int(headers[..., 1].sum()))
        messages = self._gather_rows(codes, headers, read)
        rows, dealt = self._agree(codes, headers, messages)
        batch = self._ship(headers, rows, dealt, read)
        self._pacing.judge(self.totals)
        return batch

    def count_step(self) -> None:
        """Count a step of the training thread in which a batch was dealt, or not."""
        dealt = self.totals.dealt_batches
        self._trial.step(dealt=dealt > self._counted_batches)
        self._counted_batches = dealt

    def _read(self, batch: Any) -> _Read | None:
        """Return the batch taken apart; None if its look-up will refuse its ids."""
        try:
            (features, order), found = self._resolve(batch)
        except Exception:  # its own look-up raises it
            return None
        parts = SampleParts.of(batch)
        lengths = [features[name].lengths for name in order]
        odd = next((name for name in order if features[name].lengths.shape[0] != parts.samples), None)
        if odd is not None:
            raise EmbeddingError(
                f"feature {odd!r} has {features[odd].lengths.shape[0]} samples, the batch has {parts.samples}",
                remedy="samples can be dealt if every feature has one length for each",
            )
        if found.faulty is not None and bool(found.faulty):
            return None
        layout = BlockLayout(parts, self._device)
        blocks = layout.blocks()
        sample = torch.arange(parts.samples, device=self._device).repeat(len(lengths))
        if lengths:
            sample = sample.repeat_interleave(torch.cat(lengths).to(self._device, torch.int64))
        keys = SampleKeys.of(found.keys, sample, blocks.sample_bytes(), self._prices.end_address)
        return _Read(batch, parts, layout, blocks, keys)

    def _gather_headers(self, read: _Read | None, *, failed: bool) -> Int64Array:
        """Collective. Return int64 [local ranks, nodes, 5]."""
        if read is None:
            mine = [0, 0, _State.FAILED if failed else _State.KEEP, 0, self._trial.order()]
        else:
            digest = zlib.crc32(read.batch_parts.structure.encode())
            mine = [read.batch_parts.samples, len(read.keys.keys), _State.READY, digest, self._trial.order()]
        header = torch.tensor(mine, dtype=torch.int64, device=self._device)
        of_rail = self._groups.rail.all_gather(header)
        headers = self._groups.node.all_gather(of_rail.view(self._nodes, _HEADER))
        return headers.view(self._local_ranks, self._nodes, _HEADER).cpu().numpy()

    def _check_structure(self, headers: Int64Array, read: _Read) -> None:
        digests = headers[..., 3].T.reshape(-1)
        odd = np.flatnonzero(digests != digests[0])
        if len(odd):
            raise EmbeddingError(
                f"the batch of rank {odd[0]} has other parts than that of rank 0; rank {self._groups.rank}: "
                f"{read.batch_parts.structure}",
                remedy="give every rank batches of the same names, dtypes and shapes; a part may have no values",
            )

    def _gather_rows(self, codes: RowCodes, headers: Int64Array, read: _Read) -> list[list[npt.NDArray[np.uint8]]]:
        """Collective. Return ``[local rank][node]`` messages of ``RowCodes.pack``."""
        keys = read.keys.keys
        packed = codes.pack(read.keys, self._homes(keys), self._prices.group_of(keys))
        mine = torch.from_numpy(packed).to(self._device)
        sizes = np.array([[codes.message_bytes(int(one[0]), int(one[1])) for one in of_rail] for of_rail in headers])
        rail, node = self._groups.rail, self._groups.node
        of_rail = _gather_uneven(rail.all_to_all, mine, sizes[self._groups.layout.local_rank_of(self._groups.rank)])
        everyone = _gather_uneven(node.all_to_all, of_rail, sizes.sum(axis=1)).cpu().numpy()
        self.totals.id_bytes += int(sizes.sum() + 8 * headers.size) * (self._nodes - 1)
        parts = np.split(everyone, np.cumsum(sizes.reshape(-1))[:-1])
        return [parts[first : first + self._nodes] for first in range(0, len(parts), self._nodes)]

    def _agree(
        self, codes: RowCodes, headers: Int64Array, messages: list[list[npt.NDArray[np.uint8]]]
    ) -> tuple[BatchRows, Dealt]:
        """Local. Return the rows of the global batch and where each sample is trained: equal on all ranks."""
        counts, ship, rows = (
            np.concatenate(part)
            for part in zip(
                *(
                    codes.unpack(message, int(header[0]))
                    for of_rail, of_headers in zip(messages, headers, strict=True)
                    for message, header in zip(of_rail, of_headers, strict=True)
                ),
                strict=True,
            )
        )
        home, group = codes.home_and_group(rows)
        samples = headers[..., 0].reshape(-1)
        rail = np.repeat(np.arange(self._local_ranks), self._nodes)
        batch = BatchRows(
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            rows=rows,
            row_bytes=self._prices.row_bytes[group],
            homes=home,
            node=np.repeat(np.tile(np.arange(self._nodes), self._local_ranks), samples),
            group=np.repeat(rail, samples),
            sample_bytes=ship,
        )
        return batch, deal_batch(batch, self._nodes)

    def _ship(self, headers: Int64Array, rows: BatchRows, dealt: Dealt, read: _Read) -> Any:
        """Collective if any sample moves. Return the batch of the samples that this rank trains."""
        moved = dealt.to != rows.node
        totals = self.totals
        totals.dealt_batches += 1
        totals.samples += len(moved)
        totals.shipped_samples += int(np.count_nonzero(moved))
        totals.row_bytes_before += dealt.bytes_before
        totals.row_bytes_after += dealt.bytes_after
        totals.sample_bytes += dealt.shipped_bytes
        rank, layout = self._groups.rank, self._groups.layout
        node, local = layout.node_of(rank), layout.local_rank_of(rank)
        on_rail = rows.group == local
        if not (moved & on_rail).any():
            return read.batch
        to, ship = dealt.to[on_rail], rows.sample_bytes[on_rail]
        come_from = rows.node[on_rail]
        mine = come_from == node
        order = np.argsort(to[mine], kind="stable")
        sent_counts = np.bincount(to[mine], minlength=self._nodes)
        arriving = [int(np.count_nonzero((come_from == peer) & (to == node))) for peer in range(self._nodes)]
        receive = [int(ship[(come_from == peer) & (to == node)].sum()) for peer in range(self._nodes)]
        chosen = [torch.from_numpy(part).to(self._device) for part in np.split(order, np.cumsum(sent_counts)[:-1])]
        leaving = [read.blocks.select(part) if peer != node else None for peer, part in enumerate(chosen)]
        messages = [None if one is None else one.pack() for one in leaving]
        send = [0 if one is None else len(one) for one in messages]
        receive[node] = 0
        flat = torch.cat([one for one in messages if one is not None])
        arrived = torch.split(self._groups.rail.all_to_all(flat, send, receive), receive)
        come = [
            read.blocks.unpack(message, samples)
            for peer, (message, samples) in enumerate(zip(arrived, arriving, strict=True))
            if peer != node
        ]
        return read.layout.batch(SampleBlocks.join([read.blocks.select(chosen[node]), *come]))


def _gather_uneven(
    all_to_all: Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor],
    mine: torch.Tensor,
    sizes: Int64Array,
) -> torch.Tensor:
    """Collective. Return the tensors of all members, one after another; ``sizes`` are those of each."""
    receive = [int(size) for size in sizes]
    return all_to_all(mine.repeat(len(receive)), [len(mine)] * len(receive), receive)
