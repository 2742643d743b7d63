"""Forward passes: their input with its rows located, what waits for the step, and the function that fetches rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexd.embedding.exchange.route import Route
from flexd.embedding.jagged import Jagged
from flexd.embedding.replicas.touched_rows import TouchedRows


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
