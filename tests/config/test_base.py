"""Parsing of addresses and hosts."""

from __future__ import annotations

import pytest

from flexd.config.base import is_loopback, split_address


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("[::1]", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


def test_split_address():
    assert split_address("0.0.0.0:9465") == ("0.0.0.0", 9465)
    assert split_address("[::]:1") == ("::", 1)
    for bad in ("", ":1", "h:", "h:x", "h:-1", "::1:5", "[]:1", "h:٣"):
        with pytest.raises(ValueError, match="must be"):
            split_address(bad)
