"""The hops of each exchange: for rows by their homes, and for the ids of bags that are answered by sums."""

from __future__ import annotations

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups


def row_hops(exchange: str, groups: ChainGroups, replica_sums: str) -> list[Hop]:
    """Return the hops of requests for rows: with "chain" inside the node to the node owner, then over the rail.

    Raises:
        EmbeddingError: an unknown exchange, or an unknown way to sum gradients of copies.
    """
    if replica_sums not in ("all_reduce", "home"):
        raise EmbeddingError(f"replica_sums {replica_sums!r}", remedy="one of all_reduce, home")
    local_ranks = groups.layout.local_ranks
    if exchange == "chain":
        hops = [
            Hop(groups.node, lambda homes: homes % local_ranks),
            Hop(groups.rail, lambda homes: homes // local_ranks, all_reduces=replica_sums == "all_reduce"),
        ]
    elif exchange in ("direct", "direct_no_dedup"):
        hops = [Hop(groups.world, lambda homes: homes)]
    else:
        raise EmbeddingError(f"exchange {exchange!r}", remedy="one of auto, chain, direct, direct_no_dedup")
    return [hop for hop in hops if hop.peers.size > 1]


def bag_hops(exchange: str, groups: ChainGroups) -> list[Hop]:
    """Return the hops of bags that are answered by sums: with "chain" over the rail first, so that the sums of a node
    are added before they leave it, then inside the node of the homes."""
    local_ranks = groups.layout.local_ranks
    if exchange == "chain":
        hops = [
            Hop(groups.rail, lambda homes: homes // local_ranks),
            Hop(groups.node, lambda homes: homes % local_ranks),
        ]
    else:
        hops = [Hop(groups.world, lambda homes: homes)]
    return [hop for hop in hops if hop.peers.size > 1]
