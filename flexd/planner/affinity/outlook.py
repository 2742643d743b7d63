"""What homes and dealing by affinity would win, in numbers and sentences."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.core import units
from flexd.planner.affinity.streaming import MIN_BATCHES, AffinityPlan, ShareRange
from flexd.planner.affinity.traffic import MIN_SAVING

WITHOUT_MOVES = (
    "With rows where they are, a loader that deals would leave {share} of the bytes (flexd.affinity.NodeSampler)."
)

BY_USER = "With each user's samples in her node (flexd affinity users -o FILE.npz) {share} would be left."


@dataclass(frozen=True)
class AffinityOutlook:
    """Affinity of one window of sampled accesses. Bytes and seconds are between nodes, of one step.

    Attributes:
        samples: sampled.
        batches, batch_samples: whole batches among them, and the samples of one.
        moved_rows, move_bytes: rows that would live elsewhere than by rule, and the bytes of moving them once.
        loader: share of the chain's bytes that would be left, with samples dealt by the loader; None if there are too
            few samples.
        dealing_loader: the same with rows where their rule puts them.
        chain_bytes: of the whole job, rows and gradients by the sampled tables.
        saved_seconds_loader: transfer time of a rank less, hidden or not; None if no prices are known.
        pays_loader: whether it saves at least ``MIN_SAVING`` and something in the worst twentieth.
        users: users whose node is known.
        by_user: share left with each user's samples in her node; None without ids of users.
        learning: whether homes are being learnt for the first time; the other values say nothing then.
    """

    samples: int
    batches: int
    batch_samples: int
    moved_rows: int
    move_bytes: float
    loader: ShareRange | None
    dealing_loader: ShareRange | None
    chain_bytes: float | None
    saved_seconds_loader: float | None
    pays_loader: bool
    users: int
    by_user: ShareRange | None = None
    learning: bool = False

    @classmethod
    def first(cls) -> AffinityOutlook:
        """Return the outlook while homes are learnt for the first time."""
        return cls(0, 0, 0, 0, 0.0, None, None, None, None, False, 0, learning=True)

    @classmethod
    def of(cls, plan: AffinityPlan, samples: int, chain_seconds: float | None = None) -> AffinityOutlook:
        """Return the outlook of a plan.

        Args:
            samples: sampled ones.
            chain_seconds: transfer time between nodes of a rank's exchange in a step of the chain, by the prices.
        """
        chain, _ = plan.bytes_per_step()
        return cls(
            samples, plan.batches, plan.batch_samples, plan.moved_rows, plan.move_bytes, plan.loader,
            plan.dealing_loader, None if plan.traffic is None else chain, _saved(plan.loader, chain_seconds),
            plan.pays(), 0 if plan.users is None else len(plan.users.ids), plan.by_user,
        )  # fmt: skip

    @property
    def messages(self) -> tuple[str, ...]:
        """The outlook in sentences, the verdict first."""
        if self.learning:
            return ("Homes by affinity are being learnt for the first time: the next plan says what they would win.",)
        by_user = () if self.by_user is None else (BY_USER.format(share=_share(self.by_user)),)
        return (*self._verdict, *by_user)

    @property
    def _verdict(self) -> tuple[str, ...]:
        if self.loader is None or self.dealing_loader is None:
            needed = MIN_BATCHES * self.batch_samples
            return (
                f"Affinity is not known: {units.count(self.samples)} samples are held, at least {units.count(needed)} "
                f"({MIN_BATCHES} global batches) are needed. Send sequence_lengths, or raise "
                "sketch.coaccess_memory_bytes.",
            )
        if not self.pays_loader:
            return (
                f"No gain expected: with homes by affinity and a loader that deals {_share(self.loader)} of the bytes "
                f"between nodes would be left; at least {units.share(MIN_SAVING)} less are asked for.",
            )
        said = [
            f"With homes by affinity and a loader that deals {_share(self.loader)} of the bytes between nodes would be "
            "left."
        ]
        if self.saved_seconds_loader is not None:
            said.append(
                f"By the prices that is {units.seconds(max(0.0, self.saved_seconds_loader))} of transfer a step less, "
                "of which compute may hide a part."
            )
        without = WITHOUT_MOVES.format(share=_share(self.dealing_loader))
        if self.dealing_loader.expected - self.loader.expected < MIN_SAVING:
            return (*said, "Moving homes wins nothing beside dealing here.", without)
        said.append(
            f"{units.count(self.moved_rows)} rows would live in another node than by their rule; moving them sends "
            f"{units.size(self.move_bytes)} once. planner.moved_slots_share lets the daemon move them."
        )
        return (*said, without)


def _saved(share: ShareRange | None, chain_seconds: float | None) -> float | None:
    return None if share is None or chain_seconds is None else (1 - share.expected) * chain_seconds


def _share(found: ShareRange) -> str:
    return f"{units.share(found.expected)} ({units.share(found.low)} to {units.share(found.high)})"
