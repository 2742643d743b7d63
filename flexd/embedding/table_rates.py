"""Learning rates by table: a row optimizer that scales each row's change by the rate of its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.row_optimizers import GroupUpdate, KeysOf, RowOptimizer, RowUpdate


@dataclass(frozen=True)
class TableRates:
    """The update of tables with learning rates of their own.

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
    def of(rule: RowOptimizer, rates: Sequence[float], first_keys: Sequence[int]) -> RowUpdate:
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
    def moves_all_rows(self) -> bool:
        return self.rule.moves_all_rows

    @property
    def moves_at_zero(self) -> bool:
        return self.rule.moves_at_zero

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        if not groups:
            return
        device = groups[0].rows.device
        later_keys = torch.tensor(self.first_keys[1:], dtype=torch.int64, device=device)
        rates = torch.tensor(self.rates, dtype=torch.float64, device=device)
        self.rule.update_groups(
            [replace(group, rates_of=partial(_rates_at, later_keys, rates, group.keys_of)) for group in groups], step
        )


def _rates_at(
    later_keys: torch.Tensor, rates: torch.Tensor, keys_of: KeysOf | None, slots: torch.Tensor
) -> torch.Tensor:
    """int64 [n] slots -> float64 [n, 1] the rates of their tables."""
    assert keys_of is not None  # noqa: S101
    table = torch.searchsorted(later_keys, keys_of(slots), right=True)
    return rates.index_select(0, table).unsqueeze(1)


@dataclass(frozen=True)
class OptimizersByGroup:
    """The update of tables with several kinds of optimizers.

    Attributes:
        names: of the kinds, as in ``GroupUpdate.optimizer``.
        rules: one of each kind.
    """

    names: tuple[str, ...]
    rules: tuple[RowUpdate, ...]

    @property
    def moves_all_rows(self) -> bool:
        return any(rule.moves_all_rows for rule in self.rules)

    @property
    def moves_at_zero(self) -> bool:
        return any(rule.moves_at_zero for rule in self.rules)

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        for rule, name in zip(self.rules, self.names, strict=True):
            if own := [group for group in groups if group.optimizer == name]:
                rule.update_groups(own, step)
