"""The points of a step at which rows may be exchanged earlier or later than in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.exchange.route import Route
from flexd.embedding.exchange.router import Router
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.routed_input import ForwardPass, RoutedInput
from flexd.embedding.row_optimizers import RowUpdate


class GradientSplit(Protocol):
    """The part of a step's gradients that is pushed in the step; the rest is pushed later.

    Attributes:
        touched: replicated rows with gradients in this part, on any rank.
    """

    touched: TouchedRows | None

    def split(self, number: int, grads: Sequence[torch.Tensor]) -> tuple[Route, list[torch.Tensor]]:
        """Return the route of the part and its gradients, of the step's pass ``number``."""
        ...


class StepHooks:
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
    working: object = None
    """Objects whose tensors stay between steps."""
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

    def changed_input(self) -> Callable[[], None] | None:
        """Run after ``fetch`` of a claimed pass. None: every rank's input is the one that was located. Else all ranks
        look their inputs up again; the function raises an error if this rank's is lost. Local."""
        return None

    def fetch(self, forward_pass: ForwardPass, *, expand: bool) -> list[torch.Tensor] | None:
        """Return the rows of a pass as ``RowEngine.fetch`` does if some were fetched before, else None."""
        del forward_pass, expand
        return None

    def after_fetch(self) -> None:
        """Run after a forward pass has its rows."""

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

    def after_update(self, optimizer: RowUpdate, step: int) -> None:
        """Run after a step has updated its rows; deferred gradients update theirs by this optimizer and step."""
