"""One hop of the exchange: ids go out to peers and rows come back; in the backward pass gradients go out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt
import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import TableSpec
from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers, TrafficKind
from flexd.embedding.exchange.column import MAX_JOINED_PARTS, Column, ReceivedRows, pack, unpack

Counts = npt.NDArray[np.int64]
"""int64 [peers, groups] numbers of rows."""


_RANK_BITS, _CALL_BITS = 20, 11
_MAX_RANK: int = 2**_RANK_BITS - 1
_PASSES = 128
BEGINS_LOOP, ENDS_LOOP, CONTINUES_LOOP, READS_TABLES, LOOKS_AHEAD, STEPS, CLIPS, SETTLES, FREEZES = (
    _PASSES - number for number in range(1, 10)
)
"""In place of the number of passes: the call begins, ends or continues a loop of ``flexd.prefetch``, reads, loads or
saves whole tables, looks the next batch of a loop up, sends gradients (those of a step, those that are clipped or
unscaled, or those that a step has deferred), or freezes or unfreezes tables."""
_VERBS = {
    READS_TABLES: "reads, loads or saves whole tables",
    STEPS: "steps",
    CLIPS: "clips or unscales gradients",
    SETTLES: "leaves a loop of flexd.prefetch",
}
SETTINGS_BITS = 22
# ``Agreement.flags`` are sent above the fault, in units of this.
_FLAG = 2 ** (_RANK_BITS + 2)
AGREEMENT_NUMBERS = 3
"""Numbers of an agreement in a message of sizes."""


class AgreementFlags(IntFlag):
    """State of a rank that all ranks learn of if any has it.

    Attributes:
        CHANGED: its last input is not the one that was located ahead for it.
        HAS_BATCH, NO_BATCH: the loader of its loop of ``flexd.prefetch`` has a batch after that of the next forward
            pass, or has ended.
        LOADER_FAILED: that loader has raised an error.
    """

    CHANGED = 1
    HAS_BATCH = 2
    NO_BATCH = 4
    LOADER_FAILED = 8


NO_FLAGS = AgreementFlags(0)


class NextBatch:
    """The agreement of all ranks on whether their loaders have a batch after that of the next forward pass.

    Attributes:
        mine: of this rank.
        agreed: of any rank; None until a look-up of the loop has told them.
    """

    def __init__(self, mine: AgreementFlags) -> None:
        self.set(mine)

    def set(self, mine: AgreementFlags) -> None:
        """Set what the next look-up tells the other ranks."""
        self.mine = mine
        self.agreed: AgreementFlags | None = None


@dataclass(frozen=True, order=True)
class CallSignature:
    """The state of a rank at a look-up. ``code`` must be equal on all ranks.

    Attributes:
        code: passes that wait for a step, or another call as ``BEGINS_LOOP``; steps so far (modulo 8); and whether the
            look-up is for training, or the loader that ended a loop has failed (``flag``).
    """

    code: int
    rank: int

    @staticmethod
    def of(rank: int, *, steps: int, passes: int, flag: bool = False) -> CallSignature:
        return CallSignature((steps % 8 * _PASSES + passes) * 2 + flag, rank)

    @property
    def ends_loop(self) -> bool:
        return self.code // 2 % _PASSES == ENDS_LOOP

    @property
    def freezes(self) -> bool:
        return self.code // 2 % _PASSES == FREEZES

    def __str__(self) -> str:
        passes, steps = self.code // 2 % _PASSES, self.code // 2 // _PASSES
        if passes in (BEGINS_LOOP, CONTINUES_LOOP):
            verb = "begins" if passes == BEGINS_LOOP else "asks for the next batch of"
            return f"rank {self.rank} {verb} a loop of flexd.prefetch, after {steps} steps (modulo 8)"
        if passes == LOOKS_AHEAD:
            return f"rank {self.rank} looks up the next batch of a loop of flexd.prefetch"
        if passes in _VERBS:
            return f"rank {self.rank} {_VERBS[passes]}, after {steps} steps (modulo 8)"
        if self.freezes:
            return f"rank {self.rank} {'freezes' if self.code % 2 else 'unfreezes'} tables"
        purpose = "looks rows up for training" if self.code % 2 else "only looks rows up"
        return f"rank {self.rank} {purpose}, with {passes} passes since its last step ({steps} modulo 8)"

    def pack(self) -> int:
        return self.code << _RANK_BITS | self.rank

    @staticmethod
    def unpack(word: int) -> CallSignature:
        word &= 2 ** (_RANK_BITS + _CALL_BITS) - 1
        return CallSignature(word >> _RANK_BITS, word & _MAX_RANK)


@dataclass(frozen=True)
class Agreement:
    """State that every rank sends with the sizes, and its combination over all ranks.

    Attributes:
        version: the highest chunk received; combined by minimum.
        fault: 0, or 1 + the rank whose input cannot be looked up, or ``fault_of_table`` of a table that is frozen or
            unfrozen; combined by maximum.
        first, last: the signatures of the ranks: combined by minimum and maximum.
        settings: lowest and highest digest (``SETTINGS_BITS``) of the optimizer settings of the last update, or of
            the settings of a loop that begins.
        arm: ``AgreedArm.proposed``; combined by maximum.
        flags: of this rank; combined to those of any rank.
    """

    version: int
    fault: int
    first: CallSignature
    last: CallSignature
    settings: tuple[int, int] = (0, 0)
    arm: int = 0
    flags: AgreementFlags = NO_FLAGS

    @property
    def changed(self) -> bool:
        """True if the last input of any rank is not the one that was located ahead for it."""
        return AgreementFlags.CHANGED in self.flags

    @property
    def diverged(self) -> bool:
        """True if ranks make different calls. Continuing this look-up would leave ranks waiting for each other."""
        return self.first.code != self.last.code

    def check_calls(self, tables: Sequence[TableSpec] = ()) -> None:
        """Raise EmbeddingError if ranks make different calls.

        Args:
            tables: of the collection.
        """
        if not self.diverged:
            return
        if self.first.freezes or self.last.freezes:
            number = _MAX_RANK - self.fault
            named = f", {tables[number].name!r} for one" if 0 <= number < len(tables) else ""
            raise EmbeddingError(
                f"ranks make different calls: {self.first}; {self.last} (tables to freeze or unfreeze{named})",
                remedy="call freeze and unfreeze with the same tables on every rank, between the same two steps",
            )
        for call in (self.last, self.first):
            if call.ends_loop:
                raise uneven_loop(call.rank, loader_failed=call.code % 2 > 0)
        raise EmbeddingError(
            f"ranks make different calls: {self.first}; {self.last}",
            remedy="train() or eval(), backward passes, steps and loops of flexd.prefetch at the same points on every "
            "rank",
        )

    @property
    def settings_differ(self) -> bool:
        """True if ranks updated their rows with different settings: copies of a row have become unequal."""
        return self.settings[0] != self.settings[1]

    def pack(self) -> list[int]:
        """Encode as ``AGREEMENT_NUMBERS`` 64-bit numbers."""
        bits = _RANK_BITS + _CALL_BITS
        lowest, highest = self.settings
        return [
            self.version << bits | self.first.pack(),
            self.fault + _FLAG * self.flags << bits | self.last.pack(),
            (self.arm << SETTINGS_BITS | lowest) << SETTINGS_BITS | highest,
        ]

    @staticmethod
    def combined(words: Sequence[Sequence[int]]) -> Agreement:
        """Combine the packed agreements of several ranks."""
        bits = _RANK_BITS + _CALL_BITS
        signature = 2**bits - 1
        versions, faults, all_settings = zip(*words, strict=True)
        # Packed signatures have the order of signatures. Ranks mostly have equal settings.
        settings = set(all_settings)
        flags = [((fault >> bits) + _FLAG // 2) // _FLAG for fault in faults]  # a fault may be negative
        return Agreement(
            min(versions) >> bits,
            max([(fault >> bits) - _FLAG * of_rank for fault, of_rank in zip(faults, flags, strict=True)]),
            CallSignature.unpack(min([version & signature for version in versions])),
            CallSignature.unpack(max([fault & signature for fault in faults])),
            (
                min((both >> SETTINGS_BITS) % 2**SETTINGS_BITS for both in settings),
                max(both % 2**SETTINGS_BITS for both in settings),
            ),
            max(settings) >> 2 * SETTINGS_BITS,
            AgreementFlags(reduce(or_, flags)),
        )


def digest_of_settings(settings: str) -> int:
    """Return a digest of ``SETTINGS_BITS``."""
    return zlib.crc32(settings.encode()) % (1 << SETTINGS_BITS)


def fault_of_table(table: int) -> int:
    """Return ``Agreement.fault`` of a rank that freezes or unfreezes a table: above those of all ranks' input."""
    return _MAX_RANK - table


