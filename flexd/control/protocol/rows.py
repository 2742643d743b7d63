"""Lists of rows as bytes: chunks on their way to the ranks, listings on their way to the daemon.

The body of a list is int64[n] keys (little endian), then uint8[k n] tiers. It travels in pieces of ``PIECE_BYTES``: the
first as the body of the message that announces the list with its digest, each further one with a message of its own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexd.core.errors import AuthenticationError, ControlError
from flexd.core.placement import Delta

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
Bytes = bytes | memoryview

PIECE_BYTES = 2**20
"""Bytes of every piece of a list but the last."""
MAX_ROWS = 2**26
"""Rows in one chunk or listing: bounds the memory that a message makes its receiver allocate."""


def rows_body(keys: Int64Array, tiers: UInt8Array) -> bytes:
    """Return int64[n] keys and uint8[m] tiers as they travel."""
    return keys.astype("<i8").tobytes() + tiers.tobytes()


def delta_tiers(delta: Delta) -> UInt8Array:
    """Return uint8[2 n]: the old tiers, then the new tiers."""
    return np.concatenate([delta.old_tiers, delta.new_tiers]).astype(np.uint8)


def pieces_of(body: bytes) -> Sequence[Bytes]:
    """Cut a body into its pieces, at least one."""
    if len(body) <= PIECE_BYTES:
        return [body]
    view = memoryview(body)
    return [view[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]


class RowsAssembly:
    """Collects the pieces of one announced list; allocates only what has arrived.

    Args:
        rows: number of rows.
        tiers_per_row: 2 for a chunk (old and new tier), 1 for a listing.
        sha256: announced hex digest of the whole body.
        max_rows: a longer list is refused.

    Raises:
        ControlError: the announced number of rows is not possible.
    """

    def __init__(self, rows: int, tiers_per_row: int, sha256: str, max_rows: int = MAX_ROWS) -> None:
        if not 0 <= rows <= max_rows:
            raise ControlError(f"{rows} rows in one message", remedy=f"at most {max_rows}")
        self._rows = rows
        self._bytes = rows * (8 + tiers_per_row)
        self._sha256 = sha256
        self._pieces: list[Bytes] = []
        self._received = 0

    @property
    def next_piece(self) -> int:
        """Number of the piece that is expected next."""
        return len(self._pieces)

    @property
    def complete(self) -> bool:
        return bool(self._pieces) and self._received == self._bytes

    def add(self, data: Bytes) -> bool:
        """Add the next piece; True if it was the last. Raises ControlError: it is not as long as it must be."""
        if len(data) != min(PIECE_BYTES, self._bytes - self._received) or self.complete:
            raise ControlError(
                f"piece {len(self._pieces)} of a list of {self._rows} rows has {len(data)} bytes",
                remedy="run versions of flexd that work together",
            )
        self._pieces.append(data)
        self._received += len(data)
        return self.complete

    def rows(self) -> tuple[Int64Array, UInt8Array]:
        """Return int64[rows] keys and uint8[tiers_per_row * rows] tiers of a complete list.

        Raises:
            AuthenticationError: the bytes are not those that were announced.
        """
        body = bytes(self._pieces[0]) if len(self._pieces) == 1 else b"".join(self._pieces)
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), self._sha256):
            raise AuthenticationError(
                f"the {self._rows} rows received are not the rows announced",
                remedy="look for a fault of the memory or of the program that sent them",
            )
        keys = np.frombuffer(body, "<i8", self._rows).astype(np.int64)
        return keys, np.frombuffer(body, np.uint8, offset=8 * self._rows).copy()
