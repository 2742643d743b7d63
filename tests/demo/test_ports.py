"""Ports for processes that are about to start."""

from __future__ import annotations

import socket

import pytest

from flexd.demo import ports
from flexd.demo.ports import free_ports


def test_they_differ_are_free_and_no_outgoing_connection_gets_one() -> None:
    found = free_ports(50)
    assert len(set(found)) == 50
    assert max(found) < 32_768
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port, first, second = free_ports(3)
        taken.bind(("127.0.0.1", port))
        drawn = iter([port, port, first, first, second])
        monkeypatch.setattr(ports.secrets, "randbelow", lambda _: next(drawn) - ports._LOWEST)
        assert free_ports(2) == [first, second]
        monkeypatch.setattr(ports.secrets, "randbelow", lambda _: port - ports._LOWEST)
        with pytest.raises(OSError, match="no 1 free ports"):
            free_ports(1)