def uneven_loop(rank: int, *, loader_failed: bool) -> EmbeddingError:
    """Return the error of a rank that has a batch where ``rank`` has none."""
    if loader_failed:
        return EmbeddingError(f"rank {rank}: its loader raised an error", remedy=f"see the error of rank {rank}")
    return EmbeddingError(
        f"rank {rank} has no further batch, other ranks have",
        remedy="flexd.prefetch(..., uneven='empty') goes on with empty batches there, uneven='stop' ends all loops",
    )


@dataclass(frozen=True)
class PeerWords:
    """int64 ``words`` for the peers, one peer after another; ``sent`` and ``received`` are the words of each peer."""

    words: torch.Tensor
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def empty(self) -> bool:
        """True if nothing is sent and nothing received, so that this rank can leave the words out of a message."""
        return not any(self.sent) and not any(self.received)

    def as_column(self) -> Column:
        """Return the words as a column that travels with rows."""
        return Column(self.words.view(-1, 1), None, self.sent, self.received, torch.int64, TrafficKind.SYNC)


class Hop:
    """Sends each key to one peer and brings its row back.

    Args:
        destination: int64 [n] home ranks -> int64 [n] indices of the peers over which they are reached.
        all_reduces: gradients of rows that all peers of the hop hold are all-reduced where that loses no precision;
            otherwise they go to the home, and the sums come back.
    """

    def __init__(
        self, peers: Peers, destination: Callable[[torch.Tensor], torch.Tensor], *, all_reduces: bool = False
    ) -> None:
        self.peers = peers
        self.destination = destination
        self.all_reduces = all_reduces

    def exchange_sizes(
        self,
        sizes: torch.Tensor,
        agreement: Agreement,
        faulty: torch.Tensor | None = None,
        local: torch.Tensor | None = None,
        changed: torch.Tensor | None = None,
    ) -> tuple[Counts, Counts, Agreement, npt.NDArray[np.int64]]:
        """Exchange int64 [peers, groups] numbers of rows requested from each peer.

        Args:
            faulty: bool [] on the device: true adds the fault of this rank to an agreement without any.
            local: int64 [n] numbers of this rank, read with the others.
            changed: bool [] on the device: true makes ``Agreement.changed`` true.

        Returns:
            (rows requested from each peer, rows requested by each peer, combined agreement of the peers, ``local``).
        """
        size, groups = sizes.shape
        words = devices.uploaded(agreement.pack(), sizes.device)
        if faulty is not None and not agreement.fault:
            words[1].add_(faulty, alpha=self.peers.rank + 1 << _RANK_BITS + _CALL_BITS)
        if changed is not None:
            words[1].add_(changed, alpha=_FLAG * AgreementFlags.CHANGED << _RANK_BITS + _CALL_BITS)
        sent = torch.cat([sizes, words.expand(size, AGREEMENT_NUMBERS)], dim=1).view(-1)
        width = groups + AGREEMENT_NUMBERS
        received = self.peers.all_to_all(sent, [width] * size, [width] * size, is_first=True)
        numbers = host_numbers(torch.cat([sent, received] if local is None else [sent, received, local]))
        requested, served = numbers[: 2 * size * width].reshape(2, size, width)
        combined = Agreement.combined(served[:, groups:].tolist())
        return requested[:, :groups], served[:, :groups], combined, numbers[2 * size * width :]

    def meet(self, agreement: Agreement, groups: int, device: torch.device) -> Agreement:
        """Exchange the message of ``exchange_sizes`` without any row; return the combined agreement of the peers."""
        none = torch.zeros((self.peers.size, groups), dtype=torch.int64, device=device)
        return self.exchange_sizes(none, agreement)[2]

    def exchange_ids(
        self, ids: torch.Tensor, requested: Counts, served: Counts, words: PeerWords | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exchange int64 ids, with ``words`` in the same message.

        Args:
            ids: ordered by dim-group and peer.

        Returns:
            (ids requested by each peer, ordered by dim-group and peer; the received words, None without ``words``).
        """
        out, back = requested, served
        if words is not None:
            out, back = (np.column_stack(both) for both in ((out, words.sent), (back, words.received)))
            ids = torch.cat([ids, words.words])
        arrived = self.peers.all_to_all(
            with_parts_transposed(ids, out.T),
            out.sum(axis=1).tolist(),
            back.sum(axis=1).tolist(),
            {} if words is None else {TrafficKind.SYNC: words.sent},
        )
        ordered = with_parts_transposed(arrived, back)
        total = int(served.sum())
        return (ordered, None) if words is None else (ordered[:total], ordered[total:])

    def exchange(self, columns: Sequence[Column]) -> list[ReceivedRows]:
        """Exchange all columns in one collective; return the received rows of each."""
        sent = self._bytes([(column.sent, column.row_bytes) for column in columns])
        received = self._bytes([(column.received, column.row_bytes) for column in columns])
        of_kinds = {
            kind: self._bytes(some)
            for kind in (TrafficKind.SYNC, TrafficKind.MIGRATION)
            if (some := [(column.sent, column.row_bytes) for column in columns if column.kind == kind])
        }
        message, me = None, self.peers.index
        if len(columns) * self.peers.size > MAX_JOINED_PARTS and not devices.in_host_memory(columns[0].source):
            from flexd.embedding.exchange.window_message import WindowMessage  # loaded where peers are many

            message = WindowMessage(columns, me)
        buffer, own = pack(columns, me) if message is None else message.pack()
        arrived = self.peers.all_to_all(buffer, sent, received, of_kinds)
        return unpack(columns, own, arrived, me) if message is None else message.unpack(arrived, own)

    def _bytes(self, columns: Sequence[tuple[Sequence[int], int]]) -> list[int]:
        """Return the bytes exchanged with each peer, of the numbers of rows of columns and the bytes of a row."""
        total = np.array([width for _, width in columns]) @ np.array([rows for rows, _ in columns], dtype=np.int64)
        total[self.peers.index] = 0
        found: list[int] = total.tolist()
        return found


def host_numbers(numbers: torch.Tensor) -> npt.NDArray[np.int64]:
    """Read int64 [n] numbers of a device. Waits for it."""
    return np.array(numbers.tolist(), dtype=np.int64)


def with_parts_transposed(flat: torch.Tensor, sizes: Counts) -> torch.Tensor:
    """Transpose the order of the parts of a flat tensor: those of ``sizes`` [a, b], a by a, become b by b."""
    if min(sizes.shape) == 1:
        return flat
    if sizes.size > MAX_JOINED_PARTS and not devices.in_host_memory(flat):
        from flexd.embedding.exchange.window_message import transposed

        return transposed(flat, sizes)
    parts = flat.split_with_sizes(sizes.ravel().tolist())
    return torch.cat([part for b in range(sizes.shape[1]) for part in parts[b :: sizes.shape[1]]])
