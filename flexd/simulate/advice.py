"""Predict the step time of a training with each exchange that flexd offers, from one measured step time.

The step is taken apart into computing and the exchange of rows: ``computing = step - exchange``, where the exchange is
that of the strategy in use, counted on the given accesses and priced on the given cluster. Another strategy then takes
``computing + what of its exchange computing does not cover``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from flexd.core import units
from flexd.core.arrays import Float64Array
from flexd.core.errors import ConfigError
from flexd.core.keyspace import KeySpace
from flexd.core.model import HIDDEN, Model, Show
from flexd.core.placement import RankLayout
from flexd.core.stream_ids import IdsOfStream
from flexd.planner.affinity.outlook import AffinityOutlook, plan_affinity
from flexd.planner.affinity.window import sampled_window
from flexd.planner.model.cost import PredictedRange
from flexd.planner.model.prices import EXCHANGE_PHASES, TrafficPhase
from flexd.simulate.accesses import Accesses
from flexd.simulate.simulation import (
    DIRECT,
    REPLANNED,
    ROW_WISE,
    TWO_HOP,
    ReplayStrategy,
    Simulation,
    SimulationSettings,
    StrategyRun,
    simulate,
)
from flexd.simulate.summary import ReplayModel, compared_steps, replay_fields
from flexd.sketch.coaccess import NO_USER, CoAccess
from flexd.topology.cluster import INTER, Cluster

HOURS_PER_DAY = 24
STEP_PERCENTILES = (5, 95)
"""Of the steps' predicted savings; with the error of the prices they make the range of an answer."""
PIPELINE = "_prefetch_pipeline"
_hours = "{:.3g}".format


@dataclass(frozen=True)
class ExchangeOption:
    """A way to run the exchange.

    Attributes:
        name: key in the results.
        strategy: whose bytes it sends.
        prefetch_pipeline: rows that the step before does not touch are fetched during it (``flexd.prefetch``).
    """

    name: str
    title: str
    strategy: ReplayStrategy
    prefetch_pipeline: bool = False


OPTIONS = (
    ExchangeOption("row_wise", "row-wise, no dedup (TorchRec row-wise)", ROW_WISE),
    ExchangeOption("dedup", "dedup (exchange: direct)", DIRECT),
    ExchangeOption("two_hops", "two hops (exchange: chain)", TWO_HOP),
    ExchangeOption(f"dedup{PIPELINE}", "dedup, prefetch pipeline", DIRECT, True),
    ExchangeOption(f"two_hops{PIPELINE}", "two hops, prefetch pipeline", TWO_HOP, True),
    ExchangeOption("copies", "two hops, copies of hot rows", REPLANNED),
    ExchangeOption(f"copies{PIPELINE}", "two hops, copies, prefetch pipeline", REPLANNED, prefetch_pipeline=True),
)
NOW = {option.name: option for option in OPTIONS[:3]}
"""Exchanges that a training may use today."""


@dataclass(frozen=True)
class AdviceSettings:
    """The known figures of a training, and the bounds of an advice.

    Attributes:
        step_seconds: measured, with the exchange ``now``.
        computing_seconds: measured part of the step that is not exchange (the same step with rows that need none). The
            prices are then corrected by one factor, so that today's exchange takes the rest of the step. None: the
            step less today's exchange by the prices.
        row_work_seconds: of the computing, the look-up, dedup and update of rows. They are before, between and after
            the messages, so the prefetch pipeline hides nothing behind them.
        scale: bytes of a step of the job over those of the replay, for which the cluster is a scale model
            (``flexd.topology.files``). Larger batches share more rows than this allows for.
        price_error: the relative error of the cluster's prices, which widens the ranges.
        worth: see ``Advice``.

    Raises:
        ConfigError: a number is out of range.
    """

    step_seconds: float
    computing_seconds: float | None = None
    row_work_seconds: float = 0.0
    now: ExchangeOption = OPTIONS[0]
    scale: float = 1.0
    price_error: float = 0.15
    worth: float = 0.02

    def __post_init__(self) -> None:
        above_0 = math.ulp(0.0)
        for what, given, least, below, remedy in (
            ("step time", self.step_seconds, above_0, math.inf, "the measured time of a step, above 0"),
            (
                "computing",
                self.computing_seconds or 0.0,
                0.0,
                self.step_seconds,
                "a part of the step: at least 0, and less than it",
            ),
            ("row work", self.row_work_seconds, 0.0, self.step_seconds, "a part of the computing: at least 0"),
            ("scale", self.scale, above_0, math.inf, "a number above 0"),
            ("price error", self.price_error, 0.0, 1.0, "a share, 0 to 1"),
            ("worth", self.worth, 0.0, 1.0, "a share of the step, 0 to 1"),
        ):
            if not least <= given < below:
                raise ConfigError(f"{what} {given}", remedy=f"give {remedy}")


