"""Which tables of a running job should get other home rules and answers: from what they have, into the room that the
ranks have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexd.core.answers import AnswerChange
from flexd.core.errors import PlacementError
from flexd.core.home_changes import after_block, rules_of
from flexd.core.home_rules import HomeRule
from flexd.core.homes import Homes
from flexd.core.layout import RankLayout
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
BoolArray = npt.NDArray[np.bool_]

_KINDS = (HomeKind.ALL, HomeKind.NODE, HomeKind.RANK)
"""Without copies on every rank: plans reach those by rows at DEVICE, which cost a step the same (``planner.plan``)."""
_FIXED_SECONDS = 1e6
"""Of a step: what moving a table costs that may not move."""
_MESSAGE_BYTES = 2**20
_ANSWERS = (Answer.ROWS, Answer.SUMS)
_CHANGED_ANSWERS_SHARE = 1e-4
"""Of a step: what it counts if all tables change their answer, so that none does for nothing."""


@dataclass(frozen=True)
class RuleChanges:
    """Tables that get other rules and answers.

    Attributes:
        rules: the new rule, by table.
        answers: tables that answer otherwise.
        live_seconds, seconds: of a step, of the busiest rank phase by phase, before and after.
        bytes_to_move: values and optimizer state of the rows of tables that get other rules.
        without_room: tables that would have moved, had their ranks enough spare slots.
        live_loads, loads: float64[W], seconds of each rank of all phases together.
        live_kernel_seconds: float64[W, 2] of each rank before, by ``kernel_costs.PHASES``, without the costs'
            factors; None without learned costs.
    """

    rules: dict[int, HomeRule]
    answers: AnswerChange
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
    free_answers: Collection[str] = (),
    moves: bool = True,
    kernels: KernelCosts | None = None,
    evaluations: int = 2000,
) -> RuleChanges:
    """Return the changes that shorten a step most, with the time of moving the rows paid within the horizon.

    A table whose rule is changing counts as having the rule of most of its rows.

    Args:
        work: of the tables of ``homes``.
        by_sums: names of the tables that answer by sums.
        fixed: names of tables that keep their rule, beside those that are copied to every rank.
        free_answers: names of pooled tables whose answer may change, if they are not copied to every rank.
        moves: whether any rule may change.
        kernels: learned costs of look-ups and updates; without them they are priced by bytes.

    Raises:
        PlanError: as ``place_tables``.
    """
    layout, count = homes.layout, len(work.names)
    now = [_main_rule(homes, table) for table in range(count)]
    sums = np.array([name in by_sums for name in work.names])
    free = np.array([name in free_answers and not rule.copied for name, rule in zip(work.names, now, strict=True)])
    free &= work.bags > 0
    stays = np.array([not moves or rule.copied or name in fixed for rule, name in zip(now, work.names, strict=True)])
    options = _options(work, homes, cluster, sums, free)
    live = _pieces(now, sums & free)
    per_byte = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL).seconds_per_byte(_MESSAGE_BYTES)
    move_seconds = np.where(stays, _FIXED_SECONDS, work.stored_bytes * per_byte / max(1.0, horizon_steps))
    capacity = _capacity(homes, work)
    prices = None
    if kernels is not None:
        dims = [spec.dim for spec in homes.keyspace.tables]
        answered = np.repeat(np.where(free[:, None], [False, True], sums[:, None]), len(_KINDS), axis=1)
        prices = KernelPrices.of_chain(options, work, dims, layout, kernels, answered)
        options = prices.priced(live)
    every = _Costs(options, layout, capacity, prices)
    placed = place_tables(
        every.with_flips(live), layout, capacity, LiveTables(live.option, live.place, move_seconds), evaluations
    )
    wanted: dict[int, HomeRule] = {}
    flipped: set[int] = set()
    for table, (text, answer) in enumerate(placed.rules()):
        rule = HomeRule.parse(text)
        if rule != now[table] and not stays[table]:
            wanted[table] = rule
        if free[table] and (answer is Answer.SUMS) != sums[table]:
            flipped.add(table)
    rules = _with_room(homes, wanted, work)
    flipped -= set(wanted) - set(rules)  # chosen for a rule that there is no room for
    after = sums ^ np.isin(np.arange(count), list(flipped))
    changed = _pieces([rules.get(table, rule) for table, rule in enumerate(now)], after & free)
    seconds = [every.seconds(pieces) for pieces in (live, changed)]
    moving = sum(float(move_seconds[table]) for table in rules)
    if (rules or flipped) and prices is not None and seconds[1] + moving >= seconds[0]:
        # What pieces add promised a saving that the sets do not have.
        rules, flipped, changed, seconds[1] = {}, set(), live, seconds[0]
    return RuleChanges(
        rules, AnswerChange.of(*(sorted(t for t in flipped if sums[t] == by_now) for by_now in (True, False))),
        seconds[0], seconds[1], sum(int(work.stored_bytes[table]) for table in rules),
        tuple(sorted(set(wanted) - set(rules))), every.of_ranks(live), every.of_ranks(changed),
        None if prices is None else prices.kernel_seconds(live) / prices.costs.factors,
    )  # fmt: skip


@dataclass(frozen=True)
class _Costs:
    """Seconds of placements of the tables: by learned costs of sets of tables where there are any."""

    options: TableOptions
    layout: RankLayout
    capacity: Float64Array
    prices: KernelPrices | None

    def seconds(self, pieces: Pieces) -> float:
        """Return the seconds of a step."""
        used = {self.options.options[option].answer for option in np.unique(pieces.option)}
        fixed = sum(seconds for answer, seconds in self.options.answer_seconds if answer in used)
        if self.prices is not None:
            return self.prices.seconds(pieces) + fixed
        return self._loads(pieces).seconds() + fixed

    def of_ranks(self, pieces: Pieces) -> Float64Array:
        """Return float64[W], seconds of each rank."""
        if self.prices is not None:
            return self.prices.rank_seconds(pieces)
        total = self._loads(pieces).total
        found: Float64Array = self.options.axis_seconds @ total.reshape(len(total), -1)[:-1]
        return found

    def with_flips(self, live: Pieces) -> TableOptions:
        """Return the options with what an answer that is not the live one counts."""
        each = _CHANGED_ANSWERS_SHARE * self.seconds(live) / len(live.table)
        other = np.arange(len(self.options.options)) // len(_KINDS) != live.option[:, None] // len(_KINDS)
        return replace(self.options, extra_seconds=self.options.extra_seconds + each * other)

    def _loads(self, pieces: Pieces) -> RankLoads:
        return RankLoads.of(self.options, self.layout, self.capacity, pieces)


def _pieces(rules: Sequence[HomeRule], by_sums: BoolArray) -> Pieces:
    kinds = [_KINDS.index(HomeKind.ALL if rule.spread else HomeKind(rule.kind)) for rule in rules]
    places = [0 if rule.spread else rule.number for rule in rules]
    return Pieces(np.arange(len(rules)), np.array(kinds) + len(_KINDS) * by_sums, np.array(places))


def _main_rule(homes: Homes, table: int) -> HomeRule:
    rules = rules_of(homes, table)
    return rules.lower if rules.lower is not None and 2 * rules.boundary > rules.rows else rules.upper


def _options(work: TableWork, homes: Homes, cluster: Cluster, sums: BoolArray, free: BoolArray) -> TableOptions:
    """Return the loads of each table under each answer and kind of rule. Under the answer "rows" a table that is not
    ``free`` has the answer that it has, and it may not have the other one."""
    layout = homes.layout
    every = [Option(kind, answer) for answer in _ANSWERS for kind in _KINDS]
    both = chain_options(work, layout, cluster.of_layout(layout.nodes, layout.local_ranks), options=every)
    held = sums & ~free
    at = (np.arange(len(every)) + len(_KINDS) * held[:, None]) % len(every)
    tables = np.arange(len(work.names))[:, None]
    allowed = both.allowed.copy()
    allowed[:, len(_KINDS) :] &= free[:, None]
    # Where a table keeps sums, every step has their collectives anyway.
    fixed = () if held.any() else tuple(one for one in both.answer_seconds if one[0] is Answer.SUMS)
    return replace(
        both, loads=both.loads[tables, at], memory_bytes=both.memory_bytes[tables, at], allowed=allowed,
        extra_seconds=both.extra_seconds[tables, at], answer_seconds=fixed,
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
