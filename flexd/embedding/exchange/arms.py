"""Arms: settings of a step that leave training exact, or that the user allows; how ranks agree on another."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexd.core.errors import EmbeddingError
from flexd.core.step_phases import ExchangeReason
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.process_groups import ChainGroups

DEEP_PREFETCH = 4
PREFETCHES = (0, 1, DEEP_PREFETCH)


@dataclass(frozen=True)
class Arm:
    """One choice of these settings.

    Attributes:
        exchange: "chain" or "direct".
        prefetch: batches that a loop of ``flexd.prefetch`` announces ahead: 0, 1, or with tiered storage
            ``DEEP_PREFETCH``; the rows of the first are exchanged ahead.
        wire: dtype of rows and gradients on the wire; empty: each table's own.
    """

    exchange: str
    prefetch: int = 0
    wire: str = ""

    def __str__(self) -> str:
        ahead = " with prefetch" * (self.prefetch > 0) + f" of {self.prefetch}" * (self.prefetch > 1)
        return f"{self.exchange}{ahead} in {self.wire}" if self.wire else f"{self.exchange}{ahead}"


def arms_of(wires: Sequence[str]) -> tuple[Arm, ...]:
    exchanges = ("chain", "direct")
    return tuple(Arm(exchange, ahead, wire) for wire in wires for ahead in PREFETCHES for exchange in exchanges)


def wires_of(comm_dtype: str | Sequence[str | None] | None) -> tuple[str, ...]:
    """Return the wires to choose from, as in ``Arm``. Raises EmbeddingError: an unknown dtype, none, or one twice."""
    given = [comm_dtype] if comm_dtype is None or isinstance(comm_dtype, str) else list(comm_dtype)
    if not given or len({*given}) < len(given) or not {*given} <= {None, "float32", "float16", "bfloat16"}:
        raise EmbeddingError(
            f"comm_dtype {comm_dtype!r}", remedy="one of float32, float16, bfloat16, or None; or several to choose from"
        )
    return tuple(each or "" for each in given)


# Proposals of a job times arms that the message of sizes has room for.
_PROPOSAL_VALUES = 2**19


class AgreedArm:
    """The arm in use, and the one that all ranks have agreed to use next.

    Proposals are numbered and travel with the sizes of every look-up, combined by maximum: after a look-up all ranks
    know the newest one. They change the exchange before the next look-up that no route or gradient of an earlier one
    depends on, and the prefetch pipeline with the next batch that is announced.

    Args:
        wires: dtypes to choose from, as in ``Arm``; the first one is used until ranks have agreed on any.
    """

    def __init__(self, exchange: str, reason: ExchangeReason | None = None, wires: Sequence[str] = ("",)) -> None:
        self.exchange, self.wire = exchange, wires[0]
        """The exchange and wire in use."""
        self.arms = arms_of(wires)
        self.prefetches = 0
        """Batches that a loop announces ahead, as in ``Arm``; 0 if the newest one is not located ahead."""
        self.reason = reason
        """Why it is used; None on a rank that follows the proposals of others."""
        self._start = Arm(exchange, 1, wires[0])
        self._proposed = self._agreed = 0

    @property
    def in_use(self) -> Arm:
        return Arm(self.exchange, self.prefetches, self.wire)

    @property
    def proposed(self) -> int:
        """The newest proposal that this rank knows, to send with a look-up."""
        return max(self._proposed, self._agreed)

    @property
    def newest(self) -> Arm:
        """The arm of the newest proposal that this rank knows."""
        return self.arms[self.proposed % len(self.arms)] if self.proposed else self._start

    def propose(self, arm: Arm) -> None:
        """Propose an arm to all ranks, unless too many proposals were made. Of proposals in the same look-up, the last
        one of ``arms`` is taken."""
        number = self.proposed // len(self.arms) + 1
        if (number + 1) * len(self.arms) <= _PROPOSAL_VALUES:
            self._proposed = number * len(self.arms) + self.arms.index(arm)

    def agreed(self, proposal: int) -> None:
        """Set the highest proposal of all ranks."""
        self._agreed = max(self._agreed, proposal)

    @property
    def due(self) -> bool:
        """True if ranks have agreed on another exchange or wire than those in use. Equal on all ranks."""
        return (self.next.exchange, self.next.wire) != (self.exchange, self.wire)

    @property
    def next(self) -> Arm:
        """The agreed arm; a loop prefetches until ranks have agreed on any."""
        return self.arms[self._agreed % len(self.arms)] if self._agreed else self._start


def hops_of(exchange: str, groups: ChainGroups) -> list[Hop]:
    """Return the hops of requests for rows: with "chain" inside the node to the node owner, then over the rail. Bags
    that are pooled at the owner take them from the last to the first.

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
