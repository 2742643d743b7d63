"""Tables, hot rows, ranks and recent traffic in detail, a page at a time. Reads, never changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from flexd import __version__
from flexd.api.base import RowsByTier, TierName
from flexd.api.config import ConfigReport
from flexd.api.rank import RankPage, RankReport
from flexd.api.table import HotRow, HotRowPage, TableOrder, TablePage, TableReport
from flexd.api.timeline import PlanMark, Timeline, TrafficSample
from flexd.config.model import Config
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import ApiError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import Tier
from flexd.core.placement import Placement
from flexd.ingest import Ingestor
from flexd.operations.drift import DriftMonitor
from flexd.operations.planning import Planning
from flexd.operations.traffic_timeline import INTERVAL_SECONDS, TrafficInterval
from flexd.operations.training_monitor import RankAverages, TrainingMonitor
from flexd.sketch.budget import TableChoice

ID_BYTES = 8
"""Of a row id in an exchange."""
MAX_PLAN_MARKS = 100

Int64Array = npt.NDArray[np.int64]


class Inspection:
    """Built over the running parts; every method may be called from any thread.

    Args:
        live: the ranks as they are now.
        placement: that every rank has agreed on.
        plans: the plans that moved rows, oldest first.
    """

    def __init__(
        self,
        config: Config,
        keyspace: KeySpace,
        ingestor: Ingestor,
        planning: Planning,
        training: TrainingMonitor,
        drift: DriftMonitor,
        live: Callable[[], LiveTopology | None],
        placement: Callable[[], Placement],
        plans: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self._config = config
        self._keyspace = keyspace
        self._ingestor = ingestor
        self._planning = planning
        self._training = training
        self._drift = drift
        self._live = live
        self._placement = placement
        self._plans = plans

    def apply_config(self, config: Config) -> None:
        self._config = config

    def config(self) -> ConfigReport:
        return ConfigReport(version=__version__, config=self._config.document())

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        """Needs no ranks: what only a profile knows is null before the first."""
        choices = self._ingestor.choices()
        accesses = np.array(self._ingestor.samples_by_table(), dtype=np.int64)
        placed = _placed_rows(self._keyspace, self._placement())
        keys: dict[TableOrder, Any] = {
            "accesses": -accesses,
            "replicas": -placed.sum(axis=1),
            "memory": -np.array([choice.bytes for choice in choices], dtype=np.int64),
            "name": np.array([table.name for table in self._keyspace.tables]),
            "configured": np.arange(len(choices)),
        }
        chosen = np.argsort(keys[order], kind="stable")[offset : offset + limit]
        total = int(accesses.sum())
        groups = {index: number for number, group in enumerate(self._keyspace.groups) for index in group.tables}
        profile, drift = self._planning.last_profile, self._drift.newest
        ratios: Mapping[str, float] = {} if drift is None else drift.table_ratios

        def report(index: int, choice: TableChoice) -> TableReport:
            table = self._keyspace.tables[index]
            known = None if profile is None else profile.tables[index]
            return TableReport(
                table=table.name,
                rows=table.rows,
                dim=table.dim,
                dtype=table.dtype,
                optimizer=table.optimizer,
                group=groups[index],
                accesses=int(accesses[index]),
                share=float(accesses[index] / total) if total else None,
                placed_rows=_by_tier(table.rows, placed[index]),
                counter=choice.kind,
                counter_bytes=choice.bytes,
                distinct_rows=None if known is None else known.distinct_rows,
                coverage=None if known is None or known.weight <= 0 else known.coverage,
                drift_ratio=ratios.get(table.name),
            )

        return TablePage(
            total=len(choices), offset=offset, tables=tuple(report(int(index), choices[index]) for index in chosen)
        )

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        """Raises ApiError (404) if the table is not known."""
        index = self._keyspace.index.get(table)
        if index is None:
            raise ApiError(f"no table {table!r}"[:300], status=404, remedy="flexd tables lists them")
        live, placement, spec = self._live(), self._placement(), self._keyspace.tables[index]
        profile = self._ingestor.table_profile(table)
        rows = profile.hot_rows[offset : offset + limit]
        keys = self._keyspace.keys(index, rows)
        tiers = _tiers_of(placement, keys)
        ranks = None if live is None else keys % live.layout.world_size
        shown = tuple(
            HotRow(
                place=offset + i + 1,
                row=int(rows[i]),
                key=int(keys[i]),
                share=float(profile.hot_share[offset + i]),
                share_lower=float(profile.hot_lower[offset + i]),
                share_upper=float(profile.hot_upper[offset + i]),
                tier=cast(TierName, Tier(tiers[i]).name),
                home_rank=None if ranks is None else int(ranks[i]),
            )
            for i in range(len(rows))  # a page, not a table
        )
        return HotRowPage(
            table=table,
            rows=spec.rows,
            total=len(profile.hot_rows),
            offset=offset,
            weight=profile.weight,
            placed_rows=_by_tier(spec.rows, _placed_rows(self._keyspace, placement)[index]),
            hottest=shown,
        )

    def ranks(self, offset: int, limit: int) -> RankPage:
        live, version = self._live(), self._placement().version
        if live is None:
            return RankPage(
                problem="no rank is registered", cluster=self._planning.cluster.name, placement_version=version
            )
        layout, known = live.layout, self._training.ranks()
        sent = [rank.intra_bytes + rank.inter_bytes for rank in known.values()]
        mean = sum(sent) / len(sent) if sent else 0.0
        return RankPage(
            generation=live.generation,
            attempt=live.attempt,
            nodes=layout.nodes,
            local_ranks=layout.local_ranks,
            ready=live.ready,
            problem=live.reason or None,
            replica_slots=live.replica_slots,
            cluster=self._planning.cluster.name,
            placement_version=version,
            imbalance=max(sent) / mean if mean > 0 else None,
            total=layout.world_size,
            offset=offset,
            ranks=tuple(
                _rank(rank, layout.node_of(rank), layout.local_rank_of(rank), known.get(rank), version)
                for rank in range(offset, min(offset + limit, layout.world_size))
            ),
        )

    def timeline(self) -> Timeline:
        live = self._live()
        share = 0.0 if live is None else 1 - live.layout.local_ranks / live.layout.world_size
        row_bytes = self._mean_row_bytes()
        return Timeline(
            interval_seconds=INTERVAL_SECONDS,
            samples=tuple(
                _sample(interval, None if live is None else share, row_bytes)
                for interval in self._training.timeline.intervals()
            ),
            plans=tuple(_mark(plan) for plan in self._plans()[-MAX_PLAN_MARKS:]),
        )

    def _mean_row_bytes(self) -> float:
        """Of a looked-up row's values: tables weigh by the accesses counted of them."""
        accesses = np.array(self._ingestor.samples_by_table(), dtype=np.float64)
        sizes = np.array([table.row_bytes for table in self._keyspace.tables], dtype=np.float64)
        return float((accesses * sizes).sum() / accesses.sum()) if accesses.sum() > 0 else float(sizes.mean())


