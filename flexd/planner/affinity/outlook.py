"""Say in sentences what homes and dealing by affinity would win."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.core import units
from flexd.planner.affinity.streaming import MIN_BATCHES, AffinityForecast, AffinityPlan
from flexd.planner.affinity.traffic import MIN_SAVING
from flexd.planner.model.cost import PredictedRange

WITHOUT_MOVES = (
    "With rows where they are, a loader that deals would leave {share} of the bytes (flexd.affinity.NodeSampler)."
)

BY_USER = "With each user's samples in her node (flexd affinity users -o FILE.npz) {share} would be left."


@dataclass(frozen=True)
class AffinityOutlook:
    """Affinity of one window of sampled accesses.

    Attributes:
        messages: the outlook in sentences, the verdict first.
    """

    messages: tuple[str, ...]
    forecast: AffinityForecast

    @classmethod
    def first(cls) -> AffinityOutlook:
        """Return the outlook while homes are learnt for the first time."""
        message = "Homes by affinity are being learnt for the first time: the next plan says what they would win."
        return cls((message,), AffinityForecast())

    @classmethod
    def of(cls, plan: AffinityPlan, samples: int, chain_seconds: float | None = None) -> AffinityOutlook:
        """Return the outlook of a plan.

        Args:
            samples: sampled ones.
            chain_seconds: transfer time between nodes of a rank's exchange in a step of the chain, by the prices.
        """
        forecast, by_user = plan.forecast, plan.forecast.by_user
        more = () if by_user is None else (BY_USER.format(share=_share(by_user)),)
        return cls((*_verdict(forecast, samples, MIN_BATCHES * plan.batch_samples, chain_seconds), *more), forecast)


def _verdict(forecast: AffinityForecast, samples: int, needed: int, chain_seconds: float | None) -> tuple[str, ...]:
    loader, dealing = forecast.loader, forecast.dealing_loader
    if loader is None or dealing is None:
        return (
            f"Affinity is not known: {units.count(samples)} samples are held, at least {units.count(needed)} "
            f"({MIN_BATCHES} global batches) are needed. Send sequence_lengths, or raise sketch.coaccess_memory_bytes.",
        )
    if not forecast.pays:
        return (
            f"No gain expected: with homes by affinity and a loader that deals {_share(loader)} of the bytes between "
            f"nodes would be left; at least {units.share(MIN_SAVING)} less are asked for.",
        )
    said = [
        f"With homes by affinity and a loader that deals {_share(loader)} of the bytes between nodes would be left."
    ]
    if chain_seconds is not None:
        saved = max(0.0, (1 - loader.expected) * chain_seconds)
        said.append(
            f"By the prices that is {units.seconds(saved)} of transfer a step less, of which compute may hide a part."
        )
    without = WITHOUT_MOVES.format(share=_share(dealing))
    if not forecast.moves_pay:
        return (*said, "Moving homes wins nothing beside dealing here.", without)
    said.append(
        f"{units.count(forecast.rehomed_rows)} rows would live in another node than by their rule; moving them sends "
        f"{units.size(forecast.move_bytes)} once. planner.rehomed_slots_share lets the daemon move them."
    )
    return (*said, without)


def _share(found: PredictedRange) -> str:
    return f"{units.share(found.expected)} ({units.share(found.low)} to {units.share(found.high)})"
