"""Plans of a list of tables, and their documents: TorchRec's shardings, or flexd's sharding types and pooling places.

Lists are CSV (the columns of TorchRec's published sharding example) or JSON.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flexd.core.errors import ConfigError, PlanError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import DOCUMENT_FORMAT
from flexd.planner.model.workload import TrainingShape
from flexd.planner.tables.costs import TORCHREC_OPTIONS, chain_options, torchrec_options
from flexd.planner.tables.local_search import RankLoads, ShardAssignment
from flexd.planner.tables.options import PoolingAt, ShardingKind, TableOption, TableOptions, TableWork
from flexd.planner.tables.solve import EVALUATIONS, TablePlacement, place_tables
from flexd.sketch.profile import Profile, TableProfile, zipf_table
from flexd.topology.cluster import Cluster

SEQUENCE = "sequence"
"""The CSV's output of un-pooled tables."""
DEFAULT_BATCH = 2560
"""Samples of a rank where a line of the CSV gives none."""
MAX_FILE_BYTES = 64 * 2**20
_COLUMNS = ("fqn", "hash_size", "emb_dim", "sum_pooling_factor", "sum_num_poolings", "output", "batch")


@dataclass(frozen=True)
class ListedTable:
    """One line of a table list.

    Attributes:
        lookups: of one sample.
        bags: sum-pooled bags of one sample (features); 0: un-pooled.
        batch: samples of a rank in one step.
        sharding: as TorchRec chose: RW, TW, CW, TWRW or DP; empty if the list has no plan.
        ranks: of the shards, in their order; empty if unknown.
        module: path of the collection in the model.
        dtype: of the rows; None: not stated.
    """

    name: str
    rows: int
    dim: int
    lookups: float
    bags: float
    batch: int
    sharding: str = ""
    ranks: tuple[int, ...] = ()
    module: str = ""
    dtype: str | None = None


