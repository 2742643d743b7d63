"""When and how to plan, and the cluster that prices the plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from flexd.config.base import Float, Int, Seconds, Section


class TopologyConfig(Section):
    """Which cluster: bandwidths and latencies. Nodes and ranks come from the ranks' hellos."""

    preset: str | None = None
    """A preset that ships with flexd (``flexd/topology/presets/``); ``azure-a100-200g`` if no file is given either."""
    file: Path | None = None
    """A topology file."""

    @field_validator("file")
    @classmethod
    def _one_of(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("preset") is not None:
            raise ValueError("give `preset` or `file`, not both")
        return value


class PinConfig(Section):
    """Rows that keep one tier, whether it pays or not."""

    table: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the table."""
    tier: Literal["HOME", "NODE", "DEVICE"]
    """Where copies live: one, one in every node, one on every rank."""
    rows: Annotated[list[Int], Field(max_length=2**20)] | None = None
    """Row ids; the whole table if left out."""


DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _clock_time(value: Any) -> Any:
    """YAML reads 22:00 without quotes as a number of base 60, which is the minute of the day."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 24 * 60:
        return f"{value // 60:02d}:{value % 60:02d}"
    return value


ClockTime = Annotated[str, BeforeValidator(_clock_time), Field(pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]


class WindowConfig(Section):
    """A piece of some days of the week. Migrations that the daemon starts by itself begin inside an ``allow`` window
    only, if there is one, and never inside a ``forbid`` window. One that runs when a window ends goes on; what is asked
    for by hand is not bound."""

    kind: Literal["allow", "forbid"] = "allow"
    """Whether automatic migrations are allowed or forbidden inside."""
    days: Annotated[list[Day], Field(min_length=1)] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
    """On which it begins; every day if left out."""
    start: ClockTime
    """``HH:MM`` by the clock of the time zone."""
    end: ClockTime
    """``HH:MM``, not included; ``24:00`` is midnight. An end before the start is on the next day."""
    time_zone: Annotated[str, Field(validate_default=True)] = "UTC"
    """IANA name, such as ``Europe/Berlin``. An hour that is skipped when clocks change is in no window, one that is
    repeated is inside both times."""

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
            raise ValueError("is no IANA time zone that this machine knows (is the tzdata package there?)") from error
        return value

    def day_numbers(self) -> tuple[int, ...]:
        """0 is Monday."""
        return tuple(DAYS.index(day) for day in self.days)


class PlannerConfig(Section):
    """When and how to plan."""

    auto: bool = True
    """Carry out the plans that the daemon makes by itself. false: propose only; ``flexd plan latest`` shows what it
    would do, ``flexd apply PLAN_ID`` does it."""
    maintenance: Annotated[list[WindowConfig], Field(max_length=64)] = []
    """When the daemon may start migrations by itself; always if there is no window."""
    interval_seconds: Seconds = 300.0
    """Time between automatic plans."""
    min_spacing_seconds: Annotated[Float, Field(ge=0)] = 1.0
    """Least time between tries to plan that the daemon starts by itself; ``flexd replan`` does not wait for it."""
    horizon_steps: Annotated[Float, Field(gt=0)] = 10_000
    """Steps over which a migration must pay for itself (hysteresis)."""
    min_samples: Annotated[Int, Field(ge=0)] = 10_000
    """No plan is made from fewer accesses than this."""
    min_coverage: Annotated[Float, Field(ge=0, le=1)] = 0.5
    """No plan is made from a profile that explains a smaller share of the accesses."""
    min_window_seconds: Annotated[Float, Field(ge=0)] = 0.0
    """No plan is made from accesses that span less event time than this."""
    max_lag_messages: Annotated[Int, Field(ge=0)] = 1_000_000
    """No plan is made while more messages of the stream than this are not read yet."""
    max_sketch_error: Annotated[Float, Field(ge=0, le=1)] = 1.0
    """No plan is made from a profile whose listed rows have a larger error: the mean width of their bounds as a share
    of their accesses. Exact counters have none, logarithmic ones of 8 and 3 bits about 0.3 and 1, a count-min some
    hundredths. 1 refuses nothing."""
    max_proposal_age_seconds: Seconds = 3600.0
    """``flexd apply`` refuses a proposal that is older."""
    batch_accesses_per_step: Annotated[Float, Field(gt=0)] | None = None
    """Accesses of the whole job per step, used until the ranks report their own."""
    drift_interval_seconds: Seconds = 60.0
    """Time between two looks at how far the accesses have moved since the live plan was made; longer where a look takes
    more than a tenth of it."""
    drift_threshold: Annotated[Float, Field(gt=1)] | None = 1.05
    """A new plan is made when the live placement costs more than this many times what it cost when it was planned,
    in exposed seconds of a step; null plans at intervals only."""
    exchange: Literal["chain", "direct", "direct_no_dedup"] = "chain"
    """What the trainers gave ``EmbeddingCollection(exchange=...)``. A running job cannot change it; each plan says
    whether another would be cheaper."""
    micro_batches: Annotated[Int, Field(ge=1, le=4096)] = 1
    """Forward passes for each optimizer step: rows are looked up in each, replicas synchronised once."""
    comm_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """What the trainers gave ``EmbeddingCollection(comm_dtype=...)``; by default rows travel as they are stored."""
    frozen_tables: list[str] = []
    """Tables that are read only: they cost no backward pass and no synchronisation."""
    exclude_tables: list[str] = []
    """Tables whose rows all stay at HOME."""
    pins: list[PinConfig] = []
    """Rows or tables whose tier is fixed. They take replica slots before all others; a later pin of a row counts."""
    table_budgets: dict[str, Annotated[Int, Field(ge=0)]] = {}
    """Replica slots that the rows of a table may take on any one rank, by table."""
