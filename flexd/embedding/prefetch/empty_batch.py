"""Batches without samples, of the types of a batch: for a rank whose loader has ended before the others'."""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.features import Jagged


@singledispatch
def empty_batch(batch: Any) -> Any:
    """Return a batch of the same type with 0 samples; other modules register further types. See ``flexd.prefetch``.

    Raises:
        EmbeddingError: the type is unknown.
    """
    if is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        for one in fields(batch):
            object.__setattr__(made, one.name, empty_batch(getattr(batch, one.name)))
        return made
    raise EmbeddingError(
        f"flexd.prefetch(..., uneven='empty'): no empty batch can be made of a {type(batch).__name__}",
        remedy="let the loader yield mappings, sequences or dataclasses of tensors, or use uneven='stop'",
    )


@empty_batch.register(str | bytes | int | float | complex | None | torch.dtype | torch.device | np.generic)
def _same(batch: Any) -> Any:
    return batch


@empty_batch.register
def _tensor(batch: torch.Tensor) -> torch.Tensor:
    if batch.is_nested:
        packed = Jagged.from_nested(batch)
        return Jagged(packed.values[:0].detach().clone(), packed.lengths[:0].clone()).to_nested()
    return batch.detach()[:0].clone() if batch.dim() else batch


@empty_batch.register
def _array(batch: np.ndarray) -> Any:
    return batch[:0].copy() if batch.ndim else batch


@empty_batch.register
def _jagged(batch: Jagged) -> Jagged:
    return Jagged(_tensor(batch.values), _tensor(batch.lengths))


@empty_batch.register(Mapping)
def _mapping(batch: Mapping[Any, Any]) -> Any:
    made: Any = copy.copy(batch)
    for name, value in batch.items():
        made[name] = empty_batch(value)
    return made


@empty_batch.register(tuple)
def _tuple(batch: tuple[Any, ...]) -> Any:
    made = map(empty_batch, batch)
    return batch._make(made) if hasattr(batch, "_make") else type(batch)(made)


@empty_batch.register(list)
def _list(batch: list[Any]) -> list[Any]:
    """Of a value for each sample nothing stays."""
    made = [empty_batch(value) for value in batch]
    same = all(value is kept for value, kept in zip(batch, made, strict=True))
    return type(batch)() if same else type(batch)(made)
