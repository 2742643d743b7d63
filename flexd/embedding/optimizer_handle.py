"""The ``torch.optim.Optimizer`` that a trainer steps for the rows of a collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.engine import RowEngine
from flexd.embedding.row_optimizers import RowOptimizer, RowUpdate
from flexd.embedding.step import StepGradients


@dataclass(frozen=True)
class TableRate:
    """A table with the optimizer and the learning rate that it was given; None: those of the collection.

    Attributes:
        first_key: of its rows.
    """

    name: str
    lr: float | None
    first_key: int
    optimizer: RowOptimizer | None = None


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer of a collection's rows: call ``step()`` after ``backward()``. Learning-rate schedulers work on it.

    ``step`` is collective: every rank of the job calls it the same number of times, also with an empty batch, with
    equal ``param_groups`` (they hold all settings of the row optimizer, which may be changed). It pushes the gradients
    of all backward passes since the last step to the rows' homes, synchronises the replicas and updates both.
    ``zero_grad`` drops the gradients of earlier backward passes, as in torch. Call it before or after the forward
    pass.

    Tables with an optimizer or a learning rate of their own (``EmbeddingTable.optimizer``, ``lr``) are in further
    groups, one for each of both, whose "tables" names them: schedulers and trainers reach each rate there. Tables with
    the same kind of optimizer may differ in lr alone.

    ``state_dict`` holds the settings and the number of steps, which bias correction uses; the optimizer state of the
    rows is in the collection's ``state_dict``.
    """

    def __init__(
        self,
        anchor: torch.nn.Parameter,
        optimizer: RowOptimizer,
        rows: RowEngine,
        tables: Sequence[TableRate] = (),
    ) -> None:
        self._rows = rows
        self._tables = tables
        plain: list[str] = []
        own: dict[tuple[RowOptimizer, float], list[str]] = {}
        for table in tables:
            if table.lr is None and table.optimizer is None:
                plain.append(table.name)
            else:
                rule = table.optimizer or optimizer
                own.setdefault((rule, rule.lr if table.lr is None else table.lr), []).append(table.name)
        first: dict[str, Any] = {"params": [anchor]} | ({"tables": plain} if own else {})
        others: list[dict[str, Any]] = [
            {"params": [], **_settings_of(rule), "lr": lr, "tables": of_rate} for (rule, lr), of_rate in own.items()
        ]
        self._rules = [optimizer, *(rule for rule, _ in own)]
        """Of each parameter group, with the settings that it began with."""
        super().__init__([first, *others], _settings_of(optimizer))
        self._current()

    @property
    def _used(self) -> list[RowOptimizer]:
        """The rules that have tables, as they began."""
        return [rule for rule, group in zip(self._rules, self.param_groups, strict=True) if group.get("tables") != []]

    @property
    def initial_states(self) -> dict[str, float]:
        """Initial value of every number of a row's optimizer state, by ``DimGroup.optimizer``."""
        return {rule.name: rule.initial_state for rule in self._used}

    @property
    def moves_all_rows(self) -> bool:
        """True if a step also changes rows that it did not look up."""
        return any(rule.moves_all_rows for rule in self._used)

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

    def __getstate__(self) -> dict[str, Any]:
        raise EmbeddingError(
            "the optimizer of sharded rows cannot be copied or pickled: it is of its collection",
            remedy="copy its state_dict()",
        )

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

    def _current(self) -> RowUpdate:
        """Return the optimizer with the settings of the parameter groups, which schedulers change.

        Raises:
            EmbeddingError: tables have other settings than the first group, beside the learning rate.
        """
        rules = [_with_settings(rule, group) for rule, group in zip(self._rules, self.param_groups, strict=True)]
        if len(rules) == 1:
            return rules[0]
        from flexd.embedding.table_rates import OptimizersByGroup

        by_kind: dict[str, list[tuple[RowOptimizer, list[str]]]] = {}
        for rule, group in zip(rules, self.param_groups, strict=True):
            if group["tables"]:
                by_kind.setdefault(rule.name, []).append((rule, group["tables"]))
        made = [self._of_kind(groups) for groups in by_kind.values()]
        return made[0] if len(made) == 1 else OptimizersByGroup(tuple(by_kind), tuple(made))

    def _of_kind(self, groups: Sequence[tuple[RowOptimizer, list[str]]]) -> RowUpdate:
        """Return one optimizer for tables of one kind."""
        from flexd.embedding.table_rates import TableRates

        first = groups[0][0]
        rates: dict[str, float] = {}
        for rule, tables in groups:
            rates |= dict.fromkeys(tables, rule.lr)
            if type(rule) is not type(first):
                raise EmbeddingError(
                    f"tables {', '.join(tables)}: {type(rule).__name__}, tables {', '.join(groups[0][1])} have "
                    f"{type(first).__name__}",
                    remedy="use one of them for all of these tables, or two collections",
                )
            for name, value in _settings_of(rule).items():
                if name != "lr" and value != getattr(first, name):
                    raise EmbeddingError(
                        f"tables {', '.join(tables)}: {name}={value}, the first group has {getattr(first, name)}",
                        remedy="tables with one kind of optimizer may differ in lr alone; make other settings equal",
                    )
        own = [table for table in self._tables if table.name in rates]
        return TableRates.of(first, [rates[table.name] for table in own], [table.first_key for table in own])


def _settings_of(rule: RowOptimizer) -> dict[str, Any]:
    return {entry.name: getattr(rule, entry.name) for entry in fields(rule) if entry.init}  # type: ignore[arg-type]


def _with_settings(rule: RowOptimizer, group: dict[str, Any]) -> RowOptimizer:
    """Return the optimizer with the settings of a parameter group."""
    # A group that was saved before a setting existed does not have it.
    given = {name: group.get(name, value) for name, value in _settings_of(rule).items()}
    settings = {
        # A learning rate may be a tensor.
        name: tuple(value) if isinstance(value, list) else value.item() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    changed: RowOptimizer = replace(rule, **settings)  # type: ignore[type-var]
    return changed
