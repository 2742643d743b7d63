"""Optimizers by table: each dim-group, whose tables have one kind of optimizer, is updated by its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexd.embedding.row_optimizers import GroupUpdate, RowOptimizer, UpdatesGroups


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

    def update(
        self, rows: torch.Tensor, state: torch.Tensor, index: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        raise AssertionError("rows without their dim-group")

    def update_groups(self, groups: Sequence[GroupUpdate], step: int) -> None:
        """As ``RowOptimizer.update`` of each part of the dim-groups."""
        for rule in self.rules:
            own = [group for group in groups if group.optimizer == rule.name]
            if isinstance(rule, UpdatesGroups):
                if own:
                    rule.update_groups(own, step)
                continue
            for group in own:
                for slots, grads in group.gradients:
                    rule.update(group.rows, group.state, slots, grads, step)
