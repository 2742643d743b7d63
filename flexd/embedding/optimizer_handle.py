"""Optimizers that a trainer steps: that of the rows of a collection, with rates by table, and several joined as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.engine import RowEngine
from flexd.embedding.row_optimizers import OptimizersByGroup, RatedTables, RowOptimizer, RowUpdate
from flexd.embedding.step import StepGradients, clip_grad_norm_

if TYPE_CHECKING:
    from flexd.embedding.embedding_table import EmbeddingTable


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
        tables: Sequence[EmbeddingTable],
    ) -> None:
        self._rows = rows
        plain: list[str] = []
        own: dict[tuple[RowOptimizer, float], list[str]] = {}
        for table in tables:
            if table.lr is None and table.optimizer is None:
                plain.append(table.name)
            else:
                rule = table.optimizer or optimizer
                own.setdefault((rule, rule.lr if table.lr is None else table.lr), []).append(table.name)
        idle = [table.name for table in tables if not table.trainable and table.name not in plain]
        if idle:
            warnings.warn(
                f"flexd: tables {', '.join(map(repr, idle))} have an optimizer or a learning rate of their own and are "
                "read only: these are not used before collection.unfreeze; otherwise leave them out",
                stacklevel=2,
            )
        first: dict[str, Any] = {"params": [anchor]} | ({"tables": plain} if own else {})
        others: list[dict[str, Any]] = [
            {"params": [], **_settings_of(rule), "lr": lr, "tables": of_rate} for (rule, lr), of_rate in own.items()
        ]
        # Of each parameter group, with the settings that it began with.
        self._rules = [optimizer, *(rule for rule, _ in own)]
        super().__init__([first, *others], _settings_of(optimizer))
        self._current()

    @property
    def _used(self) -> list[RowOptimizer]:
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
        by_kind: dict[str, list[tuple[RowOptimizer, list[str]]]] = {}
        for rule, group in zip(rules, self.param_groups, strict=True):
            if group["tables"]:
                by_kind.setdefault(rule.name, []).append((rule, group["tables"]))
        made = tuple(self._of_kind(groups) for groups in by_kind.values())
        return made[0].rule if len(made) == 1 and not made[0].rates else OptimizersByGroup(made)

    def _of_kind(self, groups: Sequence[tuple[RowOptimizer, list[str]]]) -> RatedTables:
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
        if all(rate == first.lr for rate in rates.values()):
            return RatedTables(first)
        keyspace = self._rows.keyspace
        names = sorted(rates, key=keyspace.index.__getitem__)
        first_keys = tuple(int(keyspace.first_key[keyspace.index[name]]) for name in names)
        return RatedTables(replace(first, lr=1.0), tuple(rates[name] for name in names), first_keys)


def _settings_of(rule: RowOptimizer) -> dict[str, Any]:
    return {entry.name: getattr(rule, entry.name) for entry in fields(rule)}


def _with_settings(rule: RowOptimizer, group: dict[str, Any]) -> RowOptimizer:
    # A group that was saved before a setting existed does not have it.
    given = {name: group.get(name, value) for name, value in _settings_of(rule).items()}
    settings: dict[str, Any] = {
        # A learning rate may be a tensor.
        name: tuple(value) if isinstance(value, list) else value.item() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    return replace(rule, **settings)


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers where a trainer expects one.

    ::

        optimizer = flexd.JoinedOptimizer(torch.optim.Adam(model.parameters()), embedding.optimizer)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

    ``param_groups`` are the groups of all of them, in order, and the same dictionaries: schedulers and trainers that
    set a learning rate reach every optimizer. ``torch.amp.GradScaler`` unscales all gradients, and skips the step of
    all where one overflows. ``step`` and ``clip_grad_norm_`` are collective, as those of rows are.

    ``torch.nn.utils.clip_grad_norm_`` does not see the gradients of rows: use ``clip_grad_norm_`` of this optimizer.

    Args:
        optimizers: any, dense ones and those of rows (``EmbeddingCollection.optimizer``).

    Raises:
        EmbeddingError: there is no optimizer, or two have a parameter in common.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        parameters = [id(parameter) for group in self._groups() for parameter in group["params"]]
        if not optimizers or len(set(parameters)) < len(parameters):
            raise EmbeddingError(
                f"JoinedOptimizer of {len(optimizers)} optimizers"
                + (", which have parameters in common" if parameters else ""),
                remedy="give each optimizer once, and each parameter to one of them",
            )
        first = optimizers[0].defaults
        # OneCycleLR decides by these whether it changes momentum or betas, in all groups.
        common = {name: value for name, value in first.items() if all(name in each.defaults for each in optimizers)}
        super().__init__(self._groups(), common)
        # A dictionary, not a copy: frameworks move or read the state of dense parameters through it.
        self.state = optimizers[0].state

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the first optimizer."""
        if any(param_group is group for group in self._groups()):
            self.param_groups.append(param_group)  # called by the constructor
            return
        self.optimizers[0].add_param_group(param_group)
        self.param_groups = self._groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Step every optimizer once; ``closure`` is called once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Collective. Clip all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does on one process.

        Returns float64 [], the total norm; see ``EmbeddingCollection.clip_grad_norm_``. Dense gradients must be equal
        on all ranks (after DDP) or DTensors.

        Raises:
            EmbeddingError: the norm is not finite and ``error_if_nonfinite``, or ``norm_type`` is not above 0.
        """
        dense = [
            parameter
            for each in self.optimizers
            if not isinstance(each, FusedOptimizer)
            for group in each.param_groups
            for parameter in group["params"]
        ]
        rows = [each for each in self.optimizers if isinstance(each, FusedOptimizer)]
        summed = [gradients for each in rows if (gradients := each.gradients()) is not None]
        total = clip_grad_norm_(summed, max_norm, norm_type, dense, error_if_nonfinite=error_if_nonfinite)
        return torch.tensor(total, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the states and groups of all optimizers in the form of one ``torch.optim.Optimizer``.

        The optimizer state of rows is in the checkpoint of their collection.
        """
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for each in self.optimizers:
            saved = each.state_dict()
            state |= {first + number: values for number, values in saved["state"].items()}
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in saved["param_groups"]
            ]
            first += _parameters_of(saved["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of an equal ``JoinedOptimizer`` returned.

        Raises:
            EmbeddingError: the number of groups differs.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise EmbeddingError(
                f"a saved optimizer of {len(groups)} parameter groups, this one has {len(self.param_groups)}",
                remedy="join the same optimizers in the same order",
            )
        first = 0
        for each in self.optimizers:
            of_each, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            count = _parameters_of(of_each)
            numbers = range(first, first + count)
            each.load_state_dict(
                {
                    "state": {n - first: values for n, values in state_dict["state"].items() if n in numbers},
                    "param_groups": [{**group, "params": [n - first for n in group["params"]]} for group in of_each],
                }
            )
            first += count
        self.param_groups, self.state = self._groups(), self.optimizers[0].state


def _parameters_of(groups: Sequence[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)