def in_range(form: Callable[[float], str]) -> Callable[[PredictedRange], str]:
    """Return the function to ``2 s (1 s to 3 s)``."""
    return lambda found: f"{form(found.expected)} ({form(found.low)} to {form(found.high)})"


_SHARE = Show(unit=in_range(units.share))


class Prediction(Model):
    """The time that an option takes, and saves against today's exchange.

    Attributes:
        step_seconds, saved_seconds: a step, and by how much less than today's.
        saved_share: of today's step.
        gpu_hours_per_day: that the whole job saves.
        inter_node_bytes: that the whole job sends between nodes in a step.
        extra_memory_bytes: of a rank: replica slots with optimizer state, and rows fetched ahead.
        pays: even the low end of the range saves time.
    """

    title: Annotated[str, HIDDEN]
    step_seconds: Annotated[PredictedRange, Show(unit=lambda found: units.seconds(found.expected))]
    saved_seconds: Annotated[PredictedRange, Show("saved per step", in_range(units.seconds))]
    saved_share: Annotated[PredictedRange, Show("of a step", lambda found: units.share(found.expected))]
    gpu_hours_per_day: Annotated[PredictedRange, Show("GPU-hours per day", lambda found: _hours(found.expected))]
    inter_node_bytes: Annotated[float, Show("bytes between nodes")]
    extra_memory_bytes: Annotated[int, Show("memory per rank")]
    pays: Annotated[bool, HIDDEN]


class AffinityAdvice(Model):
    """Shares of the bytes between nodes that homes and dealing by affinity would leave (``AffinityForecast``)."""

    messages: tuple[str, ...]
    loader: Annotated[PredictedRange | None, _SHARE] = None
    dealing_loader: Annotated[PredictedRange | None, _SHARE] = None
    placed: Annotated[PredictedRange | None, _SHARE] = None
    by_user: Annotated[PredictedRange | None, _SHARE] = None
    chain_bytes: float | None = None
    rehomed_rows: int = 0
    move_bytes: float = 0.0


class Advice(ReplayModel):
    """Answer to: is flexd worth it for this training.

    Attributes:
        now: the exchange of today.
        step_seconds: as measured today.
        exchange_seconds: of it the predicted exchange; more than ``step_seconds`` where the prices do not fit.
        price_correction: factor of the prices, from the measured computing; 1 without it.
        price_error: relative error of the prices.
        reused_share: share of a batch's distinct rows that the step before touches on any rank.
        worth: least share of the step that an option must save to be advised.
        options: by name, in the order of ``OPTIONS``.
        unbounded_ids: of the tables of such in a stream; their look-ups are priced as if hashed into the rows.
        best: the option whose low end saves most; None if none pays by ``worth``.
    """

    now: str
    step_seconds: float
    exchange_seconds: float
    price_correction: float
    reused_share: float
    price_error: float
    worth: Annotated[float, Show(unit=units.share)]
    options: Annotated[dict[str, Prediction], Show("predicted")]
    best: str | None
    affinity: AffinityAdvice | None = None
    unbounded_ids: Annotated[tuple[IdsOfStream, ...], Show("unbounded ids")] = ()

    @property
    def best_option(self) -> Prediction | None:
        return None if self.best is None else self.options[self.best]

    @property
    def prices_fit(self) -> bool:
        return self.exchange_seconds < self.step_seconds


