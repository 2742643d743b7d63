"""Configuration of planning and of the cluster that prices the plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from flexd.config.base import Float, Int, Seconds, Section


class TopologyConfig(Section):
    """Bandwidths and latencies of the cluster. The numbers of nodes and ranks come from the ranks' hellos."""

    preset: str | None = None
    """A preset that ships with flexd (``flexd/topology/presets/``); ``azure-a100-200g`` if no file is given either."""
    file: Path | None = None
    """A topology file, as ``flexd probe`` writes it."""

    @field_validator("file")
    @classmethod
    def _one_of(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("preset") is not None:
            raise ValueError("give `preset` or `file`, not both")
        return value


class PinConfig(Section):
    """Rows with a fixed tier, whether it pays or not."""

    table: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the table."""
    tier: Literal["HOME", "NODE", "DEVICE"]
    """Tier of the rows: ``HOME`` (no further copy), ``NODE`` (a copy in every node), ``DEVICE`` (a copy on every
    rank)."""
    rows: Annotated[list[Int], Field(max_length=2**20)] | None = None
    """Row ids; default: the whole table."""


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _clock_time(value: Any) -> Any:
    """Convert minutes of the day to text: YAML reads 22:00 without quotes as a number of base 60."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 24 * 60:
        return f"{value // 60:02d}:{value % 60:02d}"
    return value


ClockTime = Annotated[str, BeforeValidator(_clock_time), Field(pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]


class WindowConfig(Section):
    """A period of some days of the week. Automatic migrations start only inside an ``allow`` window, if there is one,
    and never inside a ``forbid`` window. A migration that runs when a window ends continues. Requests of users are not
    restricted."""

    kind: Literal["allow", "forbid"] = "allow"
    """Automatic migrations are allowed or forbidden inside the window."""
    days: Annotated[list[Day], Field(min_length=1)] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
    """Days on which the window begins; default: every day."""
    start: ClockTime
    """Begin of the window, ``HH:MM`` in the time zone."""
    end: ClockTime
    """End of the window, ``HH:MM``, exclusive; ``24:00`` is midnight. An end before the start is on the next day."""
    time_zone: Annotated[str, Field(validate_default=True)] = "UTC"
    """IANA name, such as ``Europe/Berlin``. When clocks change, a skipped hour is in no window, and a repeated hour is
    in its window both times."""

    @field_validator("end")
    @classmethod
    def _has_a_length(cls, value: str, info: ValidationInfo) -> str:
        if value == info.data.get("start"):
            raise ValueError("equals the start; a whole day is 00:00 to 24:00")
        return value

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError("is not an IANA time zone of this machine (is the tzdata package installed?)") from error
        return value

    def day_numbers(self) -> tuple[int, ...]:
        """Return the days as numbers; 0 is Monday."""
        return tuple(DAYS.index(day) for day in self.days)


class MinSavingConfig(Section):
    """The smallest predicted saving of a step for which rows are moved; both bounds count. A plan below it is withheld:
    it is counted and reported, and nothing moves. Pins, excluded tables and replica slots that the live placement does
    not keep to are enforced in any case."""

    seconds: Annotated[Float, Field(ge=0)] = 1e-5
    """Exposed seconds per step. The default is about the latency of one collective: prices are not known more
    exactly."""
    share: Annotated[Float, Field(ge=0, lt=1)] = 0.002
    """Share of the measured step, as far as that is known. The default is what 10,000 steps can show, whose wall time
    has a standard deviation of 5 %, at two standard errors of the difference between two halves of them."""


class PlanGatesConfig(Section):
    """Conditions on a profile and a plan before rows are moved."""

    min_saving: MinSavingConfig = MinSavingConfig()
    """The smallest saving of a step for which rows are moved."""
    min_samples: Annotated[Int, Field(ge=0)] = 10_000
    """No plan is made from fewer accesses than this."""
    min_coverage: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """No plan is made from a profile that explains a smaller share of the accesses."""
    max_lag_messages: Annotated[Int, Field(ge=0)] = 1_000_000
    """No plan is made while more messages of the stream than this are not read yet."""


LEAST_VERIFY_STEPS = 256
"""16 blocks of 16 steps."""


class PlannerConfig(PlanGatesConfig):
    """Triggers, gates and options of planning."""

    auto: bool = True
    """Carry out automatic plans. With false they are only proposed: ``flexd describe plan latest`` shows a
    proposal, ``flexd apply PLAN_ID`` carries it out."""
    maintenance: Annotated[list[WindowConfig], Field(max_length=64)] = []
    """Windows in which automatic migrations may start; without any they may always start."""
    interval_seconds: Seconds = 300.0
    """Time between automatic plans."""
    min_spacing_seconds: Annotated[Float, Field(ge=0)] = 1.0
    """Least time between two attempts of automatic planning; it does not delay ``flexd replan``."""
    horizon_steps: Annotated[Float, Field(gt=0)] = 10_000
    """Steps over which a migration must pay for itself (hysteresis)."""
    batch_accesses_per_step: Annotated[Float, Field(gt=0)] | None = None
    """Accesses of the whole job per step, used until the ranks report their own."""
    drift_interval_seconds: Seconds = 60.0
    """Time between two measurements of drift (how much more the live placement costs than a plan made now); longer
    where a measurement takes more than 0.3 % of it."""
    drift_threshold: Annotated[Float, Field(gt=1)] | None = 1.01
    """A new plan is made when the exposed seconds of a step at the live placement exceed those of the plan that would
    be made now by this factor, and that plan saves at least ``planner.min_saving``; null plans at intervals only."""
    rehomed_slots_share: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of each rank's replica slots for rows that live in the node whose samples use them most, instead of in that
    of their home; copies have the others. It wins where a loader deals samples to nodes
    (``flexd.affinity.NodeSampler``), and needs ``sketch.coaccess_memory_bytes``. With 0 no row moves, and those that
    have moved come home."""
    exclude_tables: list[str] = []
    """Tables whose rows all stay at HOME."""
    verify_budget_steps: Annotated[Int, Field(ge=0)] = 2_000
    """Training steps after which the measurement of an executed plan ends, its migrations included. Every plan is
    measured in blocks of steps with and without its copies, in random order: one that is not shown to win is rolled
    back, one that takes copies back only if that is shown to lose. Plans with ``planner.pins`` are not measured; with
    0, none."""
    pins: list[PinConfig] = []
    """Rows or tables with a fixed tier. They get replica slots before all others; the last pin of a row counts."""

    @field_validator("verify_budget_steps")
    @classmethod
    def _allows_a_verdict(cls, value: int) -> int:
        if 0 < value < LEAST_VERIFY_STEPS:
            raise ValueError(
                f"is below {LEAST_VERIFY_STEPS} steps: no difference could be significant; 0 switches it off"
            )
        return value
