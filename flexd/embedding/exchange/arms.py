"""Arms: settings of a step that leave training exact, exchange and prefetch pipeline; how ranks agree on another."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.control.protocol.report import ExchangeReason
from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups


@dataclass(frozen=True)
class Arm:
    """One choice of these settings.

    Attributes:
        exchange: "chain" or "direct".
        prefetch: whether a loop of ``flexd.prefetch`` exchanges rows ahead.
    """

    exchange: str
    prefetch: bool = False

    def __str__(self) -> str:
        return f"{self.exchange} with prefetch" if self.prefetch else self.exchange


ARMS = tuple(Arm(exchange, prefetch) for prefetch in (False, True) for exchange in ("chain", "direct"))
_MAX_PROPOSALS = 2**17
"""Proposals of a job that the message of sizes has room for (19 bits with the arm)."""


class AgreedArm:
    """The arm in use, and the one that all ranks have agreed to use next.

    Proposals are numbered and travel with the sizes of every look-up, combined by maximum: after a look-up all ranks
    know the newest one. They change the exchange before the next look-up that no route or gradient of an earlier one
    depends on, and the prefetch pipeline with the next batch that is announced.
    """

    def __init__(self, exchange: str, reason: ExchangeReason | None = None) -> None:
        self.exchange = exchange
        """The exchange in use."""
        self.prefetches = False
        """True if the newest announced batch of a loop is located ahead."""
        self.reason = reason
        """Why it is used; None on a rank that follows the proposals of others."""
        self._start = Arm(exchange, prefetch=True)
        self._proposed = self._agreed = 0

    @property
    def in_use(self) -> Arm:
        return Arm(self.exchange, self.prefetches)

    @property
    def proposed(self) -> int:
        """The newest proposal that this rank knows, to send with a look-up."""
        return max(self._proposed, self._agreed)

    @property
    def newest(self) -> Arm:
        """The arm of the newest proposal that this rank knows."""
        return ARMS[self.proposed % len(ARMS)] if self.proposed else self._start

    def propose(self, arm: Arm) -> None:
        """Propose an arm to all ranks, unless too many proposals were made. Of proposals in the same look-up, the last
        one of ``ARMS`` is taken."""
        number = self.proposed // len(ARMS) + 1
        if number < _MAX_PROPOSALS:
            self._proposed = number * len(ARMS) + ARMS.index(arm)

    def agreed(self, proposal: int) -> None:
        """Set the highest proposal of all ranks."""
        self._agreed = max(self._agreed, proposal)

    @property
    def due(self) -> bool:
        """True if ranks have agreed on another exchange than the one in use. Equal on all ranks."""
        return self.next.exchange != self.exchange

    @property
    def next(self) -> Arm:
        """The agreed arm; a loop prefetches until ranks have agreed on any."""
        return ARMS[self._agreed % len(ARMS)] if self._agreed else self._start


def row_hops(exchange: str, groups: ChainGroups) -> list[Hop]:
    """Return the hops of requests for rows: with "chain" inside the node to the node owner, then over the rail.

    Raises:
        EmbeddingError: an unknown exchange.
    """
    local_ranks = groups.layout.local_ranks
    if exchange == "chain":
        hops = [
            Hop(groups.node, lambda homes: homes % local_ranks),
            Hop(groups.rail, lambda homes: homes // local_ranks, all_reduces=True),
        ]
    elif exchange == "direct":
        hops = [Hop(groups.world, lambda homes: homes)]
    else:
        raise EmbeddingError(f"exchange {exchange!r}", remedy="one of auto, chain, direct")
    return [hop for hop in hops if hop.peers.size > 1]


def bag_hops(exchange: str, groups: ChainGroups) -> list[Hop]:
    """Return the hops of bags pooled at the owner: with "chain" over the rail first, so that the sums of a node
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