def advise(
    accesses: Accesses,
    layout: RankLayout,
    cluster: Cluster,
    settings: SimulationSettings,
    given: AdviceSettings,
    progress: Callable[[int], None] | None = None,
) -> Advice:
    """Replay the accesses with every option and predict their step times.

    Raises:
        ConfigError: there are fewer than 4 steps, or there is one rank, which has nothing to exchange.
    """
    if layout.world_size == 1:
        raise ConfigError("one rank exchanges no rows", remedy="give the --nodes and --local-ranks of the job")
    strategies = (ROW_WISE, DIRECT, TWO_HOP, REPLANNED)
    simulation = simulate(accesses, layout, cluster, settings, strategies, progress)
    steps = compared_steps(accesses.steps)
    reused = reused_share(accesses, steps)
    model, now = _StepModel(simulation, steps, reused, given), given.now
    if given.computing_seconds is not None:
        correction = (given.step_seconds - given.computing_seconds) / float(model.exchange(now).mean())
        model = replace(model, correction=correction)
    options = {option.name: _predict(model, option) for option in OPTIONS if option != now}
    exchange_seconds = float(model.exchange(now).mean())
    candidates = options if exchange_seconds < given.step_seconds else {}
    worthwhile = [
        name for name in candidates if options[name].pays and options[name].saved_share.expected >= given.worth
    ]
    found = Advice.from_object(
        given,
        **replay_fields(simulation),
        now=now.name,
        exchange_seconds=exchange_seconds,
        price_correction=model.correction,
        reused_share=reused,
        options=options,
        best=max(worthwhile, key=lambda name: options[name].saved_seconds.low, default=None),
        messages=(),
        affinity=None,
        unbounded_ids=(),
    )
    return found.model_copy(update={"messages": tuple(_messages(found))})


def _messages(advice: Advice) -> list[str]:
    said = []
    best = advice.best_option
    if not advice.prices_fit:
        said.append(
            f"The prices do not fit: they give today's exchange {units.seconds(advice.exchange_seconds)}, more than "
            f"the whole step of {units.seconds(advice.step_seconds)}. Measure them with flexd probe, give "
            "--computing-ms, check --now and --scale; until then nothing is advised."
        )
    elif best is None:
        share = advice.exchange_seconds / advice.step_seconds
        said.append(
            f"No gain expected: no option saves {units.share(advice.worth)} of a step for certain. The exchange is "
            f"{units.seconds(advice.exchange_seconds)} ({units.share(share)}) of a step of "
            f"{units.seconds(advice.step_seconds)}."
        )
    else:
        said.append(
            f"Worth it: {best.title} takes {units.seconds(best.step_seconds.expected)} a step instead of "
            f"{units.seconds(advice.step_seconds)}, {in_range(units.share)(best.saved_share)} less, which is "
            f"{in_range(_hours)(best.gpu_hours_per_day)} GPU-hours per day for the job."
        )
        said.append(
            "There is nothing to configure: default settings measure direct and chain, with and without "
            "flexd.prefetch, in the job and keep the fastest."
        )
        pipeline = PIPELINE if str(advice.best).endswith(PIPELINE) else ""
        copies, plain = advice.options[f"copies{pipeline}"], advice.options.get(f"two_hops{pipeline}")
        if best is not copies and plain is not None:
            gain = plain.step_seconds.expected - copies.step_seconds.expected
            if gain < advice.worth * advice.step_seconds:
                said.append(
                    f"Copies of hot rows, which the daemon plans, {_change(gain)} beside the same without them: the "
                    "trainer's side alone does it here."
                )
    if advice.price_correction != 1.0:
        said.append(
            f"The prices were multiplied by {advice.price_correction:.2g}, so that today's exchange takes what "
            "computing leaves of the step. Far from 1 they do not describe this network: measure it with flexd probe."
        )
    said.append(
        f"Of a batch's rows {units.share(advice.reused_share)} were touched by the step before; the prefetch pipeline "
        "fetches the others beside computing. Ranges: steps that differ, and "
        f"prices wrong by {units.share(advice.price_error)}."
    )
    return said