def read_tables(path: Path) -> list[ListedTable]:
    """Read a list of tables. A line of a CSV without a batch gets ``DEFAULT_BATCH``, a name that comes again a number.

    Raises:
        ConfigError: the file cannot be read, or a line is not valid; names the file and the line.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes", remedy="give a list of tables")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", remedy="give a CSV or JSON list of tables") from error
    tables = _of_json(path, text) if path.suffix == ".json" else _of_csv(path, text)
    if not tables:
        raise ConfigError(f"{path}: no tables", remedy="give at least one")
    return tables


def _of_csv(path: Path, text: str) -> list[ListedTable]:
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{path}: no column {', '.join(missing)}", remedy=f"give the columns {', '.join(_COLUMNS)}, or a .json list"
        )
    tables: list[ListedTable] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(reader, start=2):
        seen[line["fqn"]] += 1
        again = seen[line["fqn"]]
        batch = (line["batch"] or "").split("*")[0]
        try:
            tables.append(
                _checked(
                    ListedTable(
                        name=line["fqn"] + (f"#{again}" if again > 1 else ""),
                        rows=int(float(line["hash_size"])),
                        dim=int(float(line["emb_dim"])),
                        lookups=float(line["sum_pooling_factor"]),
                        bags=0.0 if line["output"] == SEQUENCE else max(float(line["sum_num_poolings"]), 1.0),
                        batch=int(batch) if batch.isdigit() else DEFAULT_BATCH,
                        sharding=line.get("sharding") or "",
                        ranks=_ranks(line.get("ranks") or ""),
                        module=line["fqn"].rpartition(".")[0],
                    )
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}, line {number}: {error}", remedy="correct the line") from error
    return tables


def _of_json(path: Path, text: str) -> list[ListedTable]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}", remedy="give a JSON list of tables") from error
    entries = document.get("tables") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: no list of tables", remedy='give [{"name": ..., "rows": ..., "dim": ...}, ...]')
    tables = []
    for number, entry in enumerate(entries):
        try:
            tables.append(_checked(_of_entry(entry)))
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}, table {number}: {what}", remedy="give name, rows and dim at least") from error
    names = Counter((table.module, table.name) for table in tables)
    twice = sorted(f"{module}.{name}".lstrip(".") for (module, name), count in names.items() if count > 1)
    if twice:
        raise ConfigError(f"{path}: tables listed twice: {', '.join(twice)}", remedy="name each table once")
    return tables


def _of_entry(entry: Mapping[str, Any]) -> ListedTable:
    known = {"name", "rows", "dim", "lookups", "bags", "batch", "sharding", "ranks", "module", "dtype"}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}")
    bags = float(entry.get("bags", 1.0))
    ranks = tuple(int(rank) for rank in entry.get("ranks", ()))
    return ListedTable(
        str(entry["name"]), int(entry["rows"]), int(entry["dim"]), float(entry.get("lookups", max(bags, 1.0))), bags,
        int(entry.get("batch", DEFAULT_BATCH)), str(entry.get("sharding", "")), ranks,
        str(entry.get("module", "")), entry.get("dtype"),
    )  # fmt: skip


def _ranks(text: str) -> tuple[int, ...]:
    """Read "0-95" or "3,7" or "3"."""
    ranks: list[int] = []
    for piece in text.replace(";", ",").split(","):
        first, dash, last = piece.strip().partition("-")
        if first:
            ranks.extend(range(int(first), int(last) + 1) if dash else [int(first)])
    return tuple(ranks)


def _checked(table: ListedTable) -> ListedTable:
    for name, value, least in (
        ("rows", table.rows, 1), ("dim", table.dim, 1), ("lookups", table.lookups, 0), ("bags", table.bags, 0),
        ("batch", table.batch, 1),
    ):  # fmt: skip
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"table {table.name!r}: {name} is {value}, not a number from {least} on")
    return table


_KINDS = {kind.value: kind for kind in ShardingKind} | {
    "TW": ShardingKind.TABLE_WISE, "RW": ShardingKind.ROW_WISE, "CW": ShardingKind.COLUMN_WISE,
    "TWRW": ShardingKind.TABLE_ROW_WISE, "DP": ShardingKind.DATA_PARALLEL,
    # Columns on the ranks of one node (torchrec.distributed.sharding.twcw_sharding); the list names them.
    "table_column_wise": ShardingKind.COLUMN_WISE,
}  # fmt: skip
LISTED_ROWS = 1000
"""Most frequent rows of a table that a Zipf profile lists one by one."""
ID_BYTES = 8
"""TorchRec's ids are int64."""
WIRE_DTYPE = "float32"
"""Of TorchRec's pooled vectors and rows, whatever the table's dtype."""


@dataclass(frozen=True)
class TableStatistics:
    """Accesses of tables, where the list does not say them.

    Attributes:
        zipf: exponent of every table that the profile does not have.
        profile: measured accesses; its tables are found by name.
        dtype, optimizer: of tables that name no dtype, and of all tables.
    """

    zipf: float = 1.05
    profile: Profile | None = None
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"


def listed_work(
    tables: Sequence[ListedTable], layout: RankLayout, statistics: TableStatistics, comm_dtype: str | None = None
) -> TableWork:
    """Return the work of listed tables.

    Raises:
        PlanError: the profile has a table of this name with other rows.
    """
    # A table's own name, with the module's path before it where several have it.
    times = Counter(table.name for table in tables)
    names = [table.name if times[table.name] == 1 else f"{table.module}.{table.name}" for table in tables]
    known = {} if statistics.profile is None else {table.table: table for table in statistics.profile.tables}
    specs = [
        TableSpec(name, table.rows, table.dim, table.dtype or statistics.dtype, statistics.optimizer)
        for name, table in zip(names, tables, strict=True)
    ]
    profiles = tuple(
        _profile(name, table, number, known.get(name) or known.get(table.name), layout, statistics)
        for number, (name, table) in enumerate(zip(names, tables, strict=True))
    )
    bags = {name: table.bags * table.batch for name, table in zip(names, tables, strict=True) if table.bags > 0}
    profile = Profile(profiles, generation=1, samples=10**9)
    return TableWork.of(profile, KeySpace(specs), layout, TrainingShape(comm_dtype=comm_dtype), bags)


