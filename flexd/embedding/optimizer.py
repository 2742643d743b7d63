"""Fused sparse optimizers: one update of listed rows and their state, and the handle a trainer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class RowOptimizer(Protocol):
    """Updates listed rows in place.

    The same call with the same gradients must give bit-equal rows on every holder, so an implementation may use
    nothing but its arguments (no random numbers, no position of the row in the table). Its ``repr`` tells its settings:
    ranks compare it.
    """

    @property
    def name(self) -> str:
        """As in ``TableSpec.optimizer``."""
        ...

    @property
    def lr(self) -> float: ...

    def update(
        self, rows: torch.Tensor, state: torch.Tensor, index: torch.Tensor, grads: torch.Tensor, lr: float
    ) -> None:
        """``rows`` [slots, dim], ``state`` [slots, s]; int64 ``index`` [n] unique; ``grads`` [n, dim], not changed."""
        ...


@dataclass(frozen=True)
class SGD:
    """w -= lr * g, as ``torch.optim.SGD`` without momentum."""

    lr: float = 0.01
    name: str = "sgd"

    def update(
        self, rows: torch.Tensor, state: torch.Tensor, index: torch.Tensor, grads: torch.Tensor, lr: float
    ) -> None:
        del state
        # In half precision torch rounds differently at the end of a vector, so the result would depend on the place.
        wide = torch.promote_types(rows.dtype, torch.float32)
        rows.index_copy_(0, index, rows.index_select(0, index).to(wide).sub_(grads, alpha=lr).to(rows.dtype))


@dataclass(frozen=True)
class RowWiseAdagrad:
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps).

    One accumulator a row, as FBGEMM's EXACT_ROWWISE_ADAGRAD (``OptimType.EXACT_ROWWISE_ADAGRAD``).
    """

    lr: float = 0.01
    eps: float = 1e-8
    name: str = "rowwise_adagrad"

    def update(
        self, rows: torch.Tensor, state: torch.Tensor, index: torch.Tensor, grads: torch.Tensor, lr: float
    ) -> None:
        wide = grads.to(state.dtype)
        total = state.index_select(0, index).add_(wide.square().mean(dim=1, keepdim=True))
        state.index_copy_(0, index, total)
        change = wide.div(total.sqrt().add_(self.eps)).mul_(lr)
        rows.index_copy_(0, index, (rows.index_select(0, index) - change).to(rows.dtype))


class FusedOptimizer(torch.optim.Optimizer):
    """What a trainer calls ``step()`` on after ``backward()``; learning-rate schedulers work on it.

    ``step`` is collective: every rank of the job calls it the same number of times, whether its batch was empty or
    not, at an equal learning rate. It pushes the gradients of all backward passes since the last step to the rows'
    homes, synchronises the replicas and updates both. ``zero_grad`` forgets gradients, as everywhere in torch: of
    backward passes before it. Call it before or after the forward pass.
    """

    def __init__(
        self, anchor: torch.nn.Parameter, lr: float, push: Callable[[float], None], forget: Callable[[], None]
    ) -> None:
        self._push = push
        self._forget = forget
        super().__init__([anchor], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._push(float(self.param_groups[0]["lr"]))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        self._forget()