def _change(seconds: float) -> str:
    if seconds == 0:
        return "change nothing"
    return f"save {units.seconds(seconds)} a step" if seconds > 0 else f"cost {units.seconds(-seconds)} a step"


def reused_share(accesses: Accesses, steps: slice, samples: int = 8) -> float:
    """Return the mean share of a rank's distinct rows in a pass that any rank touched in the step before it.

    Args:
        samples: pairs of steps that are looked at, spread over ``steps``.
    """
    shares = []
    for step in np.unique(np.linspace(max(1, steps.start), steps.stop - 1, samples).astype(np.int64)):
        # Rows change at the end of a step: only its first pass has to wait for any.
        before = np.unique(np.concatenate([mine for one in accesses.passes(int(step) - 1) for mine in one]))
        for mine in map(np.unique, accesses.passes(int(step))[0]):
            shares.append(np.isin(mine, before, assume_unique=True).mean() if len(mine) else 0.0)
    return float(np.mean(shares)) / accesses.micro_batches


@dataclass(frozen=True)
class _StepModel:
    """Step times of the options, by step of the replay."""

    simulation: Simulation
    steps: slice
    reused: float
    given: AdviceSettings
    correction: float = 1.0

    def seconds(self, option: ExchangeOption) -> Float64Array:
        """float64 [steps, phases]: of the job; latencies of a scale model are divided by the scale already."""
        return self.correction * self.given.scale * self.run(option).seconds[self.steps]

    def run(self, option: ExchangeOption) -> StrategyRun:
        return self.simulation.runs[option.strategy.name]

    def exchange(self, option: ExchangeOption) -> Float64Array:
        """float64 [steps]: seconds of the whole exchange, nothing hidden."""
        seconds: Float64Array = self.seconds(option).sum(axis=1)
        return seconds

    def step(self, option: ExchangeOption, price_factor: float) -> Float64Array:
        """float64 [steps]: predicted seconds of a step, where prices are so many times those of the cluster."""
        computing = self.given.computing_seconds
        if computing is None:
            computing = max(0.0, self.given.step_seconds - price_factor * float(self.exchange(self.given.now).mean()))
        exchange = price_factor * self.exchange(option)
        result: Float64Array = computing + exchange
        if option.prefetch_pipeline:
            parts = price_factor * self.seconds(option)
            ahead = (1 - self.reused) * parts[:, list(EXCHANGE_PHASES)].sum(axis=1)
            result -= np.minimum(ahead, max(0.0, computing - self.given.row_work_seconds))
        return result

    def today(self, price_factor: float) -> Float64Array:
        """float64 [steps]: today's steps, of which the mean is what was measured (if the prices fit)."""
        return self.step(self.given.now, price_factor)


