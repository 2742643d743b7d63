"""The input of a forward pass whose rows are located, and the function that fetches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexd.embedding.engine import RowEngine
from flexd.embedding.jagged import Jagged
from flexd.embedding.step_hooks import ForwardPass


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
        ctx: Any, anchor: torch.Tensor, engine: RowEngine, forward_pass: ForwardPass, expand: bool
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.engine, ctx.forward_pass, ctx.expand = engine, forward_pass, expand
        return tuple(engine.fetch(forward_pass, expand=expand))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.engine.reduce(ctx.forward_pass, grads, expanded=ctx.expand)
        return None, None, None, None
