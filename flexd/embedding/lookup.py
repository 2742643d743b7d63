"""A look-up as autograd sees it."""

from __future__ import annotations

from typing import Any

import torch

from flexd.embedding.engine import Pass, RowEngine


class Lookup(torch.autograd.Function):
    """Rows of one route forward; its gradients wait in the engine for ``optimizer.step``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, engine: RowEngine, opened: Pass, expand: bool
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.engine, ctx.opened, ctx.expand = engine, opened, expand
        return tuple(engine.fetch(opened.route, expand=expand))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.engine.reduce(ctx.opened, grads, expanded=ctx.expand)
        return None, None, None, None