def _profile(
    name: str, table: ListedTable, number: int, known: TableProfile | None, layout: RankLayout, given: TableStatistics
) -> TableProfile:
    accesses = table.lookups * table.batch * layout.world_size
    if known is None:
        return zipf_table(name, table.rows, given.zipf, LISTED_ROWS, accesses, 7919 * number)
    if known.rows != table.rows:
        raise PlanError(
            f"table {name!r}: {table.rows} rows, in the profile {known.rows}", remedy="give the profile of these tables"
        )
    return replace(known, table=name, accesses_per_step=known.accesses_per_step or accesses)


def torchrec_sharding(placement: TablePlacement) -> list[tuple[str, list[int]]]:
    """Return (TorchRec's sharding type, ranks; of table_row_wise those of its node) by table."""
    layout, found = placement.layout, []
    for option, places in placement.by_table():
        if option.rule is ShardingKind.TABLE_ROW_WISE:
            ranks = list(layout.node_ranks(places[0]))
        else:
            ranks = list(range(layout.world_size)) if option.everywhere else places
        found.append((str(option.rule), ranks))
    return found


def sharding_document(tables: Sequence[ListedTable], placement: TablePlacement) -> dict[str, Any]:
    """Return what ``flexd.torchrec.sharding_plan`` reads of a placement of ``shard_tables``, JSON-able."""
    modules: dict[str, dict[str, Any]] = {}
    for table, (kind, ranks) in zip(tables, torchrec_sharding(placement), strict=True):
        modules.setdefault(table.module, {})[short_name(table)] = {"sharding_type": kind, "ranks": ranks}
    return {
        "format": DOCUMENT_FORMAT,
        "nodes": placement.layout.nodes,
        "local_ranks": placement.layout.local_ranks,
        "predicted": predicted(placement),
        "modules": modules,
    }


def flexd_sharding(tables: Sequence[ListedTable], placement: TablePlacement) -> list[tuple[str, str | None]]:
    """Return (sharding type, pooling place) by table; un-pooled tables have no pooling place, and copies are pooled
    where they are read."""
    return [
        (rule, None if table.bags == 0 else str(PoolingAt.REQUESTER if pooling_at is PoolingAt.NONE else pooling_at))
        for table, (rule, pooling_at) in zip(tables, placement.rules(), strict=True)
    ]


def rules_document(tables: Sequence[ListedTable], placement: TablePlacement) -> dict[str, Any]:
    """Return what ``flexd.TableRules.read`` reads of a placement of ``plan_rules``, JSON-able."""
    return {
        "format": DOCUMENT_FORMAT,
        "for": "flexd",
        "nodes": placement.layout.nodes,
        "local_ranks": placement.layout.local_ranks,
        "predicted": predicted(placement),
        "tables": [
            {
                "name": short_name(table), "module": table.module, "rows": table.rows, "dim": table.dim,
                "sharding": rule, "pooling_at": pooling_at,
            }
            for table, (rule, pooling_at) in zip(tables, flexd_sharding(tables, placement), strict=True)
        ],
    }  # fmt: skip


def predicted(placement: TablePlacement) -> dict[str, Any]:
    """Return what documents say of a placement, JSON-able."""
    return {
        "step_seconds": placement.seconds,
        "row_wise_step_seconds": placement.spread_seconds,
        "bound_seconds": placement.bound_seconds,
        "gap": placement.gap,
        "balance": placement.balance,
        "memory_bytes": np.ceil(placement.memory_bytes).astype(np.int64).tolist(),
    }


def short_name(table: ListedTable) -> str:
    """Return the name of a table in its module."""
    return table.name.removeprefix(f"{table.module}.") if table.module else table.name


def torchrec_work(tables: Sequence[ListedTable], layout: RankLayout, statistics: TableStatistics) -> TableWork:
    """Return the work of listed tables as TorchRec exchanges them."""
    return replace(listed_work(tables, layout, statistics, WIRE_DTYPE), id_bytes=ID_BYTES)


