"""Which tables of a running job should get other home rules: from where they are, into the room that the ranks have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexd.core.errors import PlacementError
from flexd.core.home_changes import after_block, rules_of
from flexd.core.home_rules import HomeRule
from flexd.core.homes import Homes
from flexd.planner.model.workload import ACCESSES
from flexd.planner.tables.chain_costs import chain_options
from flexd.planner.tables.kernel_costs import KernelCosts
from flexd.planner.tables.kernel_plans import KernelPrices
from flexd.planner.tables.local_search import LiveTables
from flexd.planner.tables.options import Answer, HomeKind, Option, TableOptions
from flexd.planner.tables.rank_loads import Pieces, RankLoads
from flexd.planner.tables.solve import place_tables
from flexd.planner.tables.table_work import TableWork
from flexd.topology.cluster import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]

_KINDS = (HomeKind.ALL, HomeKind.NODE, HomeKind.RANK)
"""Without copies on every rank: plans reach those by rows at DEVICE, which cost a step the same (``planner.plan``)."""
_FIXED_SECONDS = 1e6
"""Of a step: what moving a table costs that may not move."""
_MESSAGE_BYTES = 2**20


@dataclass(frozen=True)
class RuleChanges:
    """Tables that get other rules.

    Attributes:
        rules: the new rule, by table.
        live_seconds, seconds: of a step, of the busiest rank phase by phase, before and after.
        bytes_to_move: values and optimizer state of their rows.
        without_room: tables that would have moved, had their ranks enough spare slots.
        live_loads, loads: float64[W], seconds of each rank of all phases together.
        live_kernel_seconds: float64[W, 2] of each rank before, by ``kernel_costs.PHASES``, without the costs'
            factors; None without learned costs.
    """

    rules: dict[int, HomeRule]
    live_seconds: float
    seconds: float
    bytes_to_move: int
    without_room: tuple[int, ...]
    live_loads: Float64Array
    loads: Float64Array
    live_kernel_seconds: Float64Array | None = None

    @property
    def saved_seconds(self) -> float:
        return self.live_seconds - self.seconds


def plan_rule_changes(
    work: TableWork,
    homes: Homes,
    cluster: Cluster,
    horizon_steps: float,
    *,
    by_sums: Collection[str] = (),
    fixed: Collection[str] = (),
    kernels: KernelCosts | None = None,
    evaluations: int = 2000,
) -> RuleChanges:
    """Return the changes that shorten a step most, with the time of moving the rows paid within the horizon.

    Answers stay. A table whose rule is changing counts as having the rule of most of its rows.

    Args:
        work: of the tables of ``homes``.
        by_sums: names of the tables that answer by sums.
        fixed: names of tables that keep their rule, beside those that are copied to every rank.
        kernels: learned costs of look-ups and updates; without them they are priced by bytes.

    Raises:
        PlanError: as ``place_tables``.
    """
    layout, count = homes.layout, len(work.names)
    options = _options(work, homes, cluster, by_sums)
    now = [_main_rule(homes, table) for table in range(count)]
    stays = np.array([rule.copied or name in fixed for rule, name in zip(now, work.names, strict=True)])
    live = Pieces(
        np.arange(count),
        np.array([_option_of(rule) for rule in now]),
        np.array([0 if rule.spread else rule.number for rule in now]),
    )
    per_byte = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL).seconds_per_byte(_MESSAGE_BYTES)
    move_seconds = np.where(stays, _FIXED_SECONDS, work.stored_bytes * per_byte / max(1.0, horizon_steps))
    capacity = _capacity(homes, work)
    prices = None
    if kernels is not None:
        sums = np.array([name in by_sums for name in work.names])
        dims = [spec.dim for spec in homes.keyspace.tables]
        prices = KernelPrices.of_chain(options, work, dims, layout, kernels, sums)
        options = prices.priced(live)
    placed = place_tables(options, layout, capacity, LiveTables(live.option, live.place, move_seconds), evaluations)
    wanted: dict[int, HomeRule] = {}
    for table, (text, _) in enumerate(placed.rules()):
        rule = HomeRule.parse(text)
        if rule != now[table] and not stays[table]:
            wanted[table] = rule
    rules = _with_room(homes, wanted, work)
    option, place = live.option.copy(), live.place.copy()
    for table, rule in rules.items():
        option[table], place[table] = _option_of(rule), 0 if rule.spread else rule.number
    changed = Pieces(live.table, option, place)
    if prices is not None:
        seconds = [prices.seconds(pieces) for pieces in (live, changed)]
        moving = sum(float(move_seconds[table]) for table in rules)
        if rules and seconds[1] + moving >= seconds[0]:
            # What pieces add promised a saving that the sets do not have.
            rules, changed, seconds[1] = {}, live, seconds[0]
        of_ranks = [prices.rank_seconds(pieces) for pieces in (live, changed)]
    else:
        loads = [RankLoads.of(options, layout, capacity, pieces) for pieces in (live, changed)]
        seconds = [one.seconds() for one in loads]
        of_ranks = [options.axis_seconds @ one.total.reshape(len(one.total), -1)[:-1] for one in loads]
    moved = sum(int(work.stored_bytes[table]) for table in rules)
    return RuleChanges(
        rules, seconds[0], seconds[1], moved, tuple(sorted(set(wanted) - set(rules))), of_ranks[0], of_ranks[1],
        None if prices is None else prices.kernel_seconds(live) / prices.costs.factors,
    )  # fmt: skip


def _main_rule(homes: Homes, table: int) -> HomeRule:
    rules = rules_of(homes, table)
    return rules.lower if rules.lower is not None and 2 * rules.boundary > rules.rows else rules.upper


def _option_of(rule: HomeRule) -> int:
    return _KINDS.index(HomeKind.ALL if rule.spread else HomeKind(rule.kind))


def _options(work: TableWork, homes: Homes, cluster: Cluster, by_sums: Collection[str]) -> TableOptions:
    """Return the loads of each table under each kind of rule, with the answer that it has."""
    layout = homes.layout
    every = [Option(kind, answer) for answer in (Answer.ROWS, Answer.SUMS) for kind in _KINDS]
    both = chain_options(work, layout, cluster.of_layout(layout.nodes, layout.local_ranks), options=every)
    sums = np.array([name in by_sums for name in work.names])
    at = np.arange(len(_KINDS)) + len(_KINDS) * sums[:, None]
    tables = np.arange(len(work.names))[:, None]
    return replace(
        both, options=tuple(every[: len(_KINDS)]), loads=both.loads[tables, at],
        memory_bytes=both.memory_bytes[tables, at], allowed=both.allowed[:, : len(_KINDS)],
        extra_seconds=both.extra_seconds[tables, at], answer_seconds=(),
    )  # fmt: skip


def _capacity(homes: Homes, work: TableWork) -> Float64Array:
    """Return float64[W]: bytes of all home slots of each rank."""
    bytes_of, found = work.row_bytes + work.state_bytes, np.zeros(homes.layout.world_size)
    for number, group in enumerate(homes.groups):
        found += homes.home_rows(number) * bytes_of[group.tables[0]]
    return found


def _with_room(homes: Homes, wanted: dict[int, HomeRule], work: TableWork) -> dict[int, HomeRule]:
    """Return those changes that the ranks have slots for, one table after another: the slots that one leaves are free
    for the next. Those of most look-ups come first."""
    found: dict[int, HomeRule] = {}
    left = sorted(wanted, key=lambda table: (-float(work.statistics[table, ACCESSES]), table))
    while left:
        waiting = []
        for table in left:
            try:
                homes = _changed(homes, table, wanted[table])
                found[table] = wanted[table]
            except PlacementError:
                waiting.append(table)
        if len(waiting) == len(left):
            break
        left = waiting
    return found


def _changed(homes: Homes, table: int, rule: HomeRule) -> Homes:
    for block in rules_of(homes, table).blocks_to(rule):
        homes = after_block(homes, block)
    return homes
