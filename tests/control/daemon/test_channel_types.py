"""The stated bound of the channel's memory grows with what it admits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.control.daemon.channel_types import TLS_BYTES, ChannelCounters, ChannelOptions


@pytest.mark.parametrize("name", ["max_unproven", "max_peers", "unread_bytes", "queued_bytes"])
def test_each_bound_raises_the_stated_memory(name: str) -> None:
    options = ChannelOptions()
    raised = replace(options, **{name: 2 * getattr(options, name)})
    assert raised.memory_bound_bytes() > options.memory_bound_bytes()


def test_a_connection_costs_what_the_documentation_of_max_ranks_says() -> None:
    none, one = ChannelOptions(max_peers=0), ChannelOptions(max_peers=1)
    for with_tls, each, rest in ((False, 48, 332), (True, 176, 460)):
        assert one.memory_bound_bytes(with_tls) - none.memory_bound_bytes(with_tls) == each * 1024
        assert -(-none.memory_bound_bytes(with_tls) // 2**20) == rest


def test_tls_costs_as_much_for_every_connection() -> None:
    options = ChannelOptions(max_unproven=3, max_peers=4)
    assert options.memory_bound_bytes(with_tls=True) - options.memory_bound_bytes() == 7 * TLS_BYTES


def test_counters_of_a_channel_that_is_not_up_are_zero() -> None:
    assert not any(bool(value) for value in vars(ChannelCounters()).values())
