"""Row optimizers: one fused update of given rows and their state.

All are *lazy*, like the sparse optimizers of torch and FBGEMM: rows that a step does not look up keep values and state.
There is no SGD with momentum: momentum moves every row at every step, so a lazy version would differ from torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding import devices
from flexd.embedding.rounding import HALF_DTYPES, round_stochastically

KeysOf = Callable[[torch.Tensor], torch.Tensor]
"""int64 [n] slots -> int64 [n] keys."""
_BLOCK_NUMBERS = 1 << 16
"""Numbers in a block of rows, for each thread."""


class RowOptimizer(Protocol):
    """Updates given rows in place.

    The same call with the same gradients must give bit-equal rows on every holder, so an implementation may use
    only its settings and arguments (no generator of random numbers, no position of the row in the table). An
    implementation is a frozen dataclass: ranks compare its ``repr``, which contains its settings, and ``param_groups``
    has its fields.
    """

    @property
    def name(self) -> str:
        """Name in ``TableSpec.optimizer``; ``flexd.core.keyspace.state_columns`` defines its state."""
        ...

    @property
    def lr(self) -> float: ...

    @property
    def initial_state(self) -> float:
        """Initial value of every number of the state."""
        ...

    def update(
        self, rows: torch.Tensor, state: torch.Tensor, index: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """Apply one step.

        Args:
            rows: [slots, dim], changed in place.
            state: [slots, s] float32 (float64 beside float64 rows), changed in place.
            index: int64 [n] unique slots.
            grads: [n, dim], not changed.
            step: number of this optimizer step of the job, from 1, for bias correction.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _CommonSettings:
    """Settings of every optimizer. Weight decay applies to the rows that a step looks up.

    Attributes:
        weight_decay: lambda. Coupled (L2, torch's ``weight_decay``, FBGEMM's ``WeightDecayMode.L2``):
            g += lambda * w before anything else.
        decoupled_weight_decay: use w *= 1 - lr * lambda instead (Loshchilov and Hutter, Decoupled Weight Decay
            Regularization, arXiv 1711.05101, algorithm 2; FBGEMM's ``WeightDecayMode.DECOUPLE``).
        stochastic_rounding: rows of float16 and bfloat16 tables are rounded up or down at random, so that updates
            below their precision count on average; else to the nearest, which loses them. Other tables do not differ.
    """

    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    stochastic_rounding: bool = True


