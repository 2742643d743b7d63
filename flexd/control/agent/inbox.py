"""The queue of chunks between the agent's thread and the training thread, with agreement on the step that applies them.

Every rank must apply the same chunks at the same step, although chunks arrive at each rank at different times. The
training thread sends the highest version it holds in the sizes exchange of every step (``begin_exchange``); the minimum
over all ranks is returned (``end_exchange``) and is *agreed*: every rank holds these chunks and will apply them before
its next step.

::

    received ---> prepared ---- end_exchange(min >= version) ----> agreed -- poll_agreed() --> applied
        |            |
        `------------`---- settle() (epoch ended) ----> dropped

Directories and slots of the next placement are prepared in the agent's thread, so that the training thread only copies
rows and swaps pointers. A rank announces the version up to which it has prepared.

The peers may have agreed on any announced version, so nothing announced is dropped before the outcome is known:
``settle`` waits for it. When every rank has settled and none has been offered a newer chunk, all ranks hold the same
agreed version and nothing beyond it, so the daemon may number new chunks from there.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flexd.core.arrays import BoolArray, Int64Array, UInt8Array
from flexd.core.errors import ChunkRefusedError, ControlError, named_error
from flexd.core.keyspace import Homes
from flexd.core.placement import REHOMED, Delta, is_rehomed, nodes_of_rehomed

logger = logging.getLogger(__name__)

PREPARED_CHUNKS = 2
"""Chunks that are always prepared ahead: the ranks agree on one while the next is prepared."""
PREPARED_BYTES = 8 * 2**20
"""Further chunks are prepared while all prepared ones fit in."""


class Prepared(Protocol):
    """A prepared chunk, made from the placement that the chunk before it leaves."""

    @property
    def nbytes(self) -> int: ...


Prepare = Callable[[Delta, Prepared | None], Prepared]
"""(chunk, prepared chunk before it; None: from the applied placement) -> prepared chunk."""
AgreedChunk = tuple[int, Delta, Prepared]
"""Version, chunk, prepared chunk."""


def cannot_prepare(rank: int, version: int, error: Exception) -> ChunkRefusedError:
    """Return the refusal of a chunk because of any error, by type and message; logs the error's stack."""
    logger.warning("rank %d: chunk %d cannot be prepared", rank, version, exc_info=error)
    return ChunkRefusedError(
        f"rank {rank}: chunk {version} cannot be prepared: {named_error(error)}",
        remedy="see the rank's log; a smaller control.chunk_bytes needs less memory",
        version=version,
    )


@dataclass
class _Chunk:
    version: int
    delta: Delta
    slot_change: Int64Array
    digest_change: int
    prepared: Prepared | None = None


