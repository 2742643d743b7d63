"""Row optimizers: one fused update of given rows and their state.

All are *lazy*, like the sparse optimizers of torch and FBGEMM: rows that a step does not look up keep values and state.
There is no SGD with momentum: momentum moves every row at every step, so a lazy version would differ from torch's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding import devices
from flexd.embedding.devices import HALF_DTYPES
from flexd.embedding.row_hashes import round_stochastically

KeysOf = Callable[[torch.Tensor], torch.Tensor]
"""int64 [n] slots -> int64 [n] keys."""
# Numbers in a block of rows, for each thread: calls have a fixed cost, and temporaries are to stay in the cache.
_BLOCK_NUMBERS = 1 << 18
# The same of an update that only adds a change to the rows: each call has a fixed cost, and there is one temporary.
_ADDED_BLOCK_NUMBERS = 1 << 20


@dataclass(frozen=True)
class GroupUpdate:
    """Rows of a dim-group that a step updates.

    Attributes:
        rows: [slots, dim], changed in place.
        state: [slots, s] float32 (float64 beside float64 rows), changed in place.
        gradients: (int64 [n] unique slots, [n, dim] gradients, not changed); no two of them share a row.
        keys_of: keys of the rows at slots, for stochastic rounding; None: round to the nearest.
        rates_of: int64 [n] slots -> float64 [n, 1] by which the changes of their rows are multiplied, and a decoupled
            weight decay; None: 1.
        optimizer: of the dim-group, a name as in ``TableSpec.optimizer``.
    """

    rows: torch.Tensor
    state: torch.Tensor
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]
    keys_of: KeysOf | None = None
    rates_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    optimizer: str = ""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _joined_indices(groups: Sequence[GroupUpdate]) -> list[torch.Tensor]:
    parts = [index for group in groups for index, _ in group.gradients]
    if len(parts) == 1:
        return parts
    sizes = [sum(index.shape[0] for index, _ in group.gradients) for group in groups]
    return list(torch.cat(parts).split_with_sizes(sizes))


def _joined_grads(groups: Sequence[GroupUpdate]) -> list[torch.Tensor]:
    """Return the gradients of each dim-group in the dtype of the update, with one kernel where all have one dtype."""
    wide = [_wide(group.rows.dtype) for group in groups]
    parts = [grads for group in groups for _, grads in group.gradients]
    if len(parts) == 1 or len({grads.dtype for grads in parts}) > 1 or len(set(wide)) > 1:
        return [
            (
                torch.cat([grads for _, grads in group.gradients])
                if len(group.gradients) > 1
                else group.gradients[0][1]
            ).to(dtype)
            for group, dtype in zip(groups, wide, strict=True)
        ]
    sizes = [sum(grads.numel() for _, grads in group.gradients) for group in groups]
    pieces = torch.cat([grads.reshape(-1) for grads in parts]).to(wide[0]).split_with_sizes(sizes)
    return [piece.view(-1, group.rows.shape[1]) for piece, group in zip(pieces, groups, strict=True)]


@dataclass(frozen=True)
class _Gathered:
    """The operands of changes of rows, of each dim-group.

    Attributes:
        grads: [n, dim], not changed.
        states: [n, s], changed in place.
        sizes: the rows of each part. A result for a row may depend on the number of rows that a kernel is given, so
            parts that another rank has alone do not share a reduction.
        step: as in ``RowOptimizer.update_groups``.
    """

    grads: list[torch.Tensor]
    states: list[torch.Tensor]
    sizes: list[list[int]]
    step: int


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """The optimizer of a table's rows. Weight decay applies to the rows that a step looks up.

    The same call with the same gradients gives bit-equal rows on every holder, so an optimizer uses only its settings
    and arguments (no generator of random numbers, no position of the row in the table). Ranks compare its ``repr``,
    which has its settings, and ``param_groups`` has its fields.

    Attributes:
        weight_decay: lambda. Coupled (L2, torch's ``weight_decay``, FBGEMM's ``WeightDecayMode.L2``):
            g += lambda * w before anything else.
        decoupled_weight_decay: use w *= 1 - lr * lambda instead (Loshchilov and Hutter, Decoupled Weight Decay
            Regularization, arXiv 1711.05101, algorithm 2; FBGEMM's ``WeightDecayMode.DECOUPLE``).
        stochastic_rounding: rows of float16 and bfloat16 tables are rounded up or down at random, so that updates
            below their precision count on average; else to the nearest, which loses them. Other tables do not differ.
    """

    name: ClassVar[str]
    """Name in ``TableSpec.optimizer``; ``flexd.core.keyspace.state_columns`` defines its state."""
    moves_all_rows: ClassVar[bool] = False
    """True if a step also changes rows that it did not look up."""
    row_wise: ClassVar[bool] = False
    """True if squares of gradients are averaged over each row."""
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    stochastic_rounding: bool = True
    lr: float = 0.01

    @property
    def moves_at_zero(self) -> bool:
        """True if a gradient of zero changes a row: by momentum, or by weight decay."""
        return self.weight_decay > 0

    @property
    def initial_state(self) -> float:
        """Initial value of every number of the state."""
        return 0.0

    def _changes(self, rows: _Gathered) -> list[torch.Tensor]:
        """Return for each dim-group [n, dim] to add to its rows."""
        raise NotImplementedError

    def _squares(self, rows: _Gathered) -> list[torch.Tensor]:
        """Return for each dim-group the squares of [n, dim] gradients, or with ``row_wise`` their means, [n, 1]."""
        squares = list(torch._foreach_mul(rows.grads, rows.grads))
        if not self.row_wise:
            return squares
        means = [of_group.new_empty((of_group.shape[0], 1)) for of_group in squares]
        for of_group, mean, sizes in zip(squares, means, rows.sizes, strict=True):
            for part, out in zip(of_group.split(sizes), mean.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                torch.mean(part, dim=1, keepdim=True, out=out)
        return means

    def _adds_in_place(self, rows: torch.Tensor) -> bool:
        """Return whether a change is added to the rows where they are: nothing is read from them before."""
        return rows.dtype == _wide(rows.dtype) and not self.weight_decay

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        """Apply one step to the rows of several dim-groups, bit for bit as to each part alone.

        On an accelerator all parts and dim-groups share their kernels where tensors of several shapes can.

        Args:
            step: number of this optimizer step of the job, from 1, for bias correction.
        """
        groups = [replace(group, gradients=[part for part in group.gradients if part[0].shape[0]]) for group in groups]
        if not all(devices.in_host_memory(group.rows) for group in groups):
            self._update([group for group in groups if group.gradients], step)
            return
        # Blocks whose temporaries stay in the cache of a CPU are two to three times faster than all rows at once.
        for group in groups:
            only_adds = group.state.shape[1] == 0 and self._adds_in_place(group.rows)
            numbers = (_ADDED_BLOCK_NUMBERS if only_adds else _BLOCK_NUMBERS) * torch.get_num_threads()
            each = max(1, numbers // group.rows.shape[1])
            for index, grads in group.gradients:
                for part in zip(index.split(each), grads.split(each), strict=True):  # type: ignore[no-untyped-call]
                    self._update([replace(group, gradients=[part])], step)

    def _update(self, groups: Sequence[GroupUpdate], step: int) -> None:
        # In float32 or wider, with a rounding after each operation: fused and half-precision kernels of torch round the
        # end of a vector differently, so that a row's result would depend on its position.
        if not groups:
            return
        indices, all_grads = _joined_indices(groups), _joined_grads(groups)
        decoupled = bool(self.weight_decay) and self.decoupled_weight_decay
        weights: list[torch.Tensor | None] = []
        for number, (group, index) in enumerate(zip(groups, indices, strict=True)):
            # One kernel adds to the rows where they are, instead of gather, addition and scatter.
            if self._adds_in_place(group.rows):
                weights.append(None)
                continue
            weights.append(group.rows.index_select(0, index).to(_wide(group.rows.dtype)))
            if not decoupled and self.weight_decay:
                all_grads[number] = weights[-1].mul(self.weight_decay).add_(all_grads[number])  # type: ignore[union-attr]
        sizes = [[at.shape[0] for at, _ in group.gradients] for group in groups]
        states = [
            group.state.index_select(0, index) if group.state.shape[1] else group.state
            for group, index in zip(groups, indices, strict=True)
        ]
        changes = self._changes(_Gathered(all_grads, states, sizes, step))
        for group, index, change, kept, old in zip(groups, indices, changes, states, weights, strict=True):
            rows = group.rows
            rates = None if group.rates_of is None else group.rates_of(index).to(change.dtype)
            if rates is not None:
                change.mul_(rates)
            if group.state.shape[1]:
                group.state.index_copy_(0, index, kept)
            if old is None or (rows.dtype == old.dtype and not decoupled):
                rows.index_add_(0, index, change)
                continue
            if decoupled:
                decay = self.lr * self.weight_decay
                old.mul_(1.0 - decay if rates is None else 1.0 - decay * rates)
            old.add_(change)
            if self.stochastic_rounding and group.keys_of is not None and rows.dtype in HALF_DTYPES:
                rounded = round_stochastically(old, rows.dtype, group.keys_of(index), step)
            else:
                rounded = old.to(rows.dtype)
            rows.index_copy_(0, index, rounded)

    def _check(self, **not_negative: float) -> None:
        for name, value in {"lr": self.lr, "weight_decay": self.weight_decay, **not_negative}.items():
            if not value >= 0.0:
                raise EmbeddingError(f"{type(self).__name__}: {name}={value}", remedy="at least 0")


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """w -= lr * g; equal to ``torch.optim.SGD`` without momentum.

    Raises:
        EmbeddingError: a setting below 0.
    """

    name = "sgd"
    lr: float = 0.01

    def __post_init__(self) -> None:
        self._check()

    def _changes(self, rows: _Gathered) -> list[torch.Tensor]:
        return list(torch._foreach_mul(rows.grads, -self.lr))


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), one accumulator a number (Duchi et al., JMLR 12, 2011, section 1.3).

    Equal to ``torch.optim.Adagrad`` with ``lr_decay=0`` and FBGEMM's EXACT_ADAGRAD.

    Raises:
        EmbeddingError: a setting below 0.
    """

    name = "adagrad"
    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        self._check(eps=self.eps, initial_accumulator_value=self.initial_accumulator_value)

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value

    def _changes(self, rows: _Gathered) -> list[torch.Tensor]:
        """The states are the accumulators, of the shapes of the squares."""
        torch._foreach_add_(rows.states, self._squares(rows))
        divisors = list(torch._foreach_sqrt(rows.states))
        torch._foreach_add_(divisors, self.eps)
        return self._divided(rows.grads, divisors)

    def _divided(self, grads: list[torch.Tensor], divisors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return -lr * grads / divisors of each dim-group. The divisors may be overwritten."""
        changes = [torch.div(of_group, divisor, out=divisor) for of_group, divisor in zip(grads, divisors, strict=True)]
        torch._foreach_mul_(changes, -self.lr)
        return changes


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), one accumulator per row.

    Equal to FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Raises:
        EmbeddingError: a setting below 0.
    """

    name = "rowwise_adagrad"
    row_wise = True
    eps: float = 1e-8

    def _divided(self, grads: list[torch.Tensor], divisors: list[torch.Tensor]) -> list[torch.Tensor]:
        """One factor per row, as FBGEMM's, so that the gradients are read and the changes written once."""
        torch._foreach_reciprocal_(divisors)
        torch._foreach_mul_(divisors, -self.lr)
        # Not one kernel: those for many tensors do not multiply a row by one number.
        return [of_group.mul(factor) for of_group, factor in zip(grads, divisors, strict=True)]


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """m += (1-b1)(g-m); v += (1-b2)(g^2-v); w -= lr * m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) (Kingma and Ba, arXiv
    1412.6980, algorithm 1); t counts the optimizer steps of the job, not those of the row.

    Equal to ``torch.optim.Adam`` and FBGEMM's ADAM on the rows looked up. Lazy like ``torch.optim.SparseAdam``, which
    adds eps before the correction of v: its eps is ours times sqrt(1-b2^t). ``decoupled_weight_decay=True`` is AdamW,
    which FBGEMM's ADAM implements.

    Raises:
        EmbeddingError: a setting below 0, or betas outside [0, 1).
    """

    name = "adam"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def moves_at_zero(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self._check(eps=self.eps)
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise EmbeddingError(f"{type(self).__name__}: betas={self.betas}", remedy="two numbers of 0 to below 1")

    def _changes(self, rows: _Gathered) -> list[torch.Tensor]:
        of_groups = zip(rows.grads, self._squares(rows), rows.states, strict=True)
        return [self._moments(*of_group, rows.step) for of_group in of_groups]

    def _moments(self, grads: torch.Tensor, squares: torch.Tensor, state: torch.Tensor, step: int) -> torch.Tensor:
        """Return the change; ``state`` is the first moment [n, dim], then the second, of the shape of ``squares``.
        Overwrites the squares."""
        beta1, beta2 = self.betas
        first, second = state[:, : grads.shape[1]], state[:, grads.shape[1] :]
        # Two temporaries, each written again and again, stay in the cache.
        change = torch.sub(grads, first).mul_(1.0 - beta1)
        first.add_(change)
        second.add_(squares.sub_(second).mul_(1.0 - beta2))
        divisor = torch.div(second, 1.0 - beta2**step, out=squares).sqrt_().add_(self.eps)
        return torch.div(first, divisor, out=change).mul_(-self.lr / (1.0 - beta1**step))


@dataclass(frozen=True)
class RowWiseAdam(Adam):
    """``Adam`` with one second moment a row, of mean(g^2): dim + 1 instead of 2 dim numbers of state.

    Equal to FBGEMM's PARTIAL_ROWWISE_ADAM (with ``decoupled_weight_decay=True`` if there is weight decay).

    Raises:
        EmbeddingError: a setting below 0, or betas outside [0, 1).
    """

    name = "rowwise_adam"
    row_wise = True


_DENSE_BLOCK, _DENSE_BLOCK_OF_ACCELERATOR = 1 << 16, 1 << 24
"""Numbers of rows that are updated at once, for each thread of a processor: their copies stay in its caches."""


@dataclass(frozen=True)
class DenseAdam(Adam):
    """``Adam`` in which rows that a step does not look up have a gradient of 0 (Kingma and Ba, arXiv 1412.6980,
    algorithm 1), so that they move on by their momentum and decay.

    Equal to ``torch.optim.Adam`` (AdamW with ``decoupled_weight_decay=True``) on tables that every step looks up;
    torch's skips a table without any look-up in a step. A step reads and writes all rows that a rank holds, with their
    state: 24 bytes a number in float32. Rows in tiered storage (``fast_memory_bytes``) are refused, and
    ``flexd.prefetch`` locates the rows of the next batch without fetching them, because every step changes them.

    State, checkpoints and the daemon's ``optimizer: adam`` are those of ``Adam``.

    Raises:
        EmbeddingError: a setting below 0, or betas outside [0, 1).
    """

    moves_all_rows = True

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        """Apply one step to all rows of the dim-groups; ``gradients`` are those of the rows that were looked up.

        No operation combines numbers of several rows, so that a row's result is the same on every rank that holds it.
        """
        for group in groups:
            rows, device = group.rows, group.rows.device
            wide = torch.promote_types(rows.dtype, torch.float32)
            none = torch.empty((0, rows.shape[1]), dtype=wide, device=device)
            slots = torch.cat(
                [index for index, _ in group.gradients] or [torch.empty(0, dtype=torch.int64, device=device)]
            )
            grads = torch.cat([none, *(part.to(wide) for _, part in group.gradients)])
            slots, order = slots.sort()
            grads = grads.index_select(0, order)
            each = devices.block_rows(rows, _DENSE_BLOCK * torch.get_num_threads(), _DENSE_BLOCK_OF_ACCELERATOR)
            firsts = [*range(0, len(rows), each), len(rows)]
            places = torch.searchsorted(slots, torch.tensor(firsts, device=device)).tolist()
            for (first, end), (begin, stop) in zip(pairwise(firsts), pairwise(places), strict=True):
                of_block = grads.new_zeros((end - first, rows.shape[1]))
                of_block.index_copy_(0, slots[begin:stop] - first, grads[begin:stop])
                index = torch.arange(first, end, device=device)
                self._update([replace(group, gradients=[(index, of_block)])], step)


def _rates_at(
    later_keys: torch.Tensor, rates: torch.Tensor, keys_of: KeysOf | None, slots: torch.Tensor
) -> torch.Tensor:
    """int64 [n] slots -> float64 [n, 1] the rates of their tables."""
    assert keys_of is not None  # noqa: S101
    return rates.index_select(0, torch.searchsorted(later_keys, keys_of(slots), right=True)).unsqueeze(1)


@dataclass(frozen=True)
class RatedTables:
    """Tables with one kind of optimizer.

    Attributes:
        rule: with ``lr=1`` where there are rates: changes of all optimizers are proportional to the rate.
        rates: of each table, in the order of their keys; empty if all have the rule's.
        first_keys: the first key of each of them, ascending.
    """

    rule: RowOptimizer
    rates: tuple[float, ...] = ()
    first_keys: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class OptimizersByGroup:
    """The update of tables with several kinds of optimizers or learning rates."""

    kinds: tuple[RatedTables, ...]

    @property
    def moves_all_rows(self) -> bool:
        return any(kind.rule.moves_all_rows for kind in self.kinds)

    @property
    def moves_at_zero(self) -> bool:
        return any(kind.rule.moves_at_zero for kind in self.kinds)

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        for kind in self.kinds:
            own = [group for group in groups if group.optimizer == kind.rule.name]
            if own and kind.rates:
                later_keys = torch.tensor(kind.first_keys[1:], dtype=torch.int64, device=own[0].rows.device)
                rates = torch.tensor(kind.rates, dtype=torch.float64, device=own[0].rows.device)
                own = [replace(group, rates_of=partial(_rates_at, later_keys, rates, group.keys_of)) for group in own]
            if own:
                kind.rule.update_groups(own, step)


RowUpdate = RowOptimizer | OptimizersByGroup
"""Updates given rows in place by the settings of one step."""
