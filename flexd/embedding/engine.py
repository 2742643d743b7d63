"""Rows by key: looked up, trained, replicated and migrated, whatever module the ids come from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch

from flexd.control.agent.inbox import ChunkInbox, Prepared
from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace
from flexd.core.placement import Delta
from flexd.embedding.exchange.hop import Agreement, Call, Hop
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.exchange.route import Router
from flexd.embedding.exchange.sent_bytes import Traffic
from flexd.embedding.exchange.station import Route
from flexd.embedding.gradients import StepGradients
from flexd.embedding.migration.migrator import Migrator
from flexd.embedding.prefetch.job import Ahead, AheadJob, Left
from flexd.embedding.prefetch.run_ahead import RunAhead
from flexd.embedding.replicas.row_updates import ReplicaSync, Summed
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.store.initial_values import initial_rows
from flexd.embedding.store.memory import RankMemory, rank_memory
from flexd.embedding.store.store import GroupStore

MAX_PENDING_PASSES = 64


class Pass:
    """A forward pass for training whose gradients have not been pushed yet.

    Attributes:
        grads: per dim-group [rows of the route's first station, dim]; None before its backward pass.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
        self.grads: list[torch.Tensor] | None = None

    def add(self, grads: list[torch.Tensor]) -> None:
        self.grads = grads if self.grads is None else [a + b for a, b in zip(self.grads, grads, strict=True)]


class RowEngine:
    """The rows that one rank holds and the exchange with the others. Every method that says so is collective.

    A step is: ``prepare`` and ``find`` for each forward pass, ``fetch`` its rows, ``open_pass`` if it trains,
    ``reduce`` in its backward pass; then ``push`` once, which updates all rows touched since the last one.

    Args:
        replica_slots: of each dim-group.
        exchange: "chain", "direct" or "direct_no_dedup", as in ``EmbeddingCollection``.
        gradient_scale: gradients are multiplied by it.
        comm_dtype: as in ``EmbeddingCollection``.

    Raises:
        EmbeddingError: an unknown exchange.
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
        comm_dtype: str | None = None,
    ) -> None:
        self.keyspace = keyspace
        self.groups = groups
        self.stores = [
            GroupStore(group, groups.layout, groups.rank, slots, device)
            for group, slots in zip(keyspace.groups, replica_slots, strict=True)
        ]
        self._exchange = exchange
        self._comm_dtype = comm_dtype
        self.router = self._new_router(groups, traffic)
        self.sync = ReplicaSync(self.stores, self.router)
        self.migrator = Migrator(groups, self.stores, traffic, max_migration_bytes_per_step)
        self.inbox = ChunkInbox(
            keyspace, groups.layout, groups.rank, tuple(replica_slots), self.migrator.starts_here, self._prepare_chunk
        )
        self.passes: list[Pass] = []
        """Not pushed yet, oldest first; equally many on every rank."""
        self.steps = 0
        self.apply_seconds = 0.0
        self.after_step: Callable[[], None] | None = None
        self._scale = gradient_scale
        self._max_migration_bytes = max_migration_bytes_per_step
        self._stale_replicas = False
        self._summed: StepGradients | None = None
        self._ahead: RunAhead | None = None

    def initialise(self, scales: Sequence[float], seed: int, state: float) -> None:
        """Home rows of each table get their ``initial_rows``, and ``state`` in each number beside them."""
        for store in self.stores:
            store.state.fill_(state)
            tables, rows = self.keyspace.table_rows(store.home_keys())
            for table in store.group.tables:
                at = np.flatnonzero(tables == table)
                spec = self.keyspace.tables[table]
                values = initial_rows(spec.name, rows[at], spec.dim, store.dtype, scale=scales[table], seed=seed)
                store.rows[torch.from_numpy(at).to(store.rows.device)] = values.to(store.rows.device)

    def prepare(self) -> None:
        """Collective. Copies replicas anew if home rows were loaded, and applies the chunks all ranks agreed on; not
        while gradients wait for their push or a route was found ahead, which go by the placement as it was."""
        self.settle()
        if self._stale_replicas:
            self.migrator.refresh()
            self._stale_replicas = False
        if self._summed is not None and self._summed.overflowed:
            self._summed = None  # their step was skipped, on every rank
        if not self.passes and self._summed is None and not (self._ahead and self._ahead.holds_route):
            self._apply_chunks()

    def find(self, keys: torch.Tensor, fault: int = 0, *, trains: bool = False) -> Route:
        """Collective. The route of int64 [n] keys, in any order, repeats allowed.

        Args:
            trains: a pass will be opened for it; equal on all ranks.
            fault: 1 + this rank if its input cannot be looked up (``keys`` is empty then). The highest of all ranks
                is in the route's agreement: every rank must give the pass up if it is not 0, or if ranks have parted.
        """
        call = Call.of(self.groups.rank, trains=trains, passes=len(self.passes), steps=self.steps)
        route = self.router.find(keys, Agreement(self.inbox.begin_exchange(), fault, call, call), trains)
        self.inbox.end_exchange(route.agreement.version)
        return route

    def fetch(self, route: Route, *, expand: bool = True) -> list[torch.Tensor]:
        """Collective. Per dim-group [requests of this rank, dim]; without ``expand`` the distinct rows of the route's
        first station, [rows, dim]."""
        if self._ahead is None:
            return self.router.fetch(route, expand=expand)
        rows = self._ahead.fetch(route, self.router, expand=expand)
        self._ahead.fetched(self._open_routes(), idle=self._summed is not None)
        return rows

    def check_room(self) -> None:
        """Raises EmbeddingError when too many passes wait for a push, TopologyError if the world has grown."""
        self.groups.check_still_alone()
        if len(self.passes) >= MAX_PENDING_PASSES:
            raise EmbeddingError(
                f"{MAX_PENDING_PASSES} forward passes without a step",
                remedy="call optimizer.step() after backward(), or evaluate under torch.no_grad()",
            )

    def open_pass(self, route: Route) -> Pass:
        opened = Pass(route)
        self.passes.append(opened)
        return opened

    def reduce(self, opened: Pass, grads: Sequence[torch.Tensor], *, expanded: bool = True) -> None:
        """Adds the gradients of one backward pass, shaped as ``fetch`` gave the rows."""
        opened.add(self.router.reduce(opened.route, list(grads)) if expanded else list(grads))

    def forget_gradients(self) -> None:
        # The passes stay: their backward may be still to come, and every rank must push the same number of them.
        for opened in self.passes:
            opened.grads = None
        self._summed = None

    def gradients(self) -> StepGradients | None:
        """Collective. The gradients of all passes since the last step, summed at their rows; None without any pass.

        What waits here must be pushed, or forgotten on all ranks alike.
        """
        if self.passes:
            summed, _ = self._carry()
            if self._summed is None:
                self._summed = StepGradients(summed, self.stores, self.groups.world)
            else:
                self._summed.add(summed)
        return self._summed

    def push(self, optimizer: RowOptimizer) -> None:
        """Collective. Updates the rows by the gradients of all passes since the last step; nothing without any."""
        left: Left | None = None
        if self.passes and self._summed is None:
            parts, left = self._carry(leave=True)
            self._summed = StepGradients(parts, self.stores, self.groups.world)
        summed = self.gradients()
        if summed is None:
            return  # nothing was looked up for training on any rank
        self._summed = None
        self.steps += 1
        self.sync.apply(summed.scaled(), optimizer, self.steps)
        if left is not None and self._ahead is not None:
            step = self.steps
            self._ahead.leave(left, lambda late: self.sync.apply(late, optimizer, step))
        if self.after_step is not None:
            self.after_step()

    def _carry(self, *, leave: bool = False) -> tuple[list[Summed], Left | None]:
        """Collective. Brings the gradients of all open passes to the rows, each row's once; with ``leave`` not those
        that can wait for the next exchange ahead, which come back."""
        routes = self._open_routes()
        left = None if self._ahead is None else self._ahead.left_of(routes, leave=leave)
        touched = self.router.touched(routes) if left is None else left.pushed
        parts = []
        for number, opened in enumerate(self.passes):
            grads = self._scaled(opened)
            parts.append((opened.route, grads) if left is None else left.divide(number, grads))
        self.passes.clear()
        return self.sync.push(parts, touched), left

    def _scaled(self, opened: Pass) -> list[torch.Tensor]:
        if opened.grads is None:
            return [
                store.rows.new_zeros((stop.rows, store.rows.shape[1]), dtype=wide)
                for store, stop, wide in zip(self.stores, opened.route.stops[0], self.router.wide, strict=True)
            ]
        return [grad * self._scale for grad in opened.grads] if self._scale != 1.0 else opened.grads

    def memory(self) -> RankMemory:
        """Bytes of this rank, by part: as they are and as they can come to at most. Not collective."""
        pending = (self.passes, None if self._ahead is None else self._ahead.held)
        working = self.router.working_bytes + self.sync.working_bytes
        if self._ahead is not None:
            working += self._ahead.working_bytes
        return rank_memory(
            self.stores, self.groups.layout, self._max_migration_bytes, self.migrator.most_rows, pending,
            self.inbox.waiting_bytes, working, self.inbox.prepared_bytes,
        )  # fmt: skip

    def rows_loaded(self) -> None:
        """Collective, if anything is ahead. Home rows or their state are about to be replaced from outside: replicas
        are copied anew before the next pass, and what was fetched ahead is fetched anew."""
        if self._ahead is not None:
            self._ahead.drop(self.sync)
        self._stale_replicas = True

    def run_ahead(self, timeout_seconds: float, passes_per_step: int) -> RunAhead:
        """What a loop that begins now announces its batches to. Collective when called with another deadline than
        before: makes process groups for the exchange ahead.

        Raises:
            EmbeddingError: another loop has not ended.
        """
        if self._ahead is not None:
            self._ahead.begin()
        if self._ahead is None or self._ahead.timeout_seconds != timeout_seconds:
            self.settle()
            traffic = Traffic()
            with self.router.traffic.uncounted():
                groups = ChainGroups(
                    self.groups.layout, traffic, self.stores[0].rows.device, timedelta(seconds=timeout_seconds)
                )
            router = self._new_router(groups, traffic)
            self._ahead = RunAhead(
                AheadJob(self.stores, router, ReplicaSync(self.stores, router), self.inbox, self.groups.rank),
                self.inbox,
                traffic,
                self.router.traffic,
                rank=self.groups.rank,
                device=self.stores[0].rows.device,
                timeout_seconds=timeout_seconds,
            )
            self._ahead.begin()
        self._ahead.passes_per_step = passes_per_step
        return self._ahead

    def start_ahead(self) -> None:
        """Collective. Starts the exchange for the batch announced to ``run_ahead``, if no forward pass has."""
        if self._ahead is not None:
            self._ahead.start_announced(self._open_routes(), idle=self._summed is not None)

    def found_ahead(self, given: object, *, usable: bool = True) -> Ahead | None:
        """Collective. What was found ahead for the input of this forward pass; None: ``prepare`` and ``find``."""
        return None if self._ahead is None else self._ahead.take(given, usable=usable)

    def settle(self) -> None:
        """Collective, if anything is ahead. Rows are as if every step had pushed all of its gradients."""
        if self._ahead is not None:
            self._ahead.settle(self.sync)

    @property
    def ahead_traffic(self) -> Traffic | None:
        """The part of the traffic that exchanges ahead sent, up to the last that was waited for; None without any."""
        return None if self._ahead is None else self._ahead.overlapped

    def wait_ahead(self) -> None:
        """Waits until nothing but this thread changes rows. What a step has left for later stays."""
        if self._ahead is not None:
            self._ahead.join()

    def _open_routes(self) -> list[Route]:
        return [opened.route for opened in self.passes]

    @torch.no_grad()
    def _prepare_chunk(self, chunk: Delta, after: Prepared | None) -> Prepared:
        return self.migrator.prepare(chunk, after)

    def _apply_chunks(self) -> None:
        started = time.perf_counter()
        chunks = self.inbox.take(self._max_migration_bytes, self.migrator.copied_bytes)
        if not chunks:
            return
        with torch.no_grad():
            self.migrator.apply([self.inbox.prepared(version) for version, _ in chunks])
        self.inbox.applied(chunks[-1][0])
        self.apply_seconds += time.perf_counter() - started

    def _new_router(self, groups: ChainGroups, traffic: Traffic) -> Router:
        return Router(
            self.stores,
            self._hops(groups),
            groups.layout,
            traffic,
            dedup=self._exchange != "direct_no_dedup",
            comm_dtype=self._comm_dtype,
        )

    def _hops(self, groups: ChainGroups) -> list[Hop]:
        world, local_ranks = groups.layout.world_size, groups.layout.local_ranks
        if self._exchange == "chain":
            hops = [
                Hop(groups.node, lambda keys: keys % local_ranks),
                Hop(groups.rail, lambda keys: keys % world // local_ranks, all_reduces=True),
            ]
        elif self._exchange in ("direct", "direct_no_dedup"):
            hops = [Hop(groups.world, lambda keys: keys % world)]
        else:
            raise EmbeddingError(f"exchange {self._exchange!r}", remedy="one of chain, direct, direct_no_dedup")
        return [hop for hop in hops if hop.peers.size > 1]
