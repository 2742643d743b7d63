"""The gloo group of one epoch, which carries row lists: chunks to the ranks, listings to the daemon.

Only this module defines the transport of row lists. Every call returns or raises within a deadline and releases the
GIL while it waits. torch is imported where it is first needed: ingest does not wait for it.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexd.control.protocol.store_keys import Keys
from flexd.core.errors import ControlError
from flexd.core.fault_points import fault_point
from flexd.core.placement import Delta

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

MAX_ROWS = 2**26
"""Rows in one chunk or listing: bounds the memory that a message makes its receiver allocate."""


def rows_sha256(keys: Int64Array, tiers: UInt8Array) -> str:
    """Return the hex digest of int64[n] keys and uint8[m] tiers as they travel (little endian)."""
    digest = hashlib.sha256(keys.astype("<i8").tobytes())
    digest.update(tiers.tobytes())
    return digest.hexdigest()


def delta_tiers(delta: Delta) -> UInt8Array:
    """Return uint8[2n]: the old tiers, then the new tiers."""
    return np.concatenate([delta.old_tiers, delta.new_tiers]).astype(np.uint8)


class EpochGroup:
    """Ranks 0..W-1 and the daemon as rank W. Unusable after its first error.

    Args:
        address: this member's own address; its peers connect to it.

    Raises:
        RuntimeError: not all members joined within the deadline.
    """

    def __init__(
        self, store: Store, epoch: int, rank: int, world_size: int, address: str, timeout_seconds: float
    ) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._devices = [gloo.create_device(hostname=address)]
        self._daemon = world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group = gloo(PrefixStore(Keys.group(epoch), store), rank, world_size + 1, options)

    def broadcast(self, keys: Int64Array, tiers: UInt8Array) -> None:
        """Send to all ranks. Daemon only."""
        import torch

        self._broadcast(torch.from_numpy(keys.copy()))
        fault_point("chunk.half_sent")
        self._broadcast(torch.from_numpy(tiers.copy()))

    def receive(self, rows: int, tiers: int) -> tuple[Int64Array, UInt8Array]:
        """Receive what ``broadcast`` sent: int64[rows] and uint8[tiers]. Ranks only."""
        received = self._empty(rows, tiers)
        for tensor in received:
            self._broadcast(tensor)
        return received[0].numpy(), received[1].numpy()

    def send_to_daemon(self, keys: Int64Array, tiers: UInt8Array) -> None:
        """Send a listing. Ranks only."""
        import torch

        arrays: tuple[npt.NDArray[Any], ...] = (keys, tiers)
        for tag, array in enumerate(arrays):
            if len(array):
                self._group.send([torch.from_numpy(array.copy())], self._daemon, tag).wait(self._timeout)

    def receive_from(self, rank: int, rows: int, tiers: int) -> tuple[Int64Array, UInt8Array]:
        """Receive what ``send_to_daemon`` sent: int64[rows] and uint8[tiers]. Daemon only."""
        received = self._empty(rows, tiers)
        for tag, tensor in enumerate(received):
            if len(tensor):
                self._group.recv([tensor], rank, tag).wait(self._timeout)
        return received[0].numpy(), received[1].numpy()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        from torch.distributed import BroadcastOptions

        if not len(tensor):
            return
        options = BroadcastOptions()
        options.rootRank = self._daemon
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)

    @staticmethod
    def _empty(rows: int, tiers: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if not 0 <= rows <= MAX_ROWS or not 0 <= tiers <= 2 * MAX_ROWS:
            raise ControlError(f"{rows} rows in one message", remedy=f"at most {MAX_ROWS}")
        return torch.empty(rows, dtype=torch.int64), torch.empty(tiers, dtype=torch.uint8)
