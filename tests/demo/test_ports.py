"""Ports for processes that are about to start."""

from __future__ import annotations

import socket

from flexd.demo.ports import free_ports


def test_they_differ_are_free_and_no_outgoing_connection_gets_one() -> None:
    found = free_ports(50)
    assert len(set(found)) == 50
    assert max(found) < 32_768
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