class _FusedRowOptimizer(_CommonSettings, ABC):
    """Shared part of all optimizers: widening, weight decay, reading and writing of the given rows."""

    lr: float

    @abstractmethod
    def _change(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        """Return [n, dim] to add to the rows. Changes ``state`` [n, s] in place, not ``grads``.

        Args:
            squares: what ``_squares`` returned.
        """

    def _squares(self, grads: torch.Tensor) -> torch.Tensor:
        """Return the squares of [n, dim] gradients, or a number for each row that the optimizer needs of them.

        The only step of an update whose result for a row may depend on how many rows are given.
        """
        return grads

    def update(
        self,
        rows: torch.Tensor,
        state: torch.Tensor,
        index: torch.Tensor,
        grads: torch.Tensor,
        step: int,
        keys_of: KeysOf | None = None,
    ) -> None:
        """Apply one step, as ``RowOptimizer.update``.

        Args:
            keys_of: keys of the rows at these slots, for stochastic rounding; None: round to the nearest.
        """
        # Blocks whose temporaries stay in the cache of a CPU are two to three times faster than all rows at once.
        cached = (
            _BLOCK_NUMBERS * torch.get_num_threads() // rows.shape[1] if devices.in_host_memory(rows) else len(index)
        )
        for at, some in zip(index.split(max(1, cached)), grads.split(max(1, cached)), strict=True):  # type: ignore[no-untyped-call]
            self._update(rows, state, at, some, step, keys_of)

    def update_parts(
        self,
        rows: torch.Tensor,
        state: torch.Tensor,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        step: int,
        keys_of: KeysOf | None = None,
    ) -> None:
        """Apply one step to several parts (index, grads) that share no row, bit for bit as ``update`` of each.

        On an accelerator the parts share their kernels.
        """
        parts = [(index, grads) for index, grads in parts if len(index)]
        if devices.in_host_memory(rows) or len(parts) < 2:
            for index, grads in parts:
                self.update(rows, state, index, grads, step, keys_of)
        else:
            index = torch.cat([index for index, _ in parts])
            sizes = [len(part) for part, _ in parts]
            self._update(rows, state, index, torch.cat([grads for _, grads in parts]), step, keys_of, sizes)

    def _update(
        self,
        rows: torch.Tensor,
        state: torch.Tensor,
        index: torch.Tensor,
        grads: torch.Tensor,
        step: int,
        keys_of: KeysOf | None,
        sizes: Sequence[int] = (),
    ) -> None:
        # In float32 or wider, with a rounding after each operation: fused and half-precision kernels of torch round the
        # end of a vector differently, so that a row's result would depend on its position.
        wide = torch.promote_types(rows.dtype, torch.float32)
        grads = grads.to(wide)
        decoupled = bool(self.weight_decay) and self.decoupled_weight_decay
        # One kernel then adds to the rows where they are, instead of gather, addition and scatter.
        in_place = rows.dtype == wide and not decoupled
        if not in_place or self.weight_decay:
            weights = rows.index_select(0, index).to(wide)
            if not decoupled and self.weight_decay:
                grads = weights.mul(self.weight_decay).add_(grads)
        if not sizes:
            squares = self._squares(grads)
        else:
            squares = torch.cat([self._squares(part) for part in torch.split(grads, list(sizes))])
        if state.shape[1]:
            kept = state.index_select(0, index)
            change = self._change(grads, squares, kept, step)
            devices.write_rows(state, index, kept)
        else:
            change = self._change(grads, squares, state, step)
        if in_place:
            rows.index_add_(0, index, change)
            return
        if decoupled:
            weights.mul_(1.0 - self.lr * self.weight_decay)
        weights.add_(change)
        if self.stochastic_rounding and keys_of is not None and rows.dtype in HALF_DTYPES:
            rounded = round_stochastically(weights, rows.dtype, keys_of(index), step)
        else:
            rounded = weights.to(rows.dtype)
        devices.write_rows(rows, index, rounded)

    def _check(self, **not_negative: float) -> None:
        for name, value in {"lr": self.lr, "weight_decay": self.weight_decay, **not_negative}.items():
            if not value >= 0.0:
                raise EmbeddingError(f"{type(self).__name__}: {name}={value}", remedy="at least 0")


def _check_betas(optimizer: object, betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise EmbeddingError(f"{type(optimizer).__name__}: betas={betas}", remedy="two numbers of 0 to below 1")


@dataclass(frozen=True)
class SGD(_FusedRowOptimizer):
    """w -= lr * g; equal to ``torch.optim.SGD`` without momentum.

    Raises:
        EmbeddingError: a setting below 0.
    """

    lr: float = 0.01
    name: str = field(default="sgd", init=False)
    initial_state: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()

    def _change(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        del squares, state, step
        return grads.mul(-self.lr)


class _AdagradLike(_FusedRowOptimizer):
    eps: float
    initial_accumulator_value: float

    def __post_init__(self) -> None:
        self._check(eps=self.eps, initial_accumulator_value=self.initial_accumulator_value)

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value

    def _scaled(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the change; ``state`` is the accumulator, of the shape of ``squares``."""
        state.add_(squares)
        return grads.div(state.sqrt().add_(self.eps)).mul_(-self.lr)


@dataclass(frozen=True)
class Adagrad(_AdagradLike):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), one accumulator a number (Duchi et al., JMLR 12, 2011, section 1.3).

    Equal to ``torch.optim.Adagrad`` with ``lr_decay=0`` and FBGEMM's EXACT_ADAGRAD.

    Raises:
        EmbeddingError: a setting below 0.
    """

    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    name: str = field(default="adagrad", init=False)

    def _squares(self, grads: torch.Tensor) -> torch.Tensor:
        return grads.square()

    def _change(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        del step
        return self._scaled(grads, squares, state)


@dataclass(frozen=True)
class RowWiseAdagrad(_AdagradLike):
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), one accumulator a row.

    Equal to FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Raises:
        EmbeddingError: a setting below 0.
    """

    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0
    name: str = field(default="rowwise_adagrad", init=False)

    def _squares(self, grads: torch.Tensor) -> torch.Tensor:
        return grads.square().mean(dim=1, keepdim=True)

    def _change(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        del step
        return self._scaled(grads, squares, state)


class _AdamLike(_FusedRowOptimizer):
    betas: tuple[float, float]
    eps: float

    def __post_init__(self) -> None:
        self._check(eps=self.eps)
        _check_betas(self, self.betas)

    def _moments(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        """Return the change; ``state`` is the first moment [n, dim], then the second, of the shape of ``squares``."""
        beta1, beta2 = self.betas
        first, second = state[:, : grads.shape[1]], state[:, grads.shape[1] :]
        first.add_((grads - first).mul_(1.0 - beta1))
        second.add_((squares - second).mul_(1.0 - beta2))
        divisor = second.div(1.0 - beta2**step).sqrt_().add_(self.eps)
        return first.div(divisor).mul_(-self.lr / (1.0 - beta1**step))


@dataclass(frozen=True)
class Adam(_AdamLike):
    """m += (1-b1)(g-m); v += (1-b2)(g^2-v); w -= lr * m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) (Kingma and Ba, arXiv
    1412.6980, algorithm 1); t counts the optimizer steps of the job, not those of the row.

    Equal to ``torch.optim.Adam`` and FBGEMM's ADAM on the rows looked up. Lazy like ``torch.optim.SparseAdam``, which
    adds eps before the correction of v: its eps is ours times sqrt(1-b2^t). ``decoupled_weight_decay=True`` is AdamW,
    which FBGEMM's ADAM implements.

    Raises:
        EmbeddingError: a setting below 0, or betas outside [0, 1).
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name: str = field(default="adam", init=False)
    initial_state: float = field(default=0.0, init=False, repr=False)

    def _squares(self, grads: torch.Tensor) -> torch.Tensor:
        return grads.square()

    def _change(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        return self._moments(grads, squares, state, step)


@dataclass(frozen=True)
class RowWiseAdam(_AdamLike):
    """``Adam`` with one second moment a row, of mean(g^2): dim + 1 instead of 2 dim numbers of state.

    Equal to FBGEMM's PARTIAL_ROWWISE_ADAM (with ``decoupled_weight_decay=True`` if there is weight decay).

    Raises:
        EmbeddingError: a setting below 0, or betas outside [0, 1).
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name: str = field(default="rowwise_adam", init=False)
    initial_state: float = field(default=0.0, init=False, repr=False)

    def _squares(self, grads: torch.Tensor) -> torch.Tensor:
        return grads.square().mean(dim=1, keepdim=True)

    def _change(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        return self._moments(grads, squares, state, step)