def _predict(model: _StepModel, option: ExchangeOption) -> Prediction:
    expected = model.step(option, 1.0)
    saved = model.today(1.0) - expected
    saved_by_price = [
        model.today(1 + error) - model.step(option, 1 + error)
        for error in (-model.given.price_error, model.given.price_error)
    ]
    low = min(float(np.percentile(saved, STEP_PERCENTILES[0])), *(float(s.mean()) for s in saved_by_price))
    high = max(float(np.percentile(saved, STEP_PERCENTILES[1])), *(float(s.mean()) for s in saved_by_price))
    seconds = PredictedRange(float(saved.mean()), low, high)
    today = float(model.today(1.0).mean())
    share = seconds.scaled(1 / today)
    ranks = model.simulation.layout.world_size
    run = model.run(option)
    return Prediction(
        title=option.title,
        step_seconds=PredictedRange(today - seconds.expected, today - seconds.high, today - seconds.low),
        saved_seconds=seconds,
        saved_share=share,
        gpu_hours_per_day=share.scaled(HOURS_PER_DAY * ranks),
        inter_node_bytes=model.given.scale * float(run.sent[model.steps, :, :, INTER].sum(axis=(1, 2)).mean()),
        extra_memory_bytes=_extra_memory_bytes(model, option),
        pays=seconds.low > 0,
    )


def _extra_memory_bytes(model: _StepModel, option: ExchangeOption) -> int:
    simulation, total = model.simulation, 0
    groups = simulation.accesses.keyspace.groups
    if option.strategy is REPLANNED:
        slots = simulation.settings.slots(simulation.accesses.keyspace)
        for group, count in zip(groups, slots, strict=True):
            spec = simulation.accesses.keyspace.tables[group.tables[0]]
            total += count * (spec.row_bytes + spec.state_bytes)
    if option.prefetch_pipeline:
        # The rows that a rank receives forward wait a step longer: about as many bytes as it sends.
        forward = model.run(option).sent[model.steps, :, TrafficPhase.FORWARD_ROWS, :].sum(axis=2)
        total += int(model.given.scale * forward.max(initial=0))
    return total


MAX_STEPS = 64
"""Newest steps that are used: the daemon's sample remembers no longer than some half-lives either."""
HORIZON_STEPS = 1000.0
"""Steps over which a re-homed row must pay for its move."""


def affinity_of_trace(accesses: Accesses, layout: RankLayout) -> AffinityAdvice | None:
    """Return the outlook of a trace; None for accesses that are drawn row by row, and with one node.

    The newest quarter of the steps (at most eight) is judged by what those before it show, as the daemon does.
    """
    batches = accesses.batches
    if batches is None or layout.nodes < 2:
        return None
    first = max(0, batches.steps - MAX_STEPS)
    numbers, tables, rows = batches.samples_of(first, batches.steps)
    size = batches.samples_per_step
    # A part is the rows of one table in one sample.
    order = np.lexsort((tables, numbers))
    numbers, tables, rows = numbers[order], tables[order], rows[order]
    new = np.append(True, (np.diff(numbers) != 0) | (np.diff(tables) != 0)) if len(rows) else np.zeros(0, np.bool_)
    starts = np.flatnonzero(new)
    count = (batches.steps - first) * size
    sampled = CoAccess(
        tuple(spec.name for spec in accesses.keyspace.tables),
        numbers[starts], tables[starts], np.append(starts, len(rows)), rows, np.arange(count, dtype=np.float64),
        np.full(count, NO_USER),
    )  # fmt: skip
    window = sampled_window(sampled, accesses.keyspace, horizon_steps=HORIZON_STEPS, batch_samples=size)
    return _affinity(AffinityOutlook.of(plan_affinity(window, layout), count))


def affinity_of_samples(
    sampled: CoAccess, keyspace: KeySpace, layout: RankLayout, accesses_per_step: float
) -> AffinityAdvice | None:
    """Return the outlook of training samples of a stream; None with one node, or without any sample.

    Args:
        accesses_per_step: of the whole job.
    """
    if layout.nodes < 2 or not sampled.samples:
        return None
    window = sampled_window(sampled, keyspace, horizon_steps=HORIZON_STEPS, accesses_per_step=accesses_per_step)
    return _affinity(AffinityOutlook.of(plan_affinity(window, layout), sampled.samples))


def _affinity(outlook: AffinityOutlook) -> AffinityAdvice:
    return AffinityAdvice.from_object(outlook.forecast, messages=outlook.messages)
