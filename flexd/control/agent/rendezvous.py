"""Where a rank finds the daemon that leads: several addresses, and the highest term it was told."""

from __future__ import annotations

import socket
from collections import deque

from flexd.control.protocol.messages import DaemonNotice
from flexd.control.protocol.network import parse_address
from flexd.control.protocol.store_client import StoreClient, StoreConnector
from flexd.core.errors import ControlError, StaleMessageError

MAX_ADDRESSES = 16


def parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """``host:port``, several separated by commas. Raises ControlError."""
    found = tuple(dict.fromkeys(parse_address(part.strip()) for part in text.split(",")))
    if len(found) > MAX_ADDRESSES:
        raise ControlError(f"{len(found)} control addresses", remedy=f"give at most {MAX_ADDRESSES}")
    return found


class Rendezvous:
    """For the agent's thread alone.

    Args:
        addresses: ``host:port``, several separated by commas. A name may stand for several daemons (a headless
            service): each of its addresses is tried, and the name is looked up again after all of them.

    Raises:
        ControlError: an address is malformed.
    """

    def __init__(self, addresses: str, job: str, timeout_seconds: float) -> None:
        self._named = parse_addresses(addresses)
        self._job = job
        self._timeout = timeout_seconds
        self._next: deque[tuple[str, int]] = deque()
        self._connectors: dict[tuple[str, int], StoreConnector] = {}
        self._highest_term = 0

    @property
    def tried_all(self) -> bool:
        """Whether every address was tried since the names were looked up: the time to wait a little."""
        return not self._next

    def connect(self) -> tuple[StoreClient, tuple[str, int]]:
        """A connection to the next address, and which that is. Raises ControlError: nobody there, or no answer."""
        if not self._next:
            self._next.extend(self._looked_up())
        address = self._next.popleft()
        connector = self._connectors.setdefault(address, StoreConnector(*address, self._job, self._timeout))
        return connector.connect(), address

    def follow(self, notice: DaemonNotice) -> None:
        """Raises StaleMessageError: its daemon was deposed. One without a lease (term 0) is believed: there is none
        beside it, or the configuration is wrong."""
        if 0 < notice.term < self._highest_term:
            raise StaleMessageError(
                f"a daemon of term {notice.term}, term {self._highest_term} has begun",
                remedy="another daemon leads; this one will notice",
            )
        self._highest_term = max(self._highest_term, notice.term)

    def _looked_up(self) -> list[tuple[str, int]]:
        found: dict[tuple[str, int], None] = {}
        problem: OSError | None = None
        for host, port in self._named:
            try:
                for *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    found[str(target[0]), port] = None
            except OSError as error:
                problem = error
        if not found:
            names = ", ".join(f"{host}:{port}" for host, port in self._named)
            raise ControlError(f"no daemon at {names}: {problem}", remedy="check the name and the DNS") from problem
        # What is left of connections to addresses that are no more is forgotten with them; pods come and go.
        self._connectors = {address: self._connectors[address] for address in found if address in self._connectors}
        return list(found)[:MAX_ADDRESSES]
