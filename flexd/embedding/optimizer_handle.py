"""The ``torch.optim.Optimizer`` that a trainer steps for the rows of a collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.gradients import StepGradients
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.table_rates import TableRates


class SteppedRows(Protocol):
    """Rows that an optimizer step updates; ``RowEngine`` implements it."""

    steps: int

    def push(self, optimizer: RowOptimizer) -> None: ...

    def drop_gradients(self) -> None: ...

    def gradients(self) -> StepGradients | None: ...


@dataclass(frozen=True)
class TableRate:
    """A table with the learning rate that it was given; None: that of the optimizer.

    Attributes:
        first_key: of its rows.
    """

    name: str
    lr: float | None
    first_key: int


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer of a collection's rows: call ``step()`` after ``backward()``. Learning-rate schedulers work on it.

    ``step`` is collective: every rank of the job calls it the same number of times, also with an empty batch, with
    equal ``param_groups`` (they hold all settings of the row optimizer, which may be changed). It pushes the gradients
    of all backward passes since the last step to the rows' homes, synchronises the replicas and updates both.
    ``zero_grad`` drops the gradients of earlier backward passes, as in torch. Call it before or after the forward
    pass.

    Tables with a learning rate of their own (``EmbeddingTable.lr``) are in further groups, one a rate, whose "tables"
    names them: schedulers and trainers reach each rate there.

    ``state_dict`` holds the settings and the number of steps, which bias correction uses; the optimizer state of the
    rows is in the collection's ``state_dict``.
    """

    def __init__(
        self,
        anchor: torch.nn.Parameter,
        optimizer: RowOptimizer,
        rows: SteppedRows,
        tables: Sequence[TableRate] = (),
    ) -> None:
        self._rule = optimizer
        self._rows = rows
        self._tables = tables
        names = [entry.name for entry in fields(optimizer) if entry.init]  # type: ignore[arg-type]
        own: dict[float, list[str]] = {}
        for table in tables:
            if table.lr is not None:
                own.setdefault(table.lr, []).append(table.name)
        first: dict[str, Any] = {"params": [anchor]} | (
            {"tables": [each.name for each in tables if each.lr is None]} if own else {}
        )
        others: list[dict[str, Any]] = [{"params": [], "lr": lr, "tables": of_rate} for lr, of_rate in own.items()]
        super().__init__([first, *others], {name: getattr(optimizer, name) for name in names})
        self._names = names
        self._current()

    @property
    def initial_state(self) -> float:
        """Initial value of every number of a row's optimizer state."""
        return self._rule.initial_state

    @property
    def moves_all_rows(self) -> bool:
        """True if a step also changes rows that it did not look up."""
        return getattr(self._rule, "moves_all_rows", False)

    def gradients(self) -> StepGradients | None:
        """Collective. Return the gradients that wait for the next step, summed at their rows; None without any."""
        return self._rows.gradients()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rows.push(self._current())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        self._rows.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["state"] = {0: {"step": torch.tensor(self._rows.steps, dtype=torch.int64)}}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = state_dict["state"].get(0, {})
        self.state.clear()
        if "step" in saved:
            self._rows.steps = int(saved["step"])

    def _current(self) -> RowOptimizer:
        """Return the optimizer with the settings of the parameter groups, which schedulers change.

        Raises:
            EmbeddingError: tables have other settings than the first group, beside the learning rate.
        """
        first, *others = [self._settings(group) for group in self.param_groups]
        rule: RowOptimizer = replace(self._rule, **first)  # type: ignore[type-var]
        if not others:
            return rule
        for group, settings in zip(self.param_groups[1:], others, strict=True):
            for name, value in settings.items():
                if name != "lr" and value != first[name]:
                    raise EmbeddingError(
                        f"tables {', '.join(group['tables'])}: {name}={value}, the first group has {first[name]}",
                        remedy="tables of a collection may differ in lr alone; use a collection for each other setting",
                    )
        rates = {
            table: settings["lr"]
            for group, settings in zip(self.param_groups, (first, *others), strict=True)
            for table in group["tables"]
        }
        return TableRates.of(
            rule, [rates[table.name] for table in self._tables], [table.first_key for table in self._tables]
        )

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        # A group that was saved before a setting existed does not have it.
        given = {name: group.get(name, getattr(self._rule, name)) for name in self._names}
        return {name: tuple(value) if isinstance(value, list) else _number(value) for name, value in given.items()}


def _number(value: Any) -> Any:
    """Return a Python number; a learning rate may be a tensor."""
    return value.item() if isinstance(value, torch.Tensor) else value
