"""Search for the leading daemon: several addresses, and the highest term received."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import replace
from typing import NamedTuple

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.messages import DaemonNotice
from flexd.control.protocol.network import parse_address
from flexd.core.errors import ControlError, StaleMessageError

MAX_ADDRESSES = 16


def parse_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """Parse ``host:port``, several separated by commas. Raises ControlError."""
    found = tuple(dict.fromkeys(parse_address(part.strip()) for part in text.split(",")))
    if len(found) > MAX_ADDRESSES:
        raise ControlError(f"{len(found)} control addresses", remedy=f"give at most {MAX_ADDRESSES}")
    return found


class _Address(NamedTuple):
    """One address of a daemon, and the name that it was found under."""

    name: str
    host: str
    port: int


class Rendezvous:
    """Connects to one address after the other. Belongs to the agent's thread.

    Args:
        addresses: ``host:port``, several separated by commas. A name may resolve to several daemons (a headless
            service): each of its addresses is tried, and the name is resolved again after all of them.

    Raises:
        ControlError: an address is malformed.
    """

    def __init__(self, addresses: str, credentials: ChannelCredentials, timeout_seconds: float) -> None:
        self._named = parse_addresses(addresses)
        self._credentials = credentials
        self._timeout = timeout_seconds
        self._next: deque[_Address] = deque()
        self._highest_term = 0

    @property
    def tried_all(self) -> bool:
        """True if every address was tried since the names were resolved: a caller then waits before the next."""
        return not self._next

    def connect(self) -> ChannelClient:
        """Connect to the next address. Raises as ``ChannelClient.connect``."""
        if not self._next:
            self._next.extend(self._resolve())
        address = self._next.popleft()
        credentials = self._credentials
        if credentials.tls is not None and not credentials.tls.server_name:
            # The certificate has the name of the service, the connection goes to one of its addresses.
            credentials = replace(credentials, tls=replace(credentials.tls, server_name=address.name))
        return ChannelClient.connect(address.host, address.port, credentials, self._timeout)

    def check_term(self, notice: DaemonNotice) -> None:
        """Raises StaleMessageError if a later term has begun. A daemon without a lease (term 0) is accepted."""
        if 0 < notice.term < self._highest_term:
            raise StaleMessageError(
                f"a daemon of term {notice.term}, term {self._highest_term} has begun",
                remedy="another daemon leads; this one will end its epoch",
            )
        self._highest_term = max(self._highest_term, notice.term)

    def _resolve(self) -> list[_Address]:
        found: dict[tuple[str, int], _Address] = {}
        problem: OSError | None = None
        for host, port in self._named:
            try:
                for *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    found.setdefault((str(target[0]), port), _Address(host, str(target[0]), port))
            except OSError as error:
                problem = error
        if not found:
            names = ", ".join(f"{host}:{port}" for host, port in self._named)
            raise ControlError(f"no daemon at {names}: {problem}", remedy="check the name and the DNS") from problem
        return list(found.values())[:MAX_ADDRESSES]
