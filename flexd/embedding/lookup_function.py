"""The look-up of a forward pass as a function of autograd."""

from __future__ import annotations

from typing import Any

import torch

from flexd.embedding.engine import RowEngine
from flexd.embedding.step_hooks import ForwardPass


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
