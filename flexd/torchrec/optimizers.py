"""Convert the optimizer that TorchRec's ``apply_optimizer_in_backward`` attached to tables to flexd's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torchrec.optim
from torch import nn

from flexd.core.errors import EmbeddingError
from flexd.embedding.row_optimizers import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad, RowWiseAdam

_SETTINGS: dict[Callable[..., RowOptimizer], dict[str, Any]] = {
    SGD: {"lr": 0.01},
    Adagrad: {"lr": 0.01, "eps": 1e-8},
    RowWiseAdagrad: {"lr": 0.01, "eps": 1e-8},
    Adam: {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    RowWiseAdam: {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
}
"""Settings of each optimizer with the defaults of FBGEMM's fused ones, which ``DistributedModelParallel`` trains with
where a setting was not given; torch's own defaults differ."""
_RULES: dict[type[torch.optim.Optimizer], Callable[..., RowOptimizer]] = {
    torch.optim.SGD: SGD,
    torchrec.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torchrec.optim.Adagrad: Adagrad,
    torchrec.optim.RowWiseAdagrad: RowWiseAdagrad,
    torch.optim.Adam: Adam,
    torchrec.optim.Adam: Adam,
    torchrec.optim.PartialRowWiseAdam: RowWiseAdam,
}
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "momentum": (0,),
    "dampening": (0,),
    "nesterov": (False,),
    "weight_decay": (0,),
    "lr_decay": (0,),
    "initial_accumulator_value": (0,),
    "amsgrad": (False,),
    "maximize": (False,),
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "differentiable": (False,),
    "capturable": (False,),
}
"""Values with which a setting that has no counterpart does nothing."""
_OTHER_NAMES = {"learning_rate": "lr"}


def attached_optimizers(weights: Mapping[str, nn.Parameter]) -> dict[str, RowOptimizer]:
    """Return the optimizer of each table; without one ``SGD(0.01)``, as ``DistributedModelParallel`` has it.

    Args:
        weights: of each table, by its name in the model.

    Raises:
        EmbeddingError: a table has an optimizer that flexd does not have with the same result, or two tables have one
            kind with settings that differ in more than the learning rate; the error names them.
    """
    found = {name: _attached(name, weight) or SGD(_SETTINGS[SGD]["lr"]) for name, weight in weights.items()}
    kinds: dict[str, tuple[str, RowOptimizer]] = {}
    for name, rule in found.items():
        first, expected = kinds.setdefault(rule.name, (name, rule))
        if replace(rule, lr=expected.lr) != expected:  # type: ignore[type-var]
            raise EmbeddingError(
                f"tables {first!r} and {name!r} have different settings: {expected} and {rule}",
                remedy="tables with one kind of optimizer may differ in lr alone: pass optimizer= for all",
            )
    return found


def _attached(name: str, weight: nn.Parameter) -> RowOptimizer | None:
    classes: list[type[torch.optim.Optimizer]] = getattr(weight, "_optimizer_classes", [])
    settings: list[dict[str, Any]] = getattr(weight, "_optimizer_kwargs", [])
    if not classes:
        return None
    if len(classes) > 1:
        raise EmbeddingError(
            f"table {name!r} has {len(classes)} optimizers: {', '.join(kind.__name__ for kind in classes)}",
            remedy="apply one, or pass optimizer=",
        )
    rule = _RULES.get(classes[0])
    if rule is None:
        raise EmbeddingError(
            f"table {name!r}: optimizer {classes[0].__module__}.{classes[0].__name__}",
            remedy=f"one of {', '.join(sorted({kind.__name__ for kind in _RULES}))}, or pass optimizer=",
        )
    return _converted(name, rule, settings[0])


def _converted(name: str, rule: Callable[..., RowOptimizer], given: Mapping[str, Any]) -> RowOptimizer:
    settings = dict(_SETTINGS[rule])
    for key, value in given.items():
        known = _OTHER_NAMES.get(key, key)
        if known in settings:
            settings[known] = value
        elif known in ("beta1", "beta2") and "betas" in settings:
            beta1, beta2 = settings["betas"]
            settings["betas"] = (value, beta2) if known == "beta1" else (beta1, value)
        elif value not in _WITHOUT_EFFECT.get(key, ()):
            raise EmbeddingError(
                f"table {name!r}: its optimizer has {key}={value!r}, which flexd cannot take over",
                remedy="pass optimizer=, for instance flexd.Adam(lr=..., weight_decay=...)",
            )
    return rule(**settings)
