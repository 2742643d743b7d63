"""Text of proposals and gates."""

from __future__ import annotations

from flexd.api.planning import GateReport, PlanningStatus, ProposalList, ProposalReport
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.core import units


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
    return f"with --force: {', '.join(proposal.closed_gates)} too thin" if proposal.closed_gates else "yes"


def gate_sentences(gates: tuple[GateReport, ...]) -> tuple[str, ...]:
    """Return the faults of closed gates."""
    return tuple(gate.words for gate in gates if not gate.open)


def planning_block(planning: PlanningStatus) -> Facts:
    """Return the planning block of the status."""
    facts = [("mode", "automatic" if planning.auto else "proposes only")]
    if planning.held:
        facts.append(("held", planning.held))
    if planning.window_changes_unix_seconds is not None:
        what = "closes" if planning.window_open else "opens"
        facts.append(("window", f"{what} at {units.when(planning.window_changes_unix_seconds)}"))
    if planning.waiting_for_window:
        facts.append(("waits", planning.waiting_for_window))
    if planning.refused:
        facts.append(("no plan", planning.refused))
    facts += [("too thin", words) for words in gate_sentences(planning.gates) if words not in (planning.refused or "")]
    own = [each for each in planning.proposals if not each.dry_run]
    if own:
        facts.append(("proposal", f"{own[0].plan_id} ({own[0].reason}): {_applicable(own[0])}"))
    return Facts("planning", tuple(facts))