class ChunkInbox:
    """Thread-safe. ``offer``, ``prepare_next`` and ``settle`` belong to the agent's thread, the rest to the training
    thread.

    Args:
        homes: of all rows.
        rank: this rank in the layout of ``homes``.
        replica_slots: replica slots of this rank for each dim-group.
        matches_applied: (int64 [n] keys, uint8 [n] tiers) -> bool [n], whether these rows may be at these tiers in the
            applied placement. Called from the agent's thread.
        prepare: called from the agent's thread.

    Attributes:
        agreed_version, applied_version: of the newest chunk that all ranks hold, and that this one has applied.
    """

    def __init__(
        self,
        homes: Homes,
        rank: int,
        replica_slots: tuple[int, ...],
        matches_applied: Callable[[Int64Array, UInt8Array], BoolArray],
        prepare: Prepare,
    ) -> None:
        self._max_tier = REHOMED + homes.layout.nodes - 1 if homes.layout.nodes > 1 else REHOMED - 1
        self._homes = homes
        self._rank = rank
        self._slots = np.array(replica_slots, dtype=np.int64)
        self._matches_applied = matches_applied
        self._prepare = prepare
        self._changed = threading.Condition()
        # Held while a chunk is checked and prepared, against another grouping of the rows meanwhile. Taken before
        # ``_changed``.
        self._checking = threading.RLock()
        # Received and not applied yet, in order.
        self._chunks: deque[_Chunk] = deque()
        self._polled_version = 0
        self._received_version = 0
        self._prepared_version = 0
        self.agreed_version = 0
        self.applied_version = 0
        self._agreed_digest = 0
        # In the placement that has every received chunk applied.
        self._slots_used = np.zeros(len(replica_slots), dtype=np.int64)
        self._in_exchange = False
        self.priced_exchange = ""
        """The exchange that the daemon prices lower; empty before it has. Set by the agent's thread."""
        self.on_change: Callable[[], None] = lambda: None
        """Called by the training thread when the agreed or applied version has changed; must not block."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the chunks that are not applied yet."""
        with self._changed:
            arrays = [(each.delta.keys, each.delta.old_tiers, each.delta.new_tiers) for each in self._chunks]
        return sum(array.nbytes for of_chunk in arrays for array in of_chunk)

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the prepared chunks that are not applied yet."""
        with self._changed:
            return sum(chunk.prepared.nbytes for chunk in self._chunks if chunk.prepared is not None)

    def offer(self, version: int, delta: Delta) -> None:
        """Receive one chunk. A repeated version is ignored.

        Raises:
            ChunkRefusedError: out of order, rows outside the tables, repeated rows or unknown tiers, rows that are not
                at the tiers that the chunk starts from, the chunk needs more replica slots than this rank has, or this
                or an earlier chunk cannot be prepared, for whatever reason. The chunk is dropped whole.
        """
        with self._checking:
            self._offer(version, delta)
        while self.prepare_next():
            pass

    def _offer(self, version: int, delta: Delta) -> None:
        # Only this thread adds chunks, so what is checked without the lock, which training waits for, stays true.
        with self._changed:
            if version <= self._received_version:
                return
            received, waiting = self._received_version, [chunk.delta for chunk in self._chunks]
        if version != received + 1:
            raise ChunkRefusedError(
                f"rank {self._rank}: chunk {version} after {received}", remedy="push chunks in order"
            )
        change = self._slot_change(version, delta)
        after = self._slots_used + change
        if bool((after > self._slots).any()):
            group = int(np.argmax(after - self._slots))
            raise ChunkRefusedError(
                f"rank {self._rank}: chunk {version} needs {int(after[group])} replica slots in dim-group {group}, "
                f"there are {int(self._slots[group])}",
                remedy="plan with the replica slots of the rank's hello",
            )
        self._check_start(version, delta, waiting)
        with self._changed:
            self._slots_used = after
            self._chunks.append(_Chunk(version, delta, change, delta.digest_change()))
            self._received_version = version

    def prepare_next(self) -> bool:
        """Prepare the next chunk if one waits and there is room; True if there was.

        Raises:
            ChunkRefusedError: it cannot be prepared, for whatever reason. It is dropped, with those after it.
        """
        with self._checking:
            return self._prepare_next()

    def _prepare_next(self) -> bool:
        with self._changed:
            waiting = list(self._chunks)
        ready = [chunk.prepared for chunk in waiting if chunk.prepared is not None]
        if len(ready) == len(waiting):
            return False
        if len(ready) >= PREPARED_CHUNKS and sum(made.nbytes for made in ready) + ready[-1].nbytes > PREPARED_BYTES:
            return False
        chunk = waiting[len(ready)]
        # A chunk that is applied meanwhile leaves what was prepared for it, so either is a valid base.
        try:
            prepared = self._prepare(chunk.delta, ready[-1] if ready else None)
        except Exception as error:
            # No peer counts on it, nor on those after it: only prepared ones are announced.
            with self._changed:
                self._drop_after(chunk.version - 1)
            raise cannot_prepare(self._rank, chunk.version, error) from error
        with self._changed:
            chunk.prepared = prepared
            self._prepared_version = chunk.version
        return True

    def regroup(
        self,
        homes: Homes,
        replica_slots: tuple[int, ...],
        matches_applied: Callable[[Int64Array, UInt8Array], BoolArray],
        prepare: Prepare,
        applied_rows: Callable[[], tuple[Int64Array, UInt8Array]],
    ) -> None:
        """Go on with the same rows in other dim-groups, on every rank between two exchanges. Versions stay, and chunks
        that were prepared are prepared anew.

        Args:
            homes, replica_slots, matches_applied, prepare: as of the constructor.
            applied_rows: returns (int64 [n] keys, uint8 [n] tiers) of the rows that this rank lists.

        Raises:
            Exception: a chunk that all ranks will apply cannot be prepared.
        """
        with self._checking:
            keys, tiers = applied_rows()
            with self._changed:
                self._homes, self._matches_applied, self._prepare = homes, matches_applied, prepare
                self._slots = np.array(replica_slots, dtype=np.int64)
                self._slots_used = self._count(keys, homes.holds_replica(self._rank, keys, tiers).astype(np.int64))
                before = [chunk for chunk in self._chunks if chunk.prepared is not None]
                for chunk in self._chunks:
                    chunk.slot_change, chunk.prepared = self._slot_change(chunk.version, chunk.delta), None
                    self._slots_used = self._slots_used + chunk.slot_change
                self._prepared_version = self.applied_version
            try:
                for _ in before:
                    self._prepare_next()
            except ChunkRefusedError as error:  # dropped; the daemon pushes it again
                if error.version <= self.agreed_version:
                    raise
        self.on_change()

    def settle(self, timeout_seconds: float) -> tuple[int, int]:
        """Drop the chunks that are not agreed; return (agreed version, digest of the placement at it).

        Raises:
            ControlError: the training step that is exchanging right now did not finish it within the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_exchange, timeout_seconds):
                raise ControlError(
                    f"rank {self._rank}: the running step has not finished its exchange in {timeout_seconds:g} s",
                    remedy="the channel is joined again once training moves on",
                )
            self._drop_after(self.agreed_version)
            self._prepared_version = self.agreed_version
            return self.agreed_version, self._agreed_digest

    def _drop_after(self, version: int) -> None:
        while self._chunks and self._chunks[-1].version > version:
            self._slots_used = self._slots_used - self._chunks.pop().slot_change
        self._received_version = version

    def begin_exchange(self) -> int:
        """Return the version to send to the peers. Every call is followed by ``end_exchange``."""
        with self._changed:
            self._in_exchange = True
            return self._prepared_version

    def end_exchange(self, lowest_version: int) -> None:
        """Agree on ``lowest_version``, the minimum over all ranks of what ``begin_exchange`` returned there."""
        with self._changed:
            for chunk in self._chunks:
                if self.agreed_version < chunk.version <= lowest_version:
                    self._agreed_digest = (self._agreed_digest + chunk.digest_change) % 2**64
            agreed = lowest_version > self.agreed_version
            self.agreed_version = max(self.agreed_version, lowest_version)
            self._in_exchange = False
            self._changed.notify_all()
        if agreed:
            self.on_change()

    def poll_agreed(self, max_bytes: int, bytes_of: Callable[[Delta], int]) -> list[AgreedChunk]:
        """Return agreed chunks not returned yet, in order, up to ``max_bytes`` of row copies (but at least one).

        All ranks get the same chunks at the same step: the agreed version and ``bytes_of`` are equal everywhere.
        """
        chunks: list[AgreedChunk] = []
        spent = 0
        with self._changed:
            for chunk in self._chunks:
                if not self._polled_version < chunk.version <= self.agreed_version or chunk.prepared is None:
                    continue
                cost = bytes_of(chunk.delta)
                if chunks and spent + cost > max_bytes:
                    break
                spent += cost
                chunks.append((chunk.version, chunk.delta, chunk.prepared))
                self._polled_version = chunk.version
        return chunks

    def applied(self, version: int) -> None:
        """Record that the training thread has applied the chunks up to ``version``."""
        with self._changed:
            self.applied_version = version
            # ``offer`` reads the applied placement with these chunks on top, applied or not, so they stay until now.
            while self._chunks and self._chunks[0].version <= version:
                self._chunks.popleft()
        self.on_change()

    def _check_start(self, version: int, delta: Delta, waiting: list[Delta]) -> None:
        """Raises ChunkRefusedError unless every row is at its old tier once the ``waiting`` chunks are applied."""
        right = np.empty(len(delta.keys), dtype=np.bool_)
        moved = np.concatenate([np.empty(0, np.int64), *(chunk.keys for chunk in waiting)])
        tiers = np.concatenate([np.empty(0, np.uint8), *(chunk.new_tiers for chunk in waiting)])
        order = np.argsort(moved, kind="stable")
        moved, tiers = moved[order], tiers[order]
        end = np.searchsorted(moved, delta.keys, side="right")
        again = end > np.searchsorted(moved, delta.keys, side="left")
        right[again] = tiers[end[again] - 1] == delta.old_tiers[again]
        right[~again] = self._matches_applied(delta.keys[~again], delta.old_tiers[~again])
        if not bool(right.all()):
            raise ChunkRefusedError(
                f"rank {self._rank}: {int((~right).sum())} of {len(delta)} rows of chunk {version} are not at the tier "
                f"that it states, key {int(delta.keys[~right][0])} for one",
                remedy="push deltas from the placement that the ranks agreed on",
            )

    def _slot_change(self, version: int, delta: Delta) -> Int64Array:
        """Return int64[groups]: replica slots used (or freed, negative) on this rank. Raises ChunkRefusedError."""
        keys, homes = delta.keys, self._homes
        total = homes.keyspace.total_rows
        fault, remedy = "", "a fault of the daemon: please report it with the daemon's journal"
        if len(keys) and (int(keys.min()) < 0 or int(keys.max()) >= total):
            fault, remedy = f"names keys outside 0..{total - 1}", "daemon and trainer must list the same tables"
        elif len(np.unique(keys)) != len(keys):
            fault = "names a row twice"
        elif len(keys) and max(int(delta.old_tiers.max()), int(delta.new_tiers.max())) > self._max_tier:
            fault = "names an unknown tier, or moves rows to a node that this job does not have"
        else:
            moved = is_rehomed(delta.new_tiers)
            if bool((homes.home_node(keys[moved]) == nodes_of_rehomed(delta.new_tiers[moved])).any()):
                fault = "moves rows to the nodes of their homes"
        if fault:
            raise ChunkRefusedError(f"rank {self._rank}: chunk {version} {fault}", remedy=remedy)
        before = homes.holds_replica(self._rank, keys, delta.old_tiers).astype(np.int64)
        after = homes.holds_replica(self._rank, keys, delta.new_tiers).astype(np.int64)
        return self._count(keys, after - before)

    def _count(self, keys: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return int64 [groups]: the sums of int64 [n] numbers of keys."""
        return np.bincount(self._homes.keyspace.group_of(keys), numbers, len(self._slots)).astype(np.int64)
