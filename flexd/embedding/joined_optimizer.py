"""``flexd.JoinedOptimizer``: the dense optimizer of a trainer and the optimizers of its rows as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.optimizer_handle import FusedOptimizer
from flexd.embedding.step import clip_grad_norm_


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
