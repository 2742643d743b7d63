"""Deals global batches: ranks agree which node trains which sample, and ship those that move.

For each batch, by one thread, over node and rail of each rank::

    1. all-gather a header: samples, ids, whether there is a batch, digest of its structure, pause (``DealTrial``)
    2. send the rows' codes of all samples to one rank, over its node's rails and then in its node
    3. it computes the node of each sample (``core.dealing``), and sends the result back the same way
    4. ship samples over the rail

Ranks take turns at 3., batch by batch.

A sample keeps its local rank, and every rank its number of samples: those that stay keep their order, and those that
arrive follow, node by node. Where a rank has no batch, or ids that its look-up will refuse, nothing is shipped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.dealing import deal_batch
from flexd.core.errors import CollectiveError, EmbeddingError
from flexd.core.shared_rows import BatchRows
from flexd.embedding.affinity.deal_pacing import DealPacing, DealtTotals
from flexd.embedding.affinity.deal_results import DealResults, RailResult
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
        turn = self.totals.dealt_batches % self._groups.layout.world_size
        messages = self._send_rows(codes, headers, read, turn)
        try:
            results = None if messages is None else self._deal(codes, headers, messages)
        except Exception as error:  # the others wait for the result
            raise CollectiveError(
                f"rank {self._groups.rank}: dealing a batch failed: {error}",
                remedy="restart the job from a checkpoint; drop deal=True if it happens again",
            ) from error
        result = self._receive_result(DealResults(self._nodes, headers[..., 0]), results, turn)
        batch = self._ship(headers, result, read)
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

    def _send_rows(
        self, codes: RowCodes, headers: Int64Array, read: _Read, turn: int
    ) -> list[npt.NDArray[np.uint8]] | None:
        """Collective. Return messages of ``RowCodes.pack`` by local rank and node on the rank whose turn it is."""
        keys = read.keys.keys
        packed = codes.pack(read.keys, self._homes(keys), self._prices.group_of(keys))
        mine = torch.from_numpy(packed).to(self._device)
        sizes = np.array([[codes.message_bytes(int(one[0]), int(one[1])) for one in of_rail] for of_rail in headers])
        layout, rank = self._groups.layout, self._groups.rank
        node, local = layout.node_of(turn), layout.local_rank_of(turn)
        here = layout.node_of(rank) == node
        self.totals.id_bytes += int(sizes.sum() - sizes[:, node].sum()) + 8 * headers.size * (self._nodes - 1)
        of_rail = self._groups.rail.all_to_all(
            mine, _only(node, len(mine), self._nodes), sizes[layout.local_rank_of(rank)] * here
        )
        if not here:
            return None
        everyone = self._groups.node.all_to_all(
            of_rail, _only(local, len(of_rail), self._local_ranks), sizes.sum(axis=1) * (rank == turn)
        )
        if rank != turn:
            return None
        return np.split(everyone.cpu().numpy(), np.cumsum(sizes.reshape(-1))[:-1])

    def _deal(
        self, codes: RowCodes, headers: Int64Array, messages: list[npt.NDArray[np.uint8]]
    ) -> npt.NDArray[np.uint8]:
        """Local. Return the packed results of all rails."""
        samples = headers[..., 0].reshape(-1)
        unpacked = [codes.unpack(message, int(own)) for message, own in zip(messages, samples, strict=True)]
        counts, ship, rows = (np.concatenate(part) for part in zip(*unpacked, strict=True))
        home, group = codes.home_and_group(rows)
        batch = BatchRows(
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            rows=rows,
            row_bytes=self._prices.row_bytes[group],
            homes=home,
            node=np.repeat(np.tile(np.arange(self._nodes), self._local_ranks), samples),
            group=np.repeat(np.arange(self._local_ranks), headers[..., 0].sum(axis=1)),
            sample_bytes=ship,
        )
        return DealResults(self._nodes, headers[..., 0]).pack(batch, deal_batch(batch, self._nodes))

    def _receive_result(self, results: DealResults, packed: npt.NDArray[np.uint8] | None, turn: int) -> RailResult:
        """Collective. Return the result of this rank's rail.

        Args:
            packed: those of all rails, on the rank whose turn it is.
        """
        layout, rank = self._groups.layout, self._groups.rank
        node, local = layout.node_of(turn), layout.local_rank_of(rank)
        here = layout.node_of(rank) == node
        of_rail = torch.empty(0, dtype=torch.uint8, device=self._device)
        each = results.message_bytes(local)
        if here:
            if packed is not None:
                of_rail = torch.from_numpy(packed).to(self._device)
            sizes = [self._nodes * results.message_bytes(rail) for rail in range(self._local_ranks)]
            of_rail = self._groups.node.all_to_all(
                of_rail, [size * (rank == turn) for size in sizes],
                _only(layout.local_rank_of(turn), sizes[local], self._local_ranks),
            )  # fmt: skip
        mine = self._groups.rail.all_to_all(of_rail, [each * here] * self._nodes, _only(node, each, self._nodes))
        all_rails = sum(results.message_bytes(rail) for rail in range(self._local_ranks))
        self.totals.id_bytes += all_rails * (self._nodes - 1)
        return results.unpack(mine.cpu().numpy(), local)

    def _ship(self, headers: Int64Array, result: RailResult, read: _Read) -> Any:
        """Collective if any sample moves. Return the batch of the samples that this rank trains."""
        totals = self.totals
        totals.dealt_batches += 1
        totals.samples += int(headers[..., 0].sum())
        totals.shipped_samples += result.shipped_samples
        totals.row_bytes_before += result.bytes_before
        totals.row_bytes_after += result.bytes_after
        totals.sample_bytes += result.shipped_bytes
        rank, layout = self._groups.rank, self._groups.layout
        node, local = layout.node_of(rank), layout.local_rank_of(rank)
        to, come_from = result.to, np.repeat(np.arange(self._nodes), headers[local, :, 0])
        if (to == come_from).all():
            return read.batch
        mine = come_from == node
        order = np.argsort(to[mine], kind="stable")
        sent_counts = np.bincount(to[mine], minlength=self._nodes)
        arriving = [int(np.count_nonzero((come_from == peer) & (to == node))) for peer in range(self._nodes)]
        receive = result.arriving_bytes.tolist()
        chosen = [torch.from_numpy(part).to(self._device) for part in np.split(order, np.cumsum(sent_counts)[:-1])]
        leaving = [read.blocks.select(part) if peer != node else None for peer, part in enumerate(chosen)]
        messages = [None if one is None else one.pack() for one in leaving]
        send = [0 if one is None else len(one) for one in messages]
        flat = torch.cat([one for one in messages if one is not None])
        arrived = torch.split(self._groups.rail.all_to_all(flat, send, receive), receive)
        come = [
            read.blocks.unpack(message, samples)
            for peer, (message, samples) in enumerate(zip(arrived, arriving, strict=True))
            if peer != node
        ]
        return read.layout.batch(SampleBlocks.join([read.blocks.select(chosen[node]), *come]))


def _only(member: int, size: int, members: int) -> list[int]:
    """Return sizes of messages: one member's, and none of the others."""
    return [size if peer == member else 0 for peer in range(members)]
