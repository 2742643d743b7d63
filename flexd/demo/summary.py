"""Figures of the demo from the records of ranks, daemon and reference. Bytes are counted, never computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from flexd.control.daemon.migration import MigrationRecord
from flexd.core import units
from flexd.core.model import HIDDEN, FiniteOrNone, Model, Show
from flexd.demo.setup import ExchangeStrategy, RunSetup
from flexd.operations.decisions import NAME, StateDatabase
from flexd.operations.history import MigrationHistory

Array = npt.NDArray[Any]
_MOST_PLANS = 1_000
TIMED = {
    "row_wise": "row-wise, no dedup (sharded modules today)",
    "chain": "two-hop chain",
    "default": "flexd, default settings: measured and chosen",
    "plans": "two-hop chain, the daemon's copies",
}
SENT = {
    "row_wise": TIMED["row_wise"],
    "row_wise_dedup": "row-wise, dedup",
    "before": "flexd before the first plan (two-hop chain)",
    "after": "flexd after the last plan",
}
_Title = Annotated[str, HIDDEN, Field(exclude=True)]
_Size = Annotated[float, Show(unit=units.size)]
_Ratio = Annotated[float, Show(unit="{:.2f}".format)]
_Milliseconds = Annotated[float, Show(unit="{:.1f}".format)]


class SentBytes(Model):
    """Bytes between nodes per step, of the whole job, by kind of traffic; counted where they are sent."""

    title: _Title
    all_to_all: _Size
    sync: _Size
    migration: _Size
    total: _Size
    of_row_wise: _Ratio


class Quartiles(Model):
    """Milliseconds of a step."""

    title: _Title
    p50: _Milliseconds
    p25: _Milliseconds
    p75: _Milliseconds
    of_row_wise: _Ratio


class StepTimes(Model):
    """Milliseconds of the run's steps, and of those of its last tenth with each exchange.

    Attributes:
        before_plan, after_plan: of the run with the daemon: in the median of the steps before its first plan, and of
            the last tenth.
        measured: the table of ``collection.tuning()`` at the end of the run with default settings, line by line.
    """

    p50: _Milliseconds
    before_plan: _Milliseconds
    after_plan: _Milliseconds
    strategies: dict[str, Quartiles]
    measured: Annotated[tuple[str, ...], Show("what default settings measured")] = ()


class LastPlan(Model):
    """The newest plan, and why it replicates what it does."""

    plan_id: str
    why: tuple[str, ...]


class DemoSummary(Model):
    """One run: what was trained, where, and on which samples; its losses, and the differences to a single process that
    trains on the same data in the same order; plans, step times and traffic."""

    trace: str
    ranks: int
    nodes: int
    local_ranks: int
    steps: int
    dtype: str
    batch_size: int
    micro_batches: int
    samples: str
    touches: Annotated[dict[str, FiniteOrNone], Show(unit="{:,.4g}".format)]
    link_mbit: float
    loss: dict[str, FiniteOrNone]
    replicas_bit_equal: bool
    placement_versions_equal: bool
    max_abs_difference_to_single_process: FiniteOrNone
    difference_to_single_process: Annotated[dict[str, FiniteOrNone], HIDDEN]
    stream_accesses_dropped: int
    plans: int
    migrated_rows: int
    placement_version: int
    tier_access_share: dict[str, float]
    compared_steps: Annotated[dict[str, tuple[int, int]], HIDDEN]
    step_ms: Annotated[StepTimes, Show("ms per step")]
    inter_node_bytes_per_step: Annotated[dict[str, SentBytes], Show("bytes between nodes per step, whole job")]
    last_plan: LastPlan | None


@dataclass(frozen=True)
class RunRecord:
    """One finished run.

    Attributes:
        ranks: each rank's arrays by name, one value per step.
        reference: the single-process training and the row-wise baselines.
        plans: the daemon's migrations that moved rows, in order.
        peers: each rank's arrays of the same steps without a daemon, by strategy; empty without an emulated link.
    """

    setup: RunSetup
    ranks: tuple[dict[str, Array], ...]
    reference: dict[str, Array]
    plans: tuple[MigrationRecord, ...]
    peers: dict[str, tuple[dict[str, Array], ...]] = field(default_factory=dict)

    @staticmethod
    def load(setup: RunSetup, reference: dict[str, Array], state: Path) -> RunRecord:
        def arrays(path: Path) -> dict[str, Array]:
            with np.load(path) as file:
                return {name: file[name] for name in file.files}

        def of_ranks(of_run: Path) -> tuple[dict[str, Array], ...]:
            return tuple(arrays(of_run / f"rank-{rank}.npz") for rank in range(setup.options.cluster.world_size))

        history = MigrationHistory(StateDatabase(state / NAME), _MOST_PLANS)
        peers = [setup.directory / strategy.value for strategy in ExchangeStrategy]
        return RunRecord(
            setup,
            of_ranks(setup.directory),
            reference,
            tuple(reversed(history.newest_moves(_MOST_PLANS))),
            {peer.name: of_ranks(peer) for peer in peers if peer.is_dir()},
        )

    def job_total(self, name: str) -> Array:
        """Return a traffic counter summed over ranks, one value per step."""
        total: Array = np.sum([rank[name] for rank in self.ranks], axis=0)
        return total

    def step_seconds(self) -> dict[str, Array]:
        """Return the wall time of each step by strategy, the mean over the ranks; empty without an emulated link."""
        if not self.peers:
            return {}
        runs = {**self.peers, ExchangeStrategy.PLANS.value: self.ranks}
        return {name: np.mean([rank["seconds"] for rank in ranks], axis=0) for name, ranks in runs.items()}

    def before_steps(self) -> slice:
        """Steps before the first replica, at most a tenth of the run."""
        version = self.ranks[0]["version"]
        first = int(np.argmax(version > 0)) if version.any() else len(version)
        return slice(0, max(1, min(first, self.setup.steps // 10)))

    def after_steps(self) -> slice:
        """The last tenth of the run."""
        return slice(self.setup.steps - max(1, self.setup.steps // 10), self.setup.steps)


def inter_node_bytes(record: RunRecord, steps: slice) -> dict[str, float]:
    """Return the bytes per step that the whole job sent between nodes, by kind."""
    parts = {
        kind: float(record.job_total(f"{kind}_inter_bytes")[steps].mean())
        for kind in ("all_to_all", "sync", "migration")
    }
    return {**parts, "total": sum(parts.values())}


def _row_wise(counted: Array, steps: slice) -> dict[str, float]:
    mean = float(counted[steps].mean())
    return {"all_to_all": mean, "sync": 0.0, "migration": 0.0, "total": mean}


def _difference(record: RunRecord, prefixes: tuple[str, ...]) -> float:
    first, reference = record.ranks[0], record.reference
    names = [name for name in reference if name.startswith(prefixes)]
    # numpy's maximum, unlike Python's, is NaN if any is: a run that diverged is not equal.
    return float(np.max([np.abs(first[name] - reference[name]).max() for name in names]))


def _losses(ranks: tuple[dict[str, Array], ...]) -> Array:
    return np.stack([rank["loss"] for rank in ranks], axis=1)


def _strategies(record: RunRecord, steps: slice) -> dict[str, Quartiles]:
    quartiles = {
        name: np.percentile(seconds[steps], [25, 50, 75]) * 1e3 for name, seconds in record.step_seconds().items()
    }
    return {
        name: Quartiles(title=TIMED[name], p25=low, p50=median, p75=high, of_row_wise=median / quartiles["row_wise"][1])
        for name, (low, median, high) in quartiles.items()
    }


def _median_ms(record: RunRecord, steps: slice) -> float:
    """Return the median of the steps of the run with the daemon; the first step makes the connections of its ranks."""
    begin = min(max(1, steps.start), steps.stop - 1)
    return float(np.median([rank["seconds"][begin : steps.stop] for rank in record.ranks])) * 1e3


def summarise(record: RunRecord) -> DemoSummary:
    """Return what ``flexd demo`` prints."""
    setup, options = record.setup, record.setup.options
    cluster, batches = options.cluster, options.batches
    before, after = record.before_steps(), record.after_steps()
    accesses = {tier: int(record.job_total(f"{tier}_accesses")[after].sum()) for tier in ("home", "node", "device")}
    losses = _losses(record.ranks)
    tenth = max(1, setup.steps // 10)
    traffic = {
        "row_wise": _row_wise(record.reference["row_wise"], after),
        "row_wise_dedup": _row_wise(record.reference["row_wise_dedup"], after),
        "before": inter_node_bytes(record, before),
        "after": inter_node_bytes(record, after),
    }
    differences: dict[str, float | None] = {
        "tables": _difference(record, ("table/",)),
        "dense": _difference(record, ("dense/",)),
        "losses": float(np.abs(losses - record.reference["loss"]).max()),
        **{
            f"losses_{name}": float(np.abs(_losses(ranks) - record.reference["loss"]).max())
            for name, ranks in record.peers.items()
        },
    }
    return DemoSummary(
        trace=setup.trace.name,
        ranks=cluster.world_size,
        nodes=cluster.nodes,
        local_ranks=cluster.local_ranks,
        steps=setup.steps,
        dtype=options.dtype,
        batch_size=batches.batch_size or 0,
        micro_batches=batches.micro_batches,
        samples=str(record.reference["samples"]),
        touches={
            name.removeprefix("touches/"): float(value)
            for name, value in record.reference.items()
            if name.startswith("touches/")
        },
        plans=sum(1 for plan in record.plans if plan.rows_applied),
        migrated_rows=sum(plan.rows_applied for plan in record.plans),
        last_plan=LastPlan.from_object(record.plans[-1]) if record.plans else None,
        placement_version=int(record.ranks[0]["version"][-1]),
        inter_node_bytes_per_step={
            name: SentBytes(title=SENT[name], of_row_wise=sent["total"] / traffic["row_wise"]["total"], **sent)
            for name, sent in traffic.items()
        },
        compared_steps={"before": (before.start, before.stop), "after": (after.start, after.stop)},
        tier_access_share={tier: count / max(1, sum(accesses.values())) for tier, count in accesses.items()},
        loss={"first": float(losses[:tenth].mean()), "last": float(losses[-tenth:].mean())},
        replicas_bit_equal=bool(all(rank["bit_equal"].all() for rank in record.ranks)),
        placement_versions_equal=bool(
            all(np.array_equal(rank["version"], record.ranks[0]["version"]) for rank in record.ranks)
        ),
        max_abs_difference_to_single_process=float(np.max(list(differences.values()))),
        difference_to_single_process=differences,
        link_mbit=cluster.link_mbit if cluster.has_link else 0.0,
        step_ms=StepTimes(
            p50=float(np.median([rank["seconds"][1:] for rank in record.ranks])) * 1e3,
            before_plan=_median_ms(record, before),
            after_plan=_median_ms(record, after),
            strategies=_strategies(record, after),
            measured=tuple(str(record.peers["default"][0]["tuning"]).splitlines()) if record.peers else (),
        ),
        stream_accesses_dropped=int(sum(rank["publisher_dropped"] for rank in record.ranks)),
    )
