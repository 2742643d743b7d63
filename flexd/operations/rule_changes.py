"""Changes home rules and answers of a running job: from observed traffic, by the problem over tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flexd.config.planner import PlannerConfig
from flexd.control.daemon.coordinator_types import LiveTopology
from flexd.core.errors import PlanError
from flexd.core.home_block import ChangedRule, ChangedRules
from flexd.core.home_changes import after_block
from flexd.core.homes import Homes
from flexd.core.keyspace import KeySpace
from flexd.core.layout import Tier
from flexd.core.placement import Placement
from flexd.operations.executions import Execution, Executions
from flexd.operations.live_kernels import LiveKernels
from flexd.operations.plan_settings import settings_of_job, training_shape
from flexd.operations.triggers import Trigger
from flexd.planner.model.bag_answers import LENGTH_RANKS
from flexd.planner.tables.live_rules import RuleChanges, plan_rule_changes
from flexd.planner.tables.table_work import TableWork
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster

_NAME = "-rules"
"""End of the ids of such migrations."""

LengthQuantiles = Callable[[str, Sequence[float]], npt.NDArray[np.float64]]


@lru_cache(maxsize=4)
def live_keyspace(keyspace: KeySpace, changed: ChangedRules) -> KeySpace:
    """Return the tables with their rules of now: keys stay, and rows of a table that is on its way have a rule for
    which no plan copies rows."""
    if not changed.tables:
        return keyspace
    tables = list(keyspace.tables)
    for one in changed.tables:
        rule = one.lower if one.lower is not None and one.upper.spread else one.upper
        tables[one.table] = replace(tables[one.table], homes=str(rule))
    return KeySpace(tables)


def live_homes(keyspace: KeySpace, topology: LiveTopology, changed: ChangedRules) -> Homes:
    """Return a map with the live rules and the room that ranks have. Their slots may be cut up otherwise.

    Raises:
        PlacementError: the rules found no room in this order.
    """
    homes = Homes(keyspace, topology.layout, spare=topology.spare_home_slots)
    for one in changed.tables:
        unchanged = ChangedRule(one.table, one.rows, one.first, one.first)
        for block in unchanged.blocks_to(one.upper, one.lower, one.boundary):
            homes = after_block(homes, block)
    return homes


def _can_move(topology: LiveTopology) -> bool:
    return topology.changes_rules and any(topology.spare_home_slots)


def _free_answers(settings: PlannerConfig, topology: LiveTopology) -> frozenset[str]:
    """Return the pooled tables whose answers may change: sums make no use of copies that pins ask for."""
    if not topology.changes_answers:
        return frozenset()
    pinned = {pin.table for pin in settings.pins if Tier[pin.tier] is not Tier.HOME}
    return frozenset(settings.pooled_tables).difference(settings.exclude_tables, pinned)


@dataclass(frozen=True)
class PlannedRules:
    """Rules and answers as they are to be.

    Attributes:
        changes: what the plan says of them.
        target: the placement with them, and without the tiers of rows whose table gets another rule, or sums.
        words: the change of each table in words.
    """

    changes: RuleChanges
    target: Placement
    words: tuple[str, ...]


class RuleChanger:
    """Plans rules and answers, and starts their migrations. Only the daemon's planning thread calls ``start``.

    Attributes:
        outcome: of the newest attempt, in words; empty before the first.
        planned: of the newest attempt; None before the first.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        executions: Executions,
        lengths: LengthQuantiles | None = None,
        kernels: LiveKernels | None = None,
    ) -> None:
        self._kernels = kernels
        self._keyspace = keyspace
        self._executions = executions
        self._lengths = lengths
        self._serial = 0
        self.outcome = ""
        self.planned: PlannedRules | None = None

    @property
    def running(self) -> bool:
        """True while rules or answers are changing."""
        last = self._executions.last
        return last is not None and not last.migration.done and last.migration.migration_id.endswith(_NAME)

    @staticmethod
    def allowed(settings: PlannerConfig, topology: LiveTopology) -> bool:
        """Return whether rules or answers may change, and can."""
        return settings.change_home_rules and (_can_move(topology) or bool(_free_answers(settings, topology)))

    def plan(
        self, profile: Profile, topology: LiveTopology, cluster: Cluster, live: Placement, settings: PlannerConfig
    ) -> PlannedRules:
        """Return the rules and answers that shorten a step most.

        Raises:
            PlanError, PlacementError: none can be found.
        """
        settings = settings_of_job(settings, None, self._keyspace.tables, live.answers)
        work = TableWork.of(profile, self._keyspace, topology.layout, training_shape(settings))
        bags = np.zeros(len(work.names))
        for index, seen in enumerate(profile.tables):
            lengths = None if self._lengths is None else self._lengths(seen.table, LENGTH_RANKS)
            if seen.table in settings.pooled_tables and lengths is not None and len(lengths) and lengths.mean() > 0:
                bags[index] = seen.accesses_per_step / topology.layout.world_size / float(lengths.mean())
        sums = {name for name, answer in settings.pooled_tables.items() if answer == "sums"}
        homes = live_homes(self._keyspace, topology, live.homes)
        kernels = None if self._kernels is None else self._kernels.costs(corrected=settings.correct_prices)
        changes = plan_rule_changes(
            replace(work, bags=bags), homes, cluster, settings.horizon_steps, by_sums=sums,
            fixed=frozenset(settings.exclude_tables), free_answers=_free_answers(settings, topology),
            moves=_can_move(topology), kernels=kernels,
        )  # fmt: skip
        rules, words = live.homes, dict[int, str]()
        for table, rule in changes.rules.items():
            spec = self._keyspace.tables[table]
            first = self._keyspace.home_rules[table]
            now = rules.of_table(table) or ChangedRule(table, spec.rows, first, first)
            words[table] = f"{now} becomes {rule}"
            for block in now.blocks_to(rule):
                rules = rules.after(block)
        for table in sorted((*changes.answers.rows, *changes.answers.sums)):
            told = f"answers by {changes.answers.answer_of(table)}"
            words[table] = f"{words[table]}, {told}" if table in words else told
        home = [*changes.rules, *changes.answers.sums]
        stays = ~np.isin(self._keyspace.table_of(live.keys), home)
        answers = live.answers.then(changes.answers)
        target = Placement(live.keys[stays], live.tiers[stays], live.version, rules, answers)
        told_of = tuple(f"table {self._keyspace.tables[table].name}: {text}" for table, text in words.items())
        return PlannedRules(changes, target, told_of)

    def start(
        self,
        profile: Profile,
        topology: LiveTopology,
        cluster: Cluster,
        live: Placement,
        settings: PlannerConfig,
        trigger: Trigger,
        step_seconds: float | None,
    ) -> Execution | None:
        """Start the migration to better rules and answers; None if those that there are stay.

        Raises:
            ControlError: the coordinator is stopping.
        """
        try:
            planned = self.planned = self.plan(profile, topology, cluster, live, settings)
        except PlanError as error:
            self.outcome = error.message
            return None
        saved = planned.changes.saved_seconds
        required = max(settings.min_saving.seconds, settings.min_saving.share * (step_seconds or 0.0))
        stay = not planned.words or saved < required
        if self._kernels is not None:
            # Steps after a change have other rules than those that were priced.
            self._kernels.expect(planned.changes.live_kernel_seconds if stay else None)
        if stay:
            self.outcome = f"rules stay: others would save {1e6 * saved:.1f} us a step"
            return None
        self._serial += 1
        self.outcome = f"{'; '.join(planned.words)}: {1e6 * saved:.1f} us a step less on the busiest rank"
        return self._executions.start_move(
            f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._serial}{_NAME}", planned.target, topology.generation,
            Trigger(trigger.kind, f"{trigger.reason}; {self.outcome}", trigger.who), topology,
        )  # fmt: skip
