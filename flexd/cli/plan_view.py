"""Views of a plan, of kept plans, and of what was carried out."""

from __future__ import annotations

from flexd.api.base import TierName
from flexd.api.plan import CostReport, LinkName, MemoryReport, PhaseCost, PlanReport
from flexd.api.planning import GateReport, PlanningStatus, ProposalList, ProposalReport
from flexd.api.replan import ReplanResult
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.migration_commands import migration_facts
from flexd.core import units

TIERS: tuple[TierName, ...] = ("NODE", "DEVICE")
LINKS: tuple[LinkName, ...] = ("intra_node", "inter_node")


def plan_blocks(plan: PlanReport) -> list[Block]:
    affinity = [] if plan.affinity is None else [Sentences("affinity", plan.affinity.words)]
    return [
        _head(plan),
        _rows(plan),
        *affinity,
        _items(plan),
        _strategies(plan),
        *_why(plan),
    ]


def plan_facts(plan: PlanReport) -> tuple[tuple[str, str], ...]:
    """Return a plan in a few lines, for the status."""
    before, after = plan.before.exposed_seconds, plan.after.exposed_seconds
    return (
        ("plan", f"{plan.plan_id} ({plan.reason or 'no reason given'}) at {units.when(plan.created_unix_seconds)}"),
        ("changes", _changes(plan)),
        (
            "predicted",
            f"{units.seconds(before)} -> {units.seconds(after)} a step exposed ({units.change(before, after)})",
        ),
        *saving_fact(plan),
    )


def saving_fact(plan: PlanReport) -> list[tuple[str, str]]:
    """Return the predicted saving in time, and as a share of the measured step; nothing if it is not known."""
    if plan.saved_seconds is None:
        return []
    text = f"{units.seconds(plan.saved_seconds)} a step"
    if plan.moves_save_seconds:
        text += f" ({units.seconds(plan.moves_save_seconds)} of it by rows that move)"
    if plan.saved_share is not None:
        text += f", {units.share(plan.saved_share)} of {units.seconds(plan.step_seconds)}"
    return [("saves", text)]


def would_move(plan: PlanReport) -> str:
    """Return the moves of a plan as one sentence."""
    if plan.changed_rows == 0:
        return "nothing would move."
    change = units.change(plan.before.exposed_seconds, plan.after.exposed_seconds)
    return (
        f"{units.count(plan.promotions)} rows would be promoted and {units.count(plan.demotions)} demoted, "
        f"{units.size(plan.migration_bytes)} copied; predicted {change} exposed communication."
    )


def _changes(plan: PlanReport) -> str:
    if plan.changed_rows == 0:
        return "none: the live placement stays"
    return (
        f"{units.count(plan.promotions)} promotions, {units.count(plan.demotions)} demotions, "
        f"{units.size(plan.migration_bytes)} to copy ({units.seconds(plan.migration_seconds)})"
    )


def _head(plan: PlanReport) -> Facts:
    slots = ", ".join(units.count(number) for number in plan.replica_slots) or units.UNKNOWN
    return Facts(
        "",
        (
            ("plan", plan.plan_id + (f" after {plan.parent_id}" if plan.parent_id else "")),
            ("reason", (plan.reason or units.UNKNOWN) + (f", requested by {plan.who}" if plan.who else "")),
            ("made", units.when(plan.created_unix_seconds)),
            ("made for", f"topology generation {plan.topology_generation}, profile {plan.profile_generation}"),
            ("priced as", plan.cluster or units.UNKNOWN),
            ("exchange", _exchange(plan)),
            ("replica slots", f"{slots} a rank"),
            ("memory of a rank", _memory(plan.memory)),
            ("changes", _changes(plan)),
            *saving_fact(plan),
            *_gaps(plan),
        ),
    )


def _gaps(plan: PlanReport) -> list[tuple[str, str]]:
    facts = []
    if plan.gap is not None:
        facts.append(("gap", f"at most {units.share(plan.gap)} of what a plan could save"))
    if plan.saved_busiest_seconds is not None:
        facts.append(("busiest rank", f"saves {units.seconds(plan.saved_busiest_seconds)}"))
    return facts


def _memory(memory: MemoryReport) -> str:
    if memory.total_bytes is None:
        return units.UNKNOWN
    buffers = sum(size or 0.0 for size in memory.buffer_bytes.values())
    return (
        f"{units.size(memory.total_bytes)}: home rows {units.size(memory.home_bytes)}, replica slots "
        f"{units.size(memory.replica_bytes)}, directory {units.size(memory.directory_bytes)}, "
        f"buffers of a step {units.size(buffers)}"
    )


def _exchange(plan: PlanReport) -> str:
    exchange = plan.exchange
    if exchange.recommended == exchange.planned:
        return exchange.planned
    return (
        f"{exchange.planned} ({exchange.recommended} would take "
        f"{units.seconds(exchange.recommended_exposed_seconds)} a step)"
    )


def _rows(plan: PlanReport) -> Table:
    rows = tuple(
        (
            tier,
            units.count(plan.rows_before.get(tier, 0)),
            units.count(plan.rows.get(tier, 0)),
            units.signed(plan.rows.get(tier, 0) - plan.rows_before.get(tier, 0)),
        )
        for tier in TIERS
    )
    return Table(
        "rows with replicas", ("tier", "before", "after", "change"), rows, frozenset(("before", "after", "change"))
    )


