"""Somebody on the network between ranks and daemon, without the secret: repeats, mixes up, forges and replays bytes."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque
from collections.abc import Callable

from tests.support.tcp_cut import TcpCut

_KEPT_BYTES = 2**20
_FAULTS = 6
"""Segments that are changed before the link is honest again."""


class Vandal:
    """Changes what passes a link. ``listen`` first, then one of the others, then ``leave``."""

    def __init__(self, link: TcpCut, port: int, chance: random.Random) -> None:
        self._link = link
        self._port = port
        self._chance = chance
        self._kept: deque[bytes] = deque()
        self._left = 0
        self.heard = 0

    def listen(self) -> None:
        """Keep what ranks and daemon send each other, while it passes."""
        self._link.tamper = self._keep

    def leave(self) -> None:
        self._link.tamper = None

    def duplicate(self) -> None:
        """Some segments arrive three times."""
        self._change(lambda data: 3 * data)

    def reorder(self) -> None:
        """The halves of some segments are exchanged."""
        self._change(lambda data: data[len(data) // 2 :] + data[: len(data) // 2])

    def forge(self) -> None:
        """One bit of some segments is changed."""

        def flip(data: bytes) -> bytes:
            at = self._chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

        self._change(flip)

    def replay(self) -> None:
        """Send what was heard to the daemon again, on connections of its own, and into those of the ranks."""
        kept = list(self._kept)
        for _ in range(4):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5.0) as raw:
                for data in kept:
                    raw.sendall(data)
        self._change(lambda data: self._chance.choice(kept) if kept else data)

    def rubbish(self) -> None:
        """Connections that send what is no message at all."""
        for text in (b"", b"{}", b"[" * 5000, b"\x00\xff" * 100, b'{"kind":"hello"}', b"FLEXD\r\n" + bytes(300)):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5.0) as raw:
                raw.sendall(text)

    def _keep(self, data: bytes) -> bytes:
        self.heard += 1
        self._kept.append(data)
        while sum(map(len, self._kept)) > _KEPT_BYTES:
            self._kept.popleft()
        return data

    def _change(self, change: Callable[[bytes], bytes]) -> None:
        self._left = _FAULTS

        def tamper(data: bytes) -> bytes:
            self._left -= 1
            return change(data) if self._left >= 0 else data

        self._link.tamper = tamper