def row_wise_inter_node_bytes(accesses: float, row_bytes: float, other_nodes_share: float) -> float:
    """What row-wise sharding without dedup sends between nodes, a rank and step.

    Every rank asks the home of every look-up: an id goes out, a row comes back, a gradient goes out. A rank sends as
    much as it receives in the mean, so rows and gradients count once each.

    Args:
        accesses: look-ups of a rank in a step.
        row_bytes: of a row's values.
        other_nodes_share: of the rows, that have their home in another node.
    """
    return accesses * (2 * row_bytes + ID_BYTES) * other_nodes_share


def _placed_rows(keyspace: KeySpace, placement: Placement) -> Int64Array:
    """int64[tables, 2]: rows at NODE and at DEVICE."""
    tables = len(keyspace.tables)
    cells = keyspace.table_of(placement.keys) * 2 + (placement.tiers.astype(np.int64) - int(Tier.NODE))
    return np.bincount(cells, minlength=2 * tables).astype(np.int64).reshape(tables, 2)


def _by_tier(rows: int, placed: Int64Array) -> RowsByTier:
    node, device = int(placed[0]), int(placed[1])
    return {"HOME": rows - node - device, "NODE": node, "DEVICE": device}


def _tiers_of(placement: Placement, keys: Int64Array) -> npt.NDArray[np.uint8]:
    """int64[n] keys -> uint8[n] tiers."""
    tiers = np.full(len(keys), int(Tier.HOME), dtype=np.uint8)
    if len(placement):
        at = np.minimum(np.searchsorted(placement.keys, keys), len(placement) - 1)
        listed = placement.keys[at] == keys
        tiers[listed] = placement.tiers[at[listed]]
    return tiers


def _rank(rank: int, node: int, local_rank: int, known: RankAverages | None, version: int) -> RankReport:
    if known is None:
        return RankReport(rank=rank, node=node, local_rank=local_rank)
    accesses = known.accesses_per_step
    return RankReport(
        rank=rank,
        node=node,
        local_rank=local_rank,
        placement_version=known.version,
        behind=max(0, version - known.version),
        step=known.step,
        report_age_seconds=time.monotonic() - known.heard_at,
        step_seconds=known.step_seconds,
        accesses_per_step=accesses,
        replica_share=known.replica_accesses_per_step / accesses if accesses > 0 else None,
        intra_node_bytes_per_step=known.intra_bytes,
        inter_node_bytes_per_step=known.inter_bytes,
    )


def _sample(interval: TrafficInterval, other_nodes_share: float | None, row_bytes: float) -> TrafficSample:
    begun, steps = interval.index * INTERVAL_SECONDS, interval.steps
    if steps == 0:
        return TrafficSample(unix_seconds=begun)
    home, node, device = (accesses / steps for accesses in interval.accesses_by_tier)
    accesses = home + node + device
    return TrafficSample(
        unix_seconds=begun,
        steps=steps,
        accesses={"HOME": round(home), "NODE": round(node), "DEVICE": round(device)},
        inter_node_bytes=interval.inter_bytes / steps,
        intra_node_bytes=interval.intra_bytes / steps,
        migration_bytes=interval.migration_bytes / steps,
        row_wise_inter_node_bytes=None
        if other_nodes_share is None
        else row_wise_inter_node_bytes(accesses, row_bytes, other_nodes_share),
        step_seconds=interval.step_seconds / steps,
    )


def _mark(plan: Mapping[str, Any]) -> PlanMark:
    return PlanMark.model_validate({name: plan[name] for name in PlanMark.model_fields if name in plan})
