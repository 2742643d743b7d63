"""The rows of one rank: looked up, trained, replicated and migrated, independent of the module that has the ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, TypeVar

import torch

from flexd.control.agent.inbox import ChunkInbox
from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace
from flexd.core.sharding_types import NO_POOLED, PooledTables
from flexd.core.step_phases import ExchangeReason, StepPhase
from flexd.embedding.exchange.arms import AgreedArm, hops_of, wires_of
from flexd.embedding.exchange.calls import StepGuard, in_phase
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.hop import (
    CLIPS,
    NO_FLAGS,
    STEPS,
    Agreement,
    CallSignature,
    NextBatch,
    digest_of_settings,
)
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.exchange.route import FeatureKeys
from flexd.embedding.exchange.router import Router
from flexd.embedding.pending_passes import agree_on_sending, warn_of_idle
from flexd.embedding.rank_rows import RankRows, RowSettings
from flexd.embedding.replicas.replica_sync import ReplicaSync, RowGradients
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.row_optimizers import OptimizersByGroup, RowUpdate
from flexd.embedding.step import ForwardPass, RoutedInput, StepGradients, StepMoments

if TYPE_CHECKING:
    from flexd.embedding.ids.unbounded_ids import Resolution, UnboundedIds
    from flexd.embedding.store.slow.tiered_storage import TieredStorage
    from flexd.embedding.tuning import StepTuner

Joined = TypeVar("Joined", bound=StepMoments)
Found = TypeVar("Found")


class RowEngine:
    """The rows that one rank holds and the exchange with the others. Methods marked as collective run on all ranks.

    A step is: ``prepare`` and ``find`` for each forward pass, ``open_pass`` if it trains, ``fetch`` its rows,
    ``reduce`` in its backward pass; then ``push`` once, which updates all rows touched since the last one.

    Args:
        replica_slots, tiered_storage, keep_keys: as in ``RowSettings``.
        exchange: "auto", "chain" or "direct", as in ``EmbeddingCollection``.
        gradient_scale: gradients are multiplied by it.
        comm_dtype: as in ``EmbeddingCollection``.
        pooling_at: of pooled tables.

    Raises:
        EmbeddingError: an unknown exchange, or an unknown way to sum gradients of copies.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        groups: ChainGroups,
        traffic: Traffic,
        *,
        replica_slots: Sequence[int],
        exchange: str,
        gradient_scale: float,
        max_migration_bytes_per_step: int,
        device: torch.device,
        comm_dtype: str | Sequence[str | None] | None = None,
        tiered_storage: TieredStorage | None = None,
        pooling_at: PooledTables = NO_POOLED,
        keep_keys: bool = False,
    ) -> None:
        self._tiered_storage = tiered_storage
        self.groups = groups
        self.passes: list[ForwardPass] = []
        """Passes whose gradients are not pushed yet, oldest first; equally many on every rank."""
        self.summed_passes = 0
        """Passes so far whose gradients were summed at their rows."""
        self.guard = StepGuard(groups.rank, groups.notices, self.passes)
        settings = RowSettings(
            replica_slots, max_migration_bytes_per_step, device, tiered_storage, keep_keys, self._rows_changed
        )
        self._hold(RankRows(keyspace, groups, settings))
        self.joined: list[StepMoments] = []
        """Joined in each step, in this order."""
        self.loops: list[NextBatch] = []
        """Of the loops that run and that ranks may end at different batches, the innermost last."""
        self.look_ups = self.prefetched_batches = self.unused_batches = 0
        """Look-ups; batches given to be located ahead; those of them that were located twice, because what was
        announced was not what was looked up."""
        self.ids: UnboundedIds | None = None
        """Set where tables have unbounded ids."""
        self.loads = 0
        """Times that any rows may have been replaced from outside."""
        automatic = exchange == "auto"
        wires = wires_of(comm_dtype)
        self.arm = AgreedArm("chain" if automatic else exchange, wires=wires)
        # With one node, or one rank in each, both exchanges are the same.
        differ = automatic and min(groups.layout.nodes, groups.layout.local_ranks) > 1
        self._exchanges = ("chain", "direct") if differ else (self.arm.exchange,)
        chooses = differ or len(wires) > 1
        if groups.rank == 0 or not automatic:
            self.arm.reason = ExchangeReason.START if automatic else ExchangeReason.CONFIGURED
        self.pooling_at = pooling_at
        self.router, self.sync = self.new_exchange(groups, traffic)
        self.phases = traffic.phases
        """Meter of the training thread."""
        rows = self.rows
        self.inbox = ChunkInbox(
            self.homes, groups.rank, rows.replica_slots, self.migrator.rows_at_tiers, self.migrator.prepare
        )
        self.step_tuner: StepTuner | None = None
        """Made by ``tuner``; None before."""
        if chooses:
            self.tuner()
        if tiered_storage is not None:
            self.joined += tiered_storage.division(self.stores)
        self.steps = self.row_changes = self._changes_at_home = 0
        self.settings = ""
        """Settings of the optimizer in the last update, and their digest (``SETTINGS_BITS``)."""
        self.settings_digest = 0
        self.apply_seconds = 0.0
        self._scale = gradient_scale
        self._warned_of_idle = False
        self.max_migration_bytes = max_migration_bytes_per_step
        self.stale_replicas = self.migrator.list_copied_tables()
        """True if copies of rows are refreshed before the next look-up. Equal on all ranks."""
        self.summed: StepGradients | None = None
        """Gradients that are summed at their rows and wait for ``push``."""

    def _hold(self, rows: RankRows) -> None:
        self.rows = rows
        self.keyspace, self.homes, self.stores, self.migrator = rows.keyspace, rows.homes, rows.stores, rows.migrator
        self.trained = rows.trained
        """Of each dim-group: whether its rows are trained."""
        self.trains = any(self.trained)

    def use(self, rows: RankRows) -> None:
        """Go on with the same rows in other dim-groups. No pass, gradient or route may wait; on all ranks."""
        before = self.rows
        self._hold(rows)
        before.close_others(rows)
        rows.resize()
        self.router, self.sync = self.new_exchange(self.groups, self.router.traffic)
        self.inbox.regroup(
            self.homes, rows.replica_slots, self.migrator.rows_at_tiers, self.migrator.prepare, self.migrator.placement
        )
        # Copies have no values yet.
        self.stale_replicas, self.row_changes = True, self.row_changes + 1
        self.joined[:] = [each for each in self.joined if each.regrouped(before, rows)]
        if self._tiered_storage is not None:
            self.joined += self._tiered_storage.division(self.stores)

    def new_exchange(self, groups: ChainGroups, traffic: Traffic) -> tuple[Router, ReplicaSync]:
        """Make a router and a replica synchronisation of these stores over other process groups."""
        make = Router
        if self.pooling_at.at_owner:
            from flexd.embedding.exchange.bag_exchange import SummingRouter

            make = SummingRouter
        router = make(self.stores, hops_of(self.arm.exchange, groups), traffic, self.arm.wire or None)
        return router, ReplicaSync(self.stores, router, groups.layout, self._rows_changed)

    def join(self, kind: type[Joined], *arguments: object) -> Joined:
        """Return the one of this kind that has joined the steps; made from the arguments if there is none yet."""
        for one in self.joined:
            if isinstance(one, kind):
                return one
        made = kind(*arguments)
        self.joined.append(made)
        return made

    def tuner(self) -> StepTuner | None:
        """Return what chooses the arm of the steps; None on ranks that follow the one that does."""
        if self.step_tuner is None and self.groups.rank == 0:
            from flexd.embedding.tuning import StepTuner  # loaded where a job has a choice

            inbox = self.inbox
            self.step_tuner = StepTuner(
                self.arm, self._exchanges, lambda: inbox.priced_exchange, lambda: inbox.applied_version,
                self.phases.waited_and_outside,
            )  # fmt: skip
            self.joined.append(self.step_tuner)
        return self.step_tuner

    def _rows_changed(self, parts: Sequence[tuple[int, torch.Tensor]], *, all_rows: bool = False) -> None:
        for each in self.joined:
            each.changed(parts, all_rows=all_rows)

    def claim(self, given: object, *, usable: bool, trains: bool) -> RoutedInput | None:
        """Return the input of a forward pass if it was located before, as ``StepMoments.claim``."""
        return _first(each.claim(given, usable=usable, trains=trains) for each in self.joined)

    def prepare(self) -> None:
        """Collective. Refresh replicas if home rows were loaded, and apply the chunks that all ranks agreed on.

        Chunks wait while gradients wait for their push or a route was found before its forward pass: both go by the
        placement of their time.
        """
        with self.calling():
            self._prepare()

    def _prepare(self) -> None:
        for each in self.joined:
            each.settle()
        if self.stale_replicas:
            self.migrator.refresh()
            self.stale_replicas = False
        if self.summed is not None and self.summed.overflowed:
            self.summed = None  # their step was skipped, on every rank
        if self.migrator.carrier is not None:  # no fetch followed the last chunk: the pass was given up
            self.migrator.complete()
        if not self.passes and self.summed is None and not any(each.holds_route for each in self.joined):
            self._change_exchange()
            self._apply_chunks()

    def _change_exchange(self) -> None:
        """Use the exchange and wire that all ranks have agreed on."""
        if not self.arm.due:
            return
        self.arm.exchange, self.arm.wire = self.arm.next.exchange, self.arm.next.wire
        for groups, router in ((self.groups, self.router), *(pair for each in self.joined for pair in each.exchanges)):
            router.use(hops_of(self.arm.exchange, groups), self.arm.wire or None)

    def find(
        self,
        found: FeatureKeys,
        fault: int = 0,
        *,
        trains: bool = False,
    ) -> ForwardPass:
        """Collective. Find the route of keys, repeats allowed.

        Args:
            trains: the pass will be opened; equal on all ranks.
            fault: 1 + this rank if its input cannot be looked up (there are no keys then). The highest of all ranks
                is in the route's agreement: every rank must give the pass up if it is not 0, or if ranks diverged.
        """
        self.groups.world.finish_on_device()
        call = CallSignature.of(self.groups.rank, steps=self.steps, passes=len(self.passes), flag=trains)
        with self.calling():
            touched = self.sync.new_touched() if trains else None
            forward_pass = self._find(found, call, self.settings_digest, fault, touched, trains=trains)
            if self.ids is not None and forward_pass.resolution is not None:
                self.ids.apply(forward_pass.resolution)
            return forward_pass

    @property
    def admit_after(self) -> dict[str, int]:
        """Of tables of unbounded ids by name, ``UnboundedTable.admit_after``."""
        return {} if self.ids is None else self.ids.admit_after

    def begin_rows(self, addresses: torch.Tensor, states: Mapping[str, float]) -> None:
        """Begin int64 [n] rows anew, as ``RankRows.begin_rows``. On all ranks."""
        self._rows_changed(self.rows.begin_rows(addresses, states))
        self.row_changes += 1

    def _find(
        self,
        found: FeatureKeys,
        call: CallSignature,
        settings_digest: int,
        fault: int = 0,
        touched: TouchedRows | None = None,
        *,
        trains: bool = False,
    ) -> ForwardPass:
        version, proposed = self.inbox.begin_exchange(), self.arm.proposed
        loop = self.loops[-1] if self.loops else None
        flags = NO_FLAGS if loop is None else loop.mine
        agreement = Agreement(version, fault, call, call, (settings_digest,) * 2, proposed, flags)
        self.look_ups += 1
        look_up = self.look_ups
        resolution: Resolution | None = None
        if self.ids is not None:
            resolution = self.ids.resolve(found, agreement, self.groups.world, trains=trains)
            found = resolution.found
        route = self.router.find(found, agreement, touched)
        for each in self.joined:
            each.located(look_up)
        self.inbox.end_exchange(route.agreement.version)
        self.arm.agreed(route.agreement.arm)
        if loop is not None:
            loop.agreed = route.agreement.flags
        return ForwardPass(route, touched, self.trained, resolution)

    def meet(self, passes: int, digest: int, *, flag: bool = False, fault: int = 0) -> Agreement:
        """Collective. Exchange the messages of a look-up without keys, and raise EmbeddingError if ranks make different
        calls.

        Args:
            passes: ``READS_TABLES`` or another such call; its further arguments are those of ``Agreement``.
        """
        call = CallSignature.of(self.groups.rank, steps=self.steps, passes=passes, flag=flag)
        self.groups.world.finish_on_device()
        no_keys = torch.empty(0, dtype=torch.int64, device=self.stores[0].rows.device)
        with self.calling(), self.router.traffic.uncounted():
            keys = FeatureKeys([], no_keys, None, [0] * len(self.stores))
            agreement = self._find(keys, call, digest, fault).route.agreement
        agreement.check_calls(self.keyspace.tables)
        return agreement

    def open_pass(self, forward_pass: ForwardPass) -> None:
        """Let a pass wait for its backward pass and the next ``push``."""
        self.guard.step_thread = threading.current_thread()
        self.passes.append(forward_pass)

    def drop_pass(self, forward_pass: ForwardPass) -> None:
        """Forget a pass whose rows no backward pass will use. On all ranks."""
        self.passes[:] = [one for one in self.passes if one is not forward_pass]

    def fetch(self, forward_pass: ForwardPass, *, expand: bool = True) -> list[torch.Tensor]:
        """Collective. Return per dim-group [requests of this rank, dim]; without ``expand`` the distinct rows of the
        route's first station, [rows, dim], and after them, if some features are pooled at the owner, [bags, dim]."""
        with self.calling():
            at_once = expand and not forward_pass.sources
            rows = _first(each.fetch_ahead(forward_pass, expand=at_once) for each in self.joined)
            if rows is None:
                rows = self.router.fetch(
                    forward_pass.route, forward_pass.touched, expand=at_once, chunk=self.migrator.carrier
                )
                self.migrator.carrier = None
            if forward_pass.sources:
                rows = forward_pass.with_sources(rows, expand=expand)
            rows = [*rows, *self.router.sums(forward_pass.route, rows)]
            for each in self.joined:
                each.fetched()
            return rows

    def reduce(self, forward_pass: ForwardPass, grads: Sequence[torch.Tensor], *, expanded: bool = True) -> None:
        """Add the gradients of one backward pass, shaped as ``fetch`` returned the rows."""
        if not any(one is forward_pass for one in self.passes):
            raise EmbeddingError(
                f"rank {self.groups.rank}: a backward pass after the gradients of its look-up were summed, by "
                "optimizer.step(), clipping or unscaling",
                remedy="run all backward passes of a look-up before these, or look the rows up again",
            )
        with self.guard.publishing():  # autograd calls it in a thread of its own on an accelerator
            of_rows, of_bags = list(grads[: len(self.stores)]), list(grads[len(self.stores) :])
            reduced = self.router.reduce(forward_pass.pushed, of_rows) if expanded else of_rows
            forward_pass.add(reduced, self.router.wide)
            forward_pass.add_of_bags(of_bags, self.router.wide)

    def drop_gradients(self) -> None:
        # The passes stay: their backward may be still to come, and every rank must push the same number of them.
        for forward_pass in self.passes:
            forward_pass.grads = forward_pass.bag_grads = None
        self.summed = None

    def gradients(self) -> StepGradients | None:
        """Collective. Sum the gradients of all passes since the last step at their rows; None without any pass.

        They must be pushed on all ranks, or dropped on all.
        """
        if self.passes:
            with self.calling():
                summed = self._sum_passes(defer=False)
            if self.summed is None:
                self.summed = StepGradients(summed, self.stores, self.groups.world)
            else:
                self.summed.add(summed)
        return self.summed

    def push(self, optimizer: RowUpdate) -> None:
        """Collective. Update the rows by the gradients of all passes since the last step; nothing without any."""
        with self.calling():
            is_updated = self._push(optimizer)
        if is_updated:
            for each in self.joined:
                each.updated(optimizer, self.steps)

    def _push(self, optimizer: RowUpdate) -> bool:
        if optimizer.moves_at_zero:
            self._warned_of_idle |= warn_of_idle(self, warns=not self._warned_of_idle)
        if self.passes and self.summed is None:
            self.summed = StepGradients(self._sum_passes(defer=True), self.stores, self.groups.world)
        summed = self.gradients()
        if summed is None:
            return False  # nothing was looked up for training on any rank
        self.summed = None
        self.steps, self.row_changes = self.steps + 1, self.row_changes + 1
        factor = summed.factor
        self.settings = repr(optimizer) if factor == 1.0 else f"{optimizer!r}, gradients times {factor!r}"
        self.settings_digest = digest_of_settings(self.settings)
        self.sync.update(summed.scaled(factor), optimizer, self.steps)
        return True

    def count_read(self) -> None:
        """Count a look-up for training without any row to train as a step."""
        self.steps += 1
        for each in self.joined:
            each.updated(OptimizersByGroup(()), self.steps)

    def _sum_passes(self, *, defer: bool) -> list[RowGradients]:
        """Collective. Carry the gradients of all open passes to the rows, each row's once; with ``defer`` not those
        that are deferred."""
        agree_on_sending(self, STEPS if defer else CLIPS)
        self._spread_bags()
        split = _first(each.split_gradients(defer=defer) for each in self.joined)
        if split is None:
            touched = self.sync.agree([(forward_pass.pushed, forward_pass.touched) for forward_pass in self.passes])
            parts = [(forward_pass.pushed, self._scaled(forward_pass)) for forward_pass in self.passes]
        else:
            touched = split.touched
            parts = [split.split(number, self._scaled(one)) for number, one in enumerate(self.passes)]
        self.summed_passes += len(self.passes)
        self.passes.clear()
        return self.sync.push(parts, touched)

    def _spread_bags(self) -> None:
        """Collective. Add the gradients of bags pooled at the owner to those of the rows of the open passes."""
        if all(one.route.bags is None for one in self.passes):  # as on every rank
            return
        of_rows = self.router.spread([(one.pushed, one.bag_grads) for one in self.passes])
        for forward_pass, grads in zip(self.passes, of_rows, strict=True):
            forward_pass.add(grads, self.router.wide)

    def _scaled(self, forward_pass: ForwardPass) -> list[torch.Tensor]:
        if forward_pass.grads is None:
            return [
                store.rows.new_zeros((first.rows, store.group.dim), dtype=wide)
                for store, first, wide in zip(
                    self.stores, forward_pass.pushed.stations[0], self.router.wide, strict=True
                )
            ]
        grads = forward_pass.grads_of_sources()
        return grads if self._scale == 1.0 else list(torch._foreach_mul(grads, self._scale))

    def before_rows_load(self, rows: tuple[int, torch.Tensor] | None = None) -> None:
        """Collective with the prefetch pipeline or re-homed rows. Call it before home rows or their state are replaced
        from outside: replicas are refreshed before the next pass, and rows that were fetched early are fetched again.

        Args:
            rows: dim-group and int64 [n] home slots of this rank that are replaced; None: any.
        """
        self.discard()
        self._rows_changed([] if rows is None else [rows], all_rows=rows is None)
        self.stale_replicas, self.row_changes = True, self.row_changes + 1
        self.loads += rows is None

    def discard(self) -> None:
        """Collective with the prefetch pipeline or re-homed rows. Make home rows current, and drop rows that were
        fetched early."""
        for each in self.joined:
            each.discard()
        self._bring_home()

    def close(self, *, orderly: bool) -> None:
        """Collective if ``orderly``. End the prefetch pipeline and the use of the process groups; every later call
        is refused."""
        if self.guard.closed:
            return
        self.guard.closed = True
        ended = [each.ended() for each in self.joined]
        for store in self.stores:
            if store.tier is not None:
                store.tier.close()
        self.groups.close(destroy=orderly and all(ended))

    def settle(self) -> None:
        """Collective with the prefetch pipeline or re-homed rows. Bring the home rows to the state in which every step
        pushed all of its gradients and no row has moved."""
        with self.calling():
            for each in self.joined:
                each.settle()
            self._bring_home()

    @property
    def settles_with_others(self) -> bool:
        """True if ``settle`` is collective now. Equal on all ranks."""
        return any(each.deferred is not None for each in self.joined) or self.migrator.rehomed_rows > 0

    @torch.no_grad()
    def _bring_home(self) -> None:
        """Collective with re-homed rows. Make their home slots current, unless new values wait there."""
        if self.migrator.rehomed_rows and not self.stale_replicas and self._changes_at_home != self.row_changes:
            self.migrator.bring_home()
            self._changes_at_home = self.row_changes

    def calling(self) -> AbstractContextManager[object]:
        """Return the context of a call that exchanges rows."""
        call = self.guard.call(in_step=bool(self.passes))
        if not torch.is_inference_mode_enabled():
            return call
        # What stays between steps must be of use to training too.
        entered = ExitStack()
        entered.enter_context(call)
        entered.enter_context(torch.inference_mode(mode=False))
        entered.enter_context(torch.no_grad())
        return entered

    @in_phase(StepPhase.APPLY)
    def _apply_chunks(self) -> None:
        started = time.perf_counter()
        chunks = self.inbox.poll_agreed(self.max_migration_bytes, self.migrator.copied_bytes)
        if not chunks:
            return
        with torch.no_grad():
            self.migrator.apply(
                [prepared for _, _, prepared in chunks],
                fetch_follows=self.arm.exchange == "chain" and not any(each.fetches_early for each in self.joined),
            )
        self.inbox.applied(chunks[-1][0])
        self.apply_seconds += time.perf_counter() - started


def _first(found: Iterable[Found | None]) -> Found | None:
    """Return what the first of all found; all are asked."""
    return next((one for one in list(found) if one is not None), None)
