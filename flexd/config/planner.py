"""When and how to plan, and the cluster that prices the plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

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


class PlannerConfig(Section):
    """When and how to plan."""

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
