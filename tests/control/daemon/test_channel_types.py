"""The stated bound of the channel's memory grows with what it admits."""

from __future__ import annotations

from flexd.control.daemon.channel_types import ChannelOptions


def test_a_connection_costs_what_the_documentation_of_max_ranks_says() -> None:
    none, one = ChannelOptions(max_peers=0), ChannelOptions(max_peers=1)
    for with_tls, each, rest in ((False, 48, 332), (True, 176, 460)):
        assert one.memory_bound_bytes(with_tls) - none.memory_bound_bytes(with_tls) == each * 1024
        assert -(-none.memory_bound_bytes(with_tls) // 2**20) == rest