def _items(plan: PlanReport) -> Table:
    columns = ("phase", "link", "bytes before", "bytes after", "time before", "time after", "change")
    rows: list[tuple[str, ...]] = []
    nothing = PhaseCost()
    for phase in {**plan.before.phases, **plan.after.phases}:
        for link in LINKS:
            before = plan.before.phases.get(phase, {}).get(link, nothing)
            after = plan.after.phases.get(phase, {}).get(link, nothing)
            if not any((before.bytes, before.seconds, after.bytes, after.seconds)):
                continue
            rows.append(
                (
                    phase.replace("_", " "),
                    link.replace("_", "-"),
                    units.size(before.bytes),
                    units.size(after.bytes),
                    units.seconds(before.seconds),
                    units.seconds(after.seconds),
                    units.change(before.seconds, after.seconds),
                )
            )
    for name, earlier, later in (
        ("all", plan.before.total_seconds, plan.after.total_seconds),
        ("exposed", plan.before.exposed_seconds, plan.after.exposed_seconds),
    ):
        rows.append((name, "", "", "", units.seconds(earlier), units.seconds(later), units.change(earlier, later)))
    return Table(
        "predicted communication of one rank in one step", columns, tuple(rows), frozenset(columns[2:]),
        ("time before", "bytes before"), frozenset(("phase", "link")),
    )  # fmt: skip


def _strategies(plan: PlanReport) -> Table:
    columns = ("strategy", "exposed", "plan vs it", "busiest rank", "all-to-all", "sync", "buffers", "all")
    costs = {**plan.baselines, "live placement": plan.before, "this plan": plan.after}
    rows = [_strategy(name, cost, plan.after) for name, cost in costs.items()]
    if plan.lower_bound_seconds is not None:
        rows.append(("lower bound", units.seconds(plan.lower_bound_seconds), *("" for _ in columns[2:])))
    return Table(
        "strategies under the same accesses (all-to-all and sync between nodes)", columns, tuple(rows),
        frozenset(columns[1:]), columns[3:], frozenset(columns[:1]),
    )  # fmt: skip


def _strategy(name: str, cost: CostReport, plan: CostReport) -> tuple[str, ...]:
    inter = cost.bytes.get("inter_node")
    return (
        name.replace("_", " "),
        units.seconds(cost.exposed_seconds),
        "" if cost is plan else units.change(cost.exposed_seconds, plan.exposed_seconds),
        units.seconds(cost.peak_exposed_seconds),
        units.size(inter.all_to_all if inter else None),
        units.size(inter.sync if inter else None),
        units.size(cost.buffer_bytes),
        units.seconds(cost.total_seconds),
    )


def _why(plan: PlanReport) -> list[Block]:
    thin = gate_sentences(plan.gates)
    blocks: list[Block] = [Sentences("a gate is closed: flexd apply takes it with --force only", thin)] if thin else []
    return blocks + _words(plan)


def _words(plan: PlanReport) -> list[Block]:
    return [Sentences("why", plan.replication.words)] if plan.replication.words else []


def replan_blocks(result: ReplanResult) -> list[Block]:
    blocks: list[Block] = [
        Sentences("", (f"{result.outcome}: {result.message}" if result.message else result.outcome,))
    ]
    if result.plan is not None:
        blocks.append(Facts("plan", plan_facts(result.plan)))
    if result.migration is not None:
        blocks.append(Facts("migration", migration_facts(result.migration)))
    return blocks


def proposal_blocks(proposals: ProposalList) -> list[Block]:
    if not proposals.proposals:
        return [Sentences("", ("no plan is kept: flexd plan makes one",))]
    columns = ("plan", "made", "for", "rows", "to copy", "saves a step", "can be applied")
    rows = tuple(
        (
            each.plan_id,
            units.when(each.created_unix_seconds),
            each.reason,
            units.count(each.promotions + each.demotions),
            units.size(each.migration_bytes),
            units.seconds(each.saved_seconds),
            _applicable(each),
        )
        for each in proposals.proposals
    )
    return [Table("", columns, rows, frozenset(("rows", "to copy", "saves a step")))]


def _applicable(proposal: ProposalReport) -> str:
    if proposal.outdated:
        return f"no: {proposal.outdated}"
    return f"with --force: closed gates {', '.join(proposal.closed_gates)}" if proposal.closed_gates else "yes"


def gate_sentences(gates: tuple[GateReport, ...]) -> tuple[str, ...]:
    """Return the faults of closed gates."""
    return tuple(gate.words for gate in gates if not gate.open)


def planning_block(planning: PlanningStatus) -> Facts:
    """Return the planning block of the status."""
    facts = [("mode", "automatic" if planning.auto else "proposes only")]
    if planning.held:
        facts.append(("held", planning.held))
    facts += [("no gain measured", words) for words in planning.verification.held]
    if planning.verification.newest is not None:
        newest = planning.verification.newest
        facts.append(
            (newest.state if newest.state != "running" else "measuring", f"{newest.migration_id}: {newest.words}")
        )
    if planning.window_changes_unix_seconds is not None:
        what = "closes" if planning.window_open else "opens"
        facts.append(("window", f"{what} at {units.when(planning.window_changes_unix_seconds)}"))
    if planning.waiting_for_window:
        facts.append(("waits", planning.waiting_for_window))
    if planning.refused:
        facts.append(("no plan", planning.refused))
    if planning.withheld:
        facts.append(("withheld", f"{planning.withheld} ({units.count(planning.plans.get('withheld', 0))} so far)"))
    said = f"{planning.refused} {planning.withheld}"
    facts += [("gate closed", words) for words in gate_sentences(planning.gates) if words not in said]
    own = [each for each in planning.proposals if not each.dry_run]
    if own:
        facts.append(("proposal", f"{own[0].plan_id} ({own[0].reason}): {_applicable(own[0])}"))
    return Facts("planning", tuple(facts))
