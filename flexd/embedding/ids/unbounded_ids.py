"""Find the rows of unbounded ids: before a look-up, one exchange with the homes of the ids.

Each rank sends its distinct ids with their counts to their homes, which decide (``slot_table``) and answer with keys;
from there on the look-up is that of any table. A *resolution* holds what was decided and changes nothing until it is
applied, by the look-up itself or, of a batch that ``flexd.prefetch`` resolved ahead, when that batch is looked up. So
evaluation and checkpoints in between see the slots as they would without looking ahead.

An id that is admitted reads the shared row in the step in which it is, and its gradient trains that row and its own,
which begins at zero (``Resolution.sources``). Every rank learns which rows begin, and resets those that it holds,
copies too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.hop import Agreement, Hop
from flexd.embedding.exchange.route import FeatureKeys, Route, UnresolvedIds
from flexd.embedding.ids.answers import Answers
from flexd.embedding.ids.distinct_ids import distinct_ids, ids_by_set
from flexd.embedding.ids.id_sets import IdSets, UnboundedTable
from flexd.embedding.ids.slot_table import SlotDecisions, SlotTable
from flexd.embedding.step import in_backward_pass

if TYPE_CHECKING:
    from flexd.embedding.engine import RowEngine

_BONUS = 2
"""Steps by which twice as many uses count, in those in which the table sees as many look-ups as it has slots."""
_WINDOW_STEPS = 1024
_STATE_VERSION = 1


@dataclass(frozen=True)
class Resolution:
    """Rows of the ids of one look-up.

    Attributes:
        found: the keys of the batch, and of shared rows that ids read which were admitted in this step.
        decisions: of this rank's sets; None: ranks gave the look-up up.
        fresh: int64 [f] ascending addresses of the rows of ids that were admitted in this step; equal on all ranks.
        shared: int64 [f] the address of the shared row of each.
        every_shared: int64 [tables] ascending, the addresses of all shared rows.
        added: by dim-group that has any, the number of shared rows that ``found`` has behind those of the batch.
        counted: whether it is for training, and changes slots when it is applied.
        step, version: of ``UnboundedIds`` for which it was made.
        look_ups: look-ups over all ranks of each table.
    """

    found: FeatureKeys
    decisions: SlotDecisions | None
    fresh: torch.Tensor
    shared: torch.Tensor
    every_shared: torch.Tensor
    added: Mapping[int, int]
    counted: bool
    step: int
    version: int
    look_ups: Sequence[int]

    def sources(self, route: Route) -> dict[int, torch.Tensor]:
        """Return by dim-group int64 [rows], for each row of the route's first station the row whose value it has:
        itself, or the shared row if its id was admitted in this step."""
        found: dict[int, torch.Tensor] = {}
        fresh, shared = self.fresh, self.every_shared
        for group in self.added:
            keys = route.keys[0][group]
            rows = torch.arange(len(keys), device=keys.device)
            at = torch.searchsorted(fresh, keys).clamp_(max=len(fresh) - 1)
            begins = fresh.index_select(0, at) == keys
            table = torch.searchsorted(shared, keys).clamp_(max=len(shared) - 1)
            is_shared = shared.index_select(0, table) == keys
            row_of = rows.new_zeros(len(shared) + 1).scatter_(0, torch.where(is_shared, table, len(shared)), rows)
            of_fresh = torch.searchsorted(shared, self.shared.index_select(0, at))
            found[group] = torch.where(begins, row_of.index_select(0, of_fresh), rows)
        return found


@dataclass(frozen=True)
class BatchAhead:
    """Place of a batch that is resolved before it is looked up.

    Attributes:
        before: of the batch before it, which is being trained on; applied first, unless that was looked up with another
            input on any rank. None: it is applied.
        changed: bool [] on the device, as in ``Router.find``.
        steps: steps of the optimizer that are expected before it is looked up, 0 or 1.
    """

    before: Resolution | None
    changed: torch.Tensor | None
    steps: int


class UnboundedIds:
    """The ids of the unbounded tables of a collection, and this rank's part of their slots.

    Attributes:
        slots: of the sets whose home this rank is.
        step: of the last look-up for training that was applied, from 1; several look-ups before one step of the
            optimizer have the same.
        seen_steps, seen_look_ups: steps, and look-ups of each table over all ranks, of about the last 1,000 steps.
    """

    def __init__(
        self, engine: RowEngine, tables: Sequence[UnboundedTable], initial_states: Callable[[], Mapping[str, float]]
    ) -> None:
        self._engine, self._initial_states = engine, initial_states
        self._device = engine.stores[0].rows.device
        self.sets = IdSets(tables, self._device)
        self.numbers = {table.table: number for number, table in enumerate(self.sets.tables)}
        """Number in ``sets.tables`` of each table of the key space."""
        by_key = sorted(self.sets.tables, key=lambda table: table.first_key)
        self._first_keys, self._shared_keys = torch.tensor(
            [[table.first_key, table.first_key + table.slots] for table in by_key], device=self._device
        ).T.contiguous()
        self.version, self._answers = 0, Answers()
        self.reset()

    def reset(self) -> None:
        """Take all rows from their ids."""
        groups = self._engine.groups
        self.slots = SlotTable(self.sets, groups.rank, groups.layout.world_size, self._device)
        self.step, self.seen_steps, self.version = 0, 0, self.version + 1
        self.seen_look_ups = [0] * len(self.sets.tables)
        self._steps_before = -1

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's slots and filters, as they are used, and what the next decision depends on beside them.

        The shapes of ``slots.columns``, and ``progress``: int64 [4 + 2 tables] ``step``, ``seen_steps``, whether the
        optimizer has stepped since, the version of these columns, ``seen_look_ups`` and ``admit_after`` of each table.
        """
        stepped, after = self.next_step - self.step, [table.admit_after for table in self.sets.tables]
        numbers = [self.step, self.seen_steps, stepped, _STATE_VERSION, *self.seen_look_ups, *after]
        return {**self.slots.columns(), "progress": torch.tensor(numbers, device="cpu")}

    def load_state(self, columns: Mapping[str, torch.Tensor]) -> list[str]:
        """Go on from what ``state`` returned, after ``RowEngine.steps`` was set. On all ranks.

        Returns:
            Differences for which nothing is loaded.
        """
        mine = self.state()
        faults = [
            f"ids.{name}: shape {tuple(column.shape)}, this rank has {tuple(mine[name].shape)}"
            for name, column in columns.items()
            if column.shape != mine[name].shape
        ]
        if faults or columns.keys() != mine.keys():
            return faults
        tables = len(self.sets.tables)
        step, seen, stepped, version, *numbers = columns["progress"].tolist()
        after = [table.admit_after for table in self.sets.tables]
        if version != _STATE_VERSION or numbers[tables:] != after:
            return [f"ids.progress: version {version}, admit_after {numbers[tables:]}; here {_STATE_VERSION}, {after}"]
        for name, column in self.slots.columns().items():
            column.copy_(columns[name])
        self._go_on(step, seen, numbers[:tables], stepped=bool(stepped))
        return []

    def _go_on(self, step: int, seen_steps: int, look_ups: list[int], *, stepped: bool) -> None:
        self.step, self.seen_steps, self.seen_look_ups = step, seen_steps, look_ups
        self._steps_before, self.version = -1 if stepped else self._engine.steps, self.version + 1

    def loaded(self) -> None:
        """Note that slots were given away between two look-ups."""
        self._go_on(self.next_step, self.seen_steps, self.seen_look_ups, stepped=False)

    @property
    def admit_after(self) -> dict[str, int]:
        """Of each table by name."""
        return {table.name: table.admit_after for table in self.sets.tables}

    def progress(self) -> dict[str, Any]:
        """Return what the next decision depends on beside the slots, for JSON: ``step``, ``seen_steps``, whether the
        optimizer has ``stepped`` since, and ``look_ups`` of each table by name, as ``seen_look_ups``."""
        look_ups = {table.name: seen for table, seen in zip(self.sets.tables, self.seen_look_ups, strict=True)}
        return {
            "step": self.step, "seen_steps": self.seen_steps, "stepped": self.next_step > self.step,
            "look_ups": look_ups,
        }  # fmt: skip

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from what ``progress`` returned, after ``RowEngine.steps`` was set and the slots were loaded. Tables
        that it lacks begin."""
        look_ups = [progress["look_ups"].get(table.name, 0) for table in self.sets.tables]
        self._go_on(progress["step"], progress["seen_steps"], look_ups, stepped=progress["stepped"])

    @property
    def next_step(self) -> int:
        """Step of a look-up for training now."""
        return self.step + (self._engine.steps != self._steps_before)

    def is_current(self, resolution: Resolution, *, trains: bool) -> bool:
        """Return whether the same would be decided now. Equal on all ranks.

        Args:
            trains: as in ``resolve``.
        """
        current = resolution.decisions is not None and resolution.version == self.version
        return current and resolution.counted == trains and resolution.step == self.next_step

    @torch.no_grad()
    def apply(self, resolution: Resolution) -> None:
        """Give slots to the ids that were admitted, and begin their rows. On all ranks."""
        if not resolution.counted or resolution.decisions is None:
            return
        self.slots.apply(resolution.decisions)
        self.seen_steps, self.seen_look_ups = self._seen(resolution.step, resolution.look_ups)
        self.step, self._steps_before, self.version = resolution.step, self._engine.steps, self.version + 1
        if len(resolution.fresh):
            self._engine.begin_rows(resolution.fresh, self._initial_states())

    def _seen(self, step: int, look_ups: Sequence[int]) -> tuple[int, list[int]]:
        """Return ``seen_steps`` and ``seen_look_ups`` after a look-up."""
        steps = self.seen_steps + (step > self.step)
        totals = [before + now for before, now in zip(self.seen_look_ups, look_ups, strict=True)]
        if steps <= _WINDOW_STEPS:
            return steps, totals
        return steps // 2, [total // 2 for total in totals]

    def meet(self, agreement: Agreement, world: Peers) -> Agreement:
        """Collective. Exchange the first message of ``resolve`` without ids, as ``Router.meet``."""
        return _hop(world).meet(agreement, 1 + len(self.sets.tables), self._device)

    @torch.no_grad()
    def resolve(
        self,
        found: FeatureKeys,
        agreement: Agreement,
        world: Peers,
        *,
        trains: bool,
        ahead: BatchAhead | None = None,
    ) -> Resolution:
        """Collective. Find the rows of the ids of this rank's batch.

        Args:
            world: all ranks.
            trains: ids are counted and admitted, unless a backward pass looks them up again. Equal on all ranks.
            ahead: the batch is not looked up yet.
        """
        again = in_backward_pass()
        counted = trains and not again
        hop = _hop(world)
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        size, tables = world.size, len(self.sets.tables)
        given = found.unresolved or UnresolvedIds(none, none, none, [0] * tables)
        several = tables > 1
        hashes = self.sets.hashes(given.ids)
        chosen, number = distinct_ids(given.ids, hashes, given.numbers if several else None, waits=False)
        # Where the host does not know how many ids are distinct, those behind them are no one's.
        is_id, chosen = chosen < len(given.ids), chosen.clamp(max=len(given.ids) - 1)
        ids, numbers = given.ids.index_select(0, chosen), given.numbers.index_select(0, chosen)
        sets = self.sets.of_hashes(hashes.index_select(0, chosen), numbers)
        home = torch.where(is_id, sets % size, size)
        by_home = devices.stable_order_of(home)
        ends = torch.arange(size + 1, device=self._device)
        sent = torch.searchsorted(home.index_select(0, by_home), ends).diff()
        trained = [int(counted and table.name not in self._engine.keyspace.read_only) for table in self.sets.tables]
        look_ups = [n * of_table for n, of_table in zip(given.sizes, trained, strict=True)]
        columns = torch.cat([sent.unsqueeze(1), devices.uploaded(look_ups, self._device).expand(size, tables)], dim=1)
        changed = None if ahead is None else ahead.changed
        requested, served, agreement, _ = hop.exchange_sizes(columns, agreement, found.faulty, changed=changed)
        step = self.step if again else self.next_step
        if ahead is not None:
            if ahead.before is not None and not agreement.changed:
                self.apply(ahead.before)
            step = self.next_step + ahead.steps
        resolution = Resolution(
            replace(found, unresolved=None), None, none, none, none, {}, counted, step, self.version,
            served[:, 1:].sum(axis=0).tolist(),
        )  # fmt: skip
        if agreement.fault or agreement.diverged:
            return resolution
        asked, answered = requested[:, 0].tolist(), served[:, 0].tolist()
        by_home = by_home[: sum(asked)]
        counts = devices.sum_by_place(number, None, len(chosen))
        counts.mul_(self.sets.of_each(devices.uploaded(trained, self._device), numbers))
        words = [ids.view(-1, 1), counts.to(torch.int32).view(-1, 1), numbers.to(torch.int32).view(-1, 1)]
        message = devices.packed(*words[: 2 + several]).index_select(0, by_home)
        width = message.shape[1]
        arrived = world.all_to_all(message.view(-1), [width * n for n in asked], [width * n for n in answered])
        asks = devices.unpacked(arrived.view(-1, width), words[: 2 + several])
        decisions, slots, fresh = self._decide([each.view(-1) for each in asks], resolution, seeded=trains)
        slots, begun = self._answers.exchange(world, slots, fresh, asked, answered)
        keys = self.sets.keys(sets.index_select(0, by_home), slots)
        keys = torch.empty_like(sets).index_copy_(0, by_home, keys).index_select(0, number)
        resolution = replace(resolution, decisions=decisions)
        return self._resolved(resolution, given, keys, begun)

    def _decide(
        self, asks: Sequence[torch.Tensor], resolution: Resolution, *, seeded: bool
    ) -> tuple[SlotDecisions, torch.Tensor, torch.Tensor]:
        """Decide about ids that arrived.

        Args:
            asks: [n] ids, counts and, of several tables, their numbers in ``IdSets.tables``.

        Returns:
            (decisions; int64 [n] slots; int64 [f] keys of those that begin).
        """
        ids, counts = asks[:2]
        numbers = asks[2].to(torch.int64) if len(asks) > 2 else torch.zeros_like(ids)
        world = self._engine.groups.layout.world_size
        hashes = self.sets.hashes(ids)
        sets = torch.div(self.sets.of_hashes(hashes, numbers), world, rounding_mode="floor")
        chosen, number = ids_by_set(sets, ids, hashes, several=len(asks) > 2)
        counts = devices.sum_by_place(number, counts.to(torch.int64), len(chosen))
        sets, ids = sets.index_select(0, chosen), ids.index_select(0, chosen)
        steps, look_ups = self._seen(resolution.step, resolution.look_ups)
        every = self.slots.global_sets(sets)
        of_ids = self.bonus(every, steps, look_ups)
        decisions = self.slots.decide(sets, ids, counts, resolution.step, of_ids)
        slots = decisions.slots if seeded else torch.where(decisions.fresh, -1, decisions.slots)
        begun = (decisions.fresh & seeded).nonzero().view(-1)
        fresh = self.sets.keys(every.index_select(0, begun), slots.index_select(0, begun))
        return decisions, slots.index_select(0, number), fresh

    def bonus(self, sets: torch.Tensor, steps: int, look_ups: Sequence[int]) -> torch.Tensor:
        """Return int64 [n], of int64 [n] sets the steps by which twice as many uses outweigh a later last use, after so
        many steps with so many look-ups of each table."""
        of_tables = [
            max(1, _BONUS * table.slots * steps // max(1, total))
            for table, total in zip(self.sets.tables, look_ups, strict=True)
        ]
        return self.sets.of_each(devices.uploaded(of_tables, self._device), self.sets.numbers(sets))

    def _resolved(
        self, resolution: Resolution, given: UnresolvedIds, keys: torch.Tensor, begun: torch.Tensor
    ) -> Resolution:
        """Put int64 [n] keys of the ids of the batch in their places.

        Args:
            begun: int64 [f] keys of the rows that begin.
        """
        homes, found = self._engine.stores[0].homes, resolution.found
        bags = found.keys[:0] if found.bags is None else found.bags.keys
        every = torch.cat([found.keys, bags]).index_copy_(0, given.places, homes.addresses(keys))
        of_rows, of_bags = every.split_with_sizes([len(found.keys), len(bags)])
        if found.bags is not None:
            found = replace(found, bags=replace(found.bags, keys=of_bags))
        found = replace(found, keys=of_rows)
        if not len(begun):
            return replace(resolution, found=found)
        number = torch.searchsorted(self._first_keys, begun, right=True) - 1
        begun, order = homes.addresses(begun).sort()
        shared = homes.addresses(self._shared_keys)
        one_table = len(self.sets.tables) == 1
        of_tables = [1] if one_table else torch.zeros_like(shared).index_fill_(0, number, 1).tolist()
        by_key = sorted(self.sets.tables, key=lambda table: table.first_key)
        tables = tuple(table.table for table, begins in zip(by_key, of_tables, strict=True) if begins)
        added = [shared[at] for at, begins in enumerate(of_tables) if begins]
        groups = self._engine.keyspace.group_of_table[list(tables)].tolist()
        # Every rank looks up the shared rows too, after the others of their dim-groups: any may have such ids.
        parts, numbers = [[part] for part in found.keys.split_with_sizes(found.numbers)], list(found.numbers)
        for group, address in zip(groups, added, strict=True):
            parts[group].append(address.view(1))
            numbers[group] += 1
        found = replace(found, keys=torch.cat([part for of_group in parts for part in of_group]), numbers=numbers)
        return replace(
            resolution, found=found, fresh=begun, shared=shared[number][order], every_shared=shared.sort().values,
            added={group: groups.count(group) for group in sorted({*groups})},
        )  # fmt: skip


def _hop(world: Peers) -> Hop:
    return Hop(world, lambda homes: homes)
