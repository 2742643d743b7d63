"""Addresses of the control channel."""

from __future__ import annotations

import pytest

from flexd.control.protocol.network import parse_address
from flexd.core.errors import ControlError


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ControlError, match="host:port"):
        parse_address(address)


def test_host_names_and_ipv6_addresses_are_parsed() -> None:
    assert parse_address("node-1:29400") == ("node-1", 29400)
    assert parse_address("[::1]:29400") == ("::1", 29400)
