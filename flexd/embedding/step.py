"""A training step: its forward passes, and the moments at which what a job has switched on joins it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.exchange.route import Route
from flexd.embedding.exchange.router import Router
from flexd.embedding.jagged import Jagged
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.row_optimizers import RowUpdate


class ForwardPass:
    """One look-up. If it is for training it waits in ``RowEngine.passes`` until its gradients are pushed.

    Attributes:
        touched: the replicated rows that it reads, filled in while it is found and fetched; None if there are none.
        grads: per dim-group [rows of the route's first station, dim]; None before its backward pass.
        bag_grads: per dim-group [bags, dim] of the bags that are pooled at the owner; None before its backward pass.
    """

    def __init__(self, route: Route, touched: TouchedRows | None) -> None:
        self.route = route
        self.touched = touched
        self.grads: list[torch.Tensor] | None = None
        self.bag_grads: list[torch.Tensor] | None = None

    def add(self, grads: list[torch.Tensor], wide: Sequence[torch.dtype]) -> None:
        """Add the gradients of a backward pass, in dtype ``wide`` of each dim-group if there are some already."""
        self.grads = _added(self.grads, grads, wide)

    def add_of_bags(self, grads: list[torch.Tensor], wide: Sequence[torch.dtype]) -> None:
        """Add gradients of bags of a backward pass, as ``add``; an empty list if none are pooled at the owner."""
        if grads:
            self.bag_grads = _added(self.bag_grads, grads, wide)


def _added(
    before: list[torch.Tensor] | None, grads: list[torch.Tensor], wide: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    if before is None:
        return grads
    return [old.to(dtype) + new.to(dtype) for old, new, dtype in zip(before, grads, wide, strict=True)]


@dataclass
class RoutedInput:
    """Checked input of a forward pass whose rows are located on all ranks.

    Attributes:
        order: names of the features, dim-group by dim-group.
        ahead: the input of the forward pass if its rows were located before it: until they are fetched they may turn
            out to be those of another input, and then everything here is replaced.
    """

    features: Mapping[str, Jagged]
    order: list[str]
    forward_pass: ForwardPass
    ahead: Any = None

    def replace_by(self, other: RoutedInput) -> None:
        """Replace what was located before the forward pass."""
        self.features, self.order, self.forward_pass = other.features, other.order, other.forward_pass
        self.ahead = None

    def places(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return int64 [ids] for each dim-group: the place in its distinct ``rows`` of each id of ``order``.

        Ids of bags that are added up here, for any rank, may follow.
        """
        first = self.forward_pass.route.stations[0]
        return [
            torch.arange(stop.rows, device=distinct.device) if stop.expand is None else stop.expand
            for distinct, stop in zip(rows, first, strict=False)  # sums of bags follow
        ]


class LookupFunction(torch.autograd.Function):
    """Fetches the rows and sums of a forward pass; their gradients wait in the engine for ``optimizer.step``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, engine: Any, forward_pass: ForwardPass, expand: bool
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.engine, ctx.forward_pass, ctx.expand = engine, forward_pass, expand
        return tuple(engine.fetch(forward_pass, expand=expand))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.engine.reduce(ctx.forward_pass, grads, expanded=ctx.expand)
        return None, None, None, None


class StepMoments:
    """Moments of a step, in their order. These do nothing; what joins a step (``RowEngine.join``) overrides those that
    it needs, and a job that has not switched it on neither imports nor asks it.

    Called at the same points on every rank, by the training thread unless a method says otherwise.

    Attributes:
        working: objects whose tensors stay between steps, for the memory of the rank.
    """

    working: object = None

    def located(self, look_up: int) -> None:
        """Run when look-up number ``look_up``, from 1, has found its rows on all ranks."""

    def fetched(self) -> None:
        """Run when a forward pass has its rows."""

    def changed(self, parts: Sequence[tuple[int, torch.Tensor]], *, all_rows: bool = False) -> None:
        """Run when rows have been changed: by an update, in any thread, by a chunk or by a load.

        Args:
            parts: (dim-group, int64 [n] slots of home rows or replicas, repeats allowed).
            all_rows: other rows may have been changed as well.
        """

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Run when a step has updated its rows."""


class GradientSplit(Protocol):
    """The part of a step's gradients that is pushed in the step; the rest is pushed later.

    Attributes:
        touched: replicated rows with gradients in this part, on any rank.
    """

    touched: TouchedRows | None

    def split(self, number: int, grads: Sequence[torch.Tensor]) -> tuple[Route, list[torch.Tensor]]:
        """Return the route of the part and its gradients, of the step's pass ``number``."""
        ...


class StepHooks(StepMoments):
    """Points of a step at which rows may be exchanged earlier or later. These do nothing; ``PrefetchPipeline``
    replaces them.

    Called by the training thread, at the same points on every rank; all methods are collective.
    """

    fetches_early = False
    """True if rows of a pass may be fetched before it: its fetch carries no rows of a chunk."""
    holds_route = False
    """True while a route is held that no forward pass has used: no chunk may be applied."""
    deferred: object = None
    """Gradients that are pushed later: with some, on all ranks, ``settle`` is collective."""
    held: object = None
    """Objects whose tensors stay until a later step."""
    overlapped: Traffic | None = None
    """The part of the traffic that no step waited for."""
    exchanges: tuple[tuple[ChainGroups, Router], ...] = ()
    """Further routers, with their groups, that use the exchange of the engine."""
    prefetched_batches = 0
    """Batches given to be located ahead, those counted below included."""
    unused_batches = 0
    """Batches whose rows were located twice: what was announced was not what was looked up."""

    def settle(self) -> None:
        """Push gradients that an earlier step deferred."""

    def discard(self) -> None:
        """Settle, and drop rows that were fetched early: the tables are about to be replaced."""

    def wait(self) -> None:
        """Wait until no other thread changes rows. Deferred gradients stay deferred."""

    def claim(self, given: object, *, usable: bool) -> RoutedInput | None:
        """Return the input of a forward pass if it was located before; not if it is not ``usable``."""
        del given, usable
        return None

    def check_given(self) -> None:
        """Run before the input of a forward pass is read; raises EmbeddingError if it is known not to be the batch."""

    def changed_input(self) -> Callable[[], None] | None:
        """Run after ``fetch`` of a claimed pass. None: every rank's input is the one that was located. Else all ranks
        look their inputs up again; the function raises an error if this rank's is lost. Local."""
        return None

    def fetch(self, forward_pass: ForwardPass, *, expand: bool) -> list[torch.Tensor] | None:
        """Return the rows of a pass as ``RowEngine.fetch`` does if some were fetched before, else None."""
        del forward_pass, expand
        return None

    def split_gradients(self, *, defer: bool) -> GradientSplit | None:
        """Run before the gradients of all open passes are pushed; None: push all of them.

        Args:
            defer: whether gradients may be deferred.
        """
        del defer
        return None

    def end(self) -> bool:
        """End for good: no step follows, and deferred gradients are dropped. Returns whether all threads ended."""
        return True
