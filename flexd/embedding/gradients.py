"""The summed gradients of a step between backward pass and update: their norm, and whether they are finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from flexd.core.errors import EmbeddingError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.replicas.replica_sync import RowGradients, sum_by_index
from flexd.embedding.store.store import GroupStore

logger = logging.getLogger(__name__)

_NORMS = frozenset({torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm, torch._foreach_norm})
"""Functions by which torch and frameworks compute norms of gradients."""


class RowGate(torch.Tensor):
    """``StepGradients.gate``. It has no norm of the rows, so computing one is noted as a mistake of the trainer."""

    warned = False
    """In this process."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            cls._note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _note(cls) -> None:
        text = "torch computed a norm of the gradient of rows, as in torch.nn.utils.clip_grad_norm_ of param_groups"
        USAGE_WARNINGS.note(UsageWarningKind.CLIPPED_BY_TORCH, text)
        if not RowGate.warned:
            RowGate.warned = True
            logger.warning(
                "%s: the parameter that represents rows has no norm of theirs, so clipping by it is wrong; call "
                "clip_grad_norm_ of the collection or of flexd.JoinedOptimizer instead",
                text,
            )


class StepGradients:
    """Gradients of all rows that this rank holds and any rank touched, before their update. Equal on all holders.

    Attributes:
        clip: factor of the gradients in the update, beside the gate; equal on all ranks.
    """

    def __init__(self, parts: Sequence[RowGradients], stores: Sequence[GroupStore], world: Peers) -> None:
        self._parts = list(parts)
        self._stores = stores
        self._world = world
        self._finite: bool | None = None
        self._gate: torch.Tensor | None = None
        self.clip = 1.0

    def add(self, parts: Sequence[RowGradients]) -> None:
        """Add gradients of the same step; no chunk was applied in between."""
        self._finite = self._gate = None
        # A sum of two numbers a row does not depend on the order in which a holder has them.
        self._parts = [
            RowGradients(
                old.group,
                *sum_by_index(torch.cat([old.slots, new.slots]), torch.cat([old.grads, new.grads])),
                sole=old.sole,
            )
            for old, new in zip(self._parts, parts, strict=True)
        ]

    @property
    def factor(self) -> float:
        return self.clip if self._gate is None else self.clip * float(self._gate)

    def scaled(self, factor: float) -> list[RowGradients]:
        """Return the gradients multiplied by ``factor``, whose value the caller has read from the property."""
        if factor == 1.0:
            return self._parts
        return [replace(part, grads=part.grads * factor) for part in self._parts]

    def gate(self) -> torch.Tensor:
        """Collective at the first call. Return float32 []: 1, or inf if gradients of any row are not finite.

        The update multiplies by its value at that time: unscaling the gate unscales all rows, and an overflow shows on
        every rank.
        """
        if self._gate is None:
            value = 1.0 if self.finite() else math.inf
            self._gate = torch.full((), value, device=self._parts[0].grads.device).as_subclass(RowGate)
        return self._gate

    def finite(self) -> bool:
        """Collective at the first call. Return whether the gradients of all rows on all ranks are finite."""
        if self._finite is None:
            mine = torch.stack([part.grads.isfinite().all() for part in self._parts]).all().to(torch.int32)
            self._world.all_reduce(mine.view(1), dist.ReduceOp.MIN)
            self._finite = bool(mine.item())
        return self._finite

    @property
    def overflowed(self) -> bool:
        """True if ``finite`` was False. Equal on all ranks."""
        return self._finite is False

    def norm(self, norm_type: float, dense: float) -> float:
        """Collective. Return the norm of all rows' gradients with ``factor``, each row counted once, and of ``dense``.

        Args:
            norm_type: above 0, or inf.
            dense: norm of other gradients; that of rank 0 is used, so that all ranks get the same bits.

        Raises:
            EmbeddingError: ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise EmbeddingError(f"a norm of type {norm_type}", remedy="a number above 0, or inf")
        dense = dense if self._world.index == 0 else 0.0
        largest = math.isinf(norm_type)
        factor = self.factor
        norms = [self._home_norm(part, norm_type) * factor for part in self._parts]
        both = torch.stack([*norms, torch.tensor(dense, dtype=torch.float64, device=norms[0].device)])
        if largest:  # the result of MAX with NaN is not specified
            total = both.nan_to_num(nan=math.inf, posinf=math.inf).max().view(1)
        else:
            total = both.pow(norm_type).sum().view(1)
        self._world.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        self._world.finish_on_device()
        return float(total.item()) if largest else float(total.item()) ** (1.0 / norm_type)

    def _home_norm(self, part: RowGradients, norm_type: float) -> torch.Tensor:
        """Return float64 [] norm of the rows whose home is here, so that a replicated row counts once, and of those
        that have moved here."""
        grads = part.grads.double()
        if not part.sole:
            grads = grads[part.slots < self._stores[part.group].home_rows]
        if grads.numel() == 0:  # torch has no maximum of an empty tensor
            return grads.new_zeros(())
        norm: torch.Tensor = torch.linalg.vector_norm(grads, norm_type)
        return norm


def clip_grad_norm_(
    summed: Sequence[StepGradients],
    max_norm: float,
    norm_type: float,
    dense: Iterable[torch.Tensor],
    *,
    error_if_nonfinite: bool,
) -> float:
    """Collective. Clip the rows and ``dense`` parameters together as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        summed: of each collection that has gradients.

    Raises:
        EmbeddingError: the norm is not finite and ``error_if_nonfinite``, or ``norm_type`` is not above 0.
    """
    parameters = [parameter for parameter in dense if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    of_dense = torch.nn.utils.get_total_norm(grads, norm_type)
    if hasattr(of_dense, "full_tensor"):  # DTensors: equal on all ranks only as full tensors
        of_dense = of_dense.full_tensor()
    total = float(of_dense)
    for of_collection in summed:  # each adds its rows to the norm of what is before it
        total = of_collection.norm(norm_type, total)
    if error_if_nonfinite and not math.isfinite(total):
        raise EmbeddingError(
            f"the norm of type {norm_type:g} of all gradients is {total}",
            remedy="skip the step with zero_grad(), or pass error_if_nonfinite=False to clip by it anyway",
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, of_dense.new_tensor(total))
    for of_collection in summed:
        of_collection.clip *= min(1.0, max_norm / (total + 1e-6)) if not math.isnan(total) else math.nan
    return total


class AnchorParameter(torch.nn.Parameter):
    """Represents all rows where torch needs a parameter: autograd, ``param_groups``, ``torch.amp.GradScaler``.

    Reading ``grad`` is collective: ``GradScaler.unscale_`` and ``step`` read it, on every rank. It sums the gradients
    that wait for the next step at their rows and returns ``StepGradients.gate``, None if no rank has any.
    """

    gradients: Callable[[], StepGradients | None]
    drop: Callable[[], None]

    @staticmethod
    def of(
        device: torch.device, gradients: Callable[[], StepGradients | None], drop: Callable[[], None]
    ) -> AnchorParameter:
        anchor = AnchorParameter(torch.zeros((), device=device))
        anchor.gradients, anchor.drop = gradients, drop
        return anchor

    @property
    def grad(self) -> torch.Tensor | None:
        summed = self.gradients()
        return None if summed is None else summed.gate()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise EmbeddingError("the gradient of rows cannot be set", remedy="call backward()")
        self.drop()