def shard_tables(
    tables: Sequence[ListedTable],
    layout: RankLayout,
    cluster: Cluster,
    memory_bytes: float,
    statistics: TableStatistics | None = None,
    evaluations: int = EVALUATIONS,
    without: Collection[str] = (),
) -> TablePlacement:
    """Choose TorchRec's sharding of every table for the shortest step of the busiest rank.

    Args:
        memory_bytes: of a rank, for rows, optimizer state and dense gradients.
        without: sharding types that no table may get.

    Raises:
        PlanError: no placement within the memory was found.
    """
    work = torchrec_work(tables, layout, statistics or TableStatistics())
    cluster = cluster.of_layout(layout.nodes, layout.local_ranks)
    options = torchrec_options(work, [table.dim for table in tables], layout, cluster)
    return place_tables(_left_out(options, without), layout, memory_bytes, evaluations=evaluations)


def plan_rules(
    tables: Sequence[ListedTable],
    layout: RankLayout,
    cluster: Cluster,
    memory_bytes: float,
    statistics: TableStatistics | None = None,
    evaluations: int = EVALUATIONS,
    without: Collection[str] = (),
) -> TablePlacement:
    """Choose sharding type and pooling place of every table for the shortest step of the busiest rank in flexd's
    exchange.

    Args and Raises: as ``shard_tables``; the memory is for rows and optimizer state.
    """
    work = listed_work(tables, layout, statistics or TableStatistics())
    options = chain_options(work, layout, cluster.of_layout(layout.nodes, layout.local_ranks))
    return place_tables(_left_out(options, without), layout, memory_bytes, evaluations=evaluations)


def _left_out(options: TableOptions, without: Collection[str]) -> TableOptions:
    """Return the options without some sharding types."""
    banned = np.array([option.rule in without for option in options.options])
    return replace(options, allowed=options.allowed & ~banned)


def listed_seconds(
    tables: Sequence[ListedTable],
    layout: RankLayout,
    cluster: Cluster,
    statistics: TableStatistics | None = None,
) -> float | None:
    """Return the seconds of a step by the plan that the list itself has, priced as those of ``shard_tables``.

    Returns:
        None if a table has no sharding or no ranks.

    Raises:
        PlanError: the plan is of more ranks, or has a sharding that is not known; names the table.
    """
    if not all(table.sharding and table.ranks for table in tables):
        return None
    held = [_listed_option(table, layout) for table in tables]
    options = (*TORCHREC_OPTIONS, *dict.fromkeys(option for option, _ in held if option not in TORCHREC_OPTIONS))
    pieces = ShardAssignment(
        np.repeat(np.arange(len(tables)), [len(places) for _, places in held]),
        np.array([options.index(option) for option, places in held for _ in places]),
        np.array([place for _, places in held for place in places]),
    )
    work = torchrec_work(tables, layout, statistics or TableStatistics())
    cluster = cluster.of_layout(layout.nodes, layout.local_ranks)
    loads = torchrec_options(work, [table.dim for table in tables], layout, cluster, options=options)
    return RankLoads.of(loads, layout, np.full(layout.world_size, np.inf), pieces).seconds()


def _listed_option(table: ListedTable, layout: RankLayout) -> tuple[TableOption, list[int]]:
    """The option of the list's plan, and where its pieces are."""
    if table.sharding not in _KINDS:
        raise PlanError(f"table {table.name!r}: sharding {table.sharding!r}", remedy=f"one of {', '.join(_KINDS)}")
    beyond = [rank for rank in table.ranks if not 0 <= rank < layout.world_size]
    if beyond:
        raise PlanError(
            f"table {table.name!r}: on rank {beyond[0]} of {layout.world_size}",
            remedy="give --nodes and --local-ranks of the list's plan",
        )
    kind = _KINDS[table.sharding]
    if kind is ShardingKind.TABLE_ROW_WISE:
        return TableOption(kind, PoolingAt.OWNER), [table.ranks[0] // layout.local_ranks]
    if kind in (ShardingKind.ROW_WISE, ShardingKind.DATA_PARALLEL):
        return TableOption(kind, PoolingAt.OWNER), [0]
    if len(table.ranks) == 1:
        return TableOption(ShardingKind.TABLE_WISE, PoolingAt.OWNER), list(table.ranks)
    return TableOption(ShardingKind.COLUMN_WISE, PoolingAt.OWNER, len(table.ranks)), list(table.ranks)
