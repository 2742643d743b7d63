"""Learning rates by table: a row optimizer that scales each row's change by the rate of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.row_optimizers import GroupUpdate, KeysOf, RowOptimizer


@dataclass(frozen=True)
class TableRates:
    """A ``RowOptimizer`` whose tables have learning rates of their own.

    Changes of all optimizers are proportional to the rate, so the rule runs with a rate of 1.

    Attributes:
        rule: with ``lr=1``.
        rates: of each table, in the order of their keys.
        first_keys: the first key of each of them, ascending.
    """

    rule: RowOptimizer
    rates: tuple[float, ...]
    first_keys: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(rule: RowOptimizer, rates: Sequence[float], first_keys: Sequence[int]) -> RowOptimizer:
        """Return the rule itself where all tables have its rate.

        Args:
            rates, first_keys: of each table, in any order.

        Raises:
            EmbeddingError: a rate is below 0, or the rule is one that updates no dim-groups.
        """
        if all(rate == rule.lr for rate in rates):
            return rule
        if not all(rate >= 0.0 for rate in rates):
            raise EmbeddingError(f"learning rates by table: {list(rates)}", remedy="at least 0")
        order = sorted(range(len(first_keys)), key=first_keys.__getitem__)
        return TableRates(
            replace(rule, lr=1.0),  # type: ignore[type-var]
            tuple(rates[at] for at in order),
            tuple(first_keys[at] for at in order),
        )

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def lr(self) -> float:
        return self.rule.lr

    @property
    def initial_state(self) -> float:
        return self.rule.initial_state

    @property
    def moves_all_rows(self) -> bool:
        return getattr(self.rule, "moves_all_rows", False)

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        """As ``RowOptimizer.update`` of each part of the dim-groups."""
        rates = _OnDevice(self)
        self.rule.update_groups([replace(group, rates_of=rates.of(group)) for group in groups], step)


class _OnDevice:
    """The rates on the devices of the rows, for one step."""

    def __init__(self, rates: TableRates) -> None:
        self._rates = rates
        self._made: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, group: GroupUpdate) -> Callable[[torch.Tensor], torch.Tensor]:
        device = group.rows.device
        if device not in self._made:
            first_keys = torch.tensor(self._rates.first_keys[1:], dtype=torch.int64, device=device)
            self._made[device] = first_keys, torch.tensor(self._rates.rates, dtype=torch.float64, device=device)
        if group.keys_of is None:
            raise AssertionError("rows without keys")
        return partial(_rates_at, *self._made[device], group.keys_of)


def _rates_at(later_keys: torch.Tensor, rates: torch.Tensor, keys_of: KeysOf, slots: torch.Tensor) -> torch.Tensor:
    """int64 [n] slots -> float64 [n, 1] the rates of their tables."""
    table = torch.searchsorted(later_keys, keys_of(slots), right=True)
    return rates.index_select(0, table).unsqueeze(1)


@dataclass(frozen=True)
class OptimizersByGroup:
    """A ``RowOptimizer`` of tables with several kinds of optimizers.

    Attributes:
        rules: one of each kind; they differ in ``name``.
    """

    rules: tuple[RowOptimizer, ...]

    @property
    def name(self) -> str:
        return "+".join(rule.name for rule in self.rules)

    @property
    def lr(self) -> float:
        return self.rules[0].lr

    @property
    def initial_state(self) -> float:
        raise AssertionError("each dim-group has its own")

    @property
    def moves_all_rows(self) -> bool:
        return any(getattr(rule, "moves_all_rows", False) for rule in self.rules)

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        """As ``RowOptimizer.update`` of each part of the dim-groups."""
        for rule in self.rules:
            if own := [group for group in groups if group.optimizer == rule.name]:
                rule.update_groups(own, step)
