"""Take a batch apart into tensors by sample, and make a batch of other samples.

A batch is a tensor [samples, ...], a ``Jagged``, a nested tensor of layout ``torch.jagged``, a registered type (those
of TorchRec, where ``flexd.torchrec`` is imported), or a mapping, sequence, named tuple or dataclass of such. Numbers,
strings and None are equal for all samples of the batch and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.jagged import Jagged

Part = torch.Tensor | Jagged
"""Dense [samples, ...], or jagged with one length a sample."""

_REMEDY = (
    "give tensors with a leading batch dimension, flexd.Jagged, nested tensors of layout torch.jagged, and mappings, "
    "sequences, named tuples or dataclasses of these"
)


class BatchType(NamedTuple):
    """How a class of batches is taken apart.

    Attributes:
        split: returns the parts of a batch, by name.
        build: makes a batch like the given one of other parts, in the same order.
    """

    split: Callable[[Any], Mapping[str, Part]]
    build: Callable[[Any, Sequence[Part]], Any]


_types: dict[type, BatchType] = {}


def register_batch_type(kind: type, how: BatchType) -> None:
    """Let ``flexd.prefetch(deal=True)`` ship objects of a class."""
    _types[kind] = how


@dataclass(frozen=True)
class SampleParts:
    """A batch as parts.

    Attributes:
        names: where each part is in the batch, for errors.
        values: each object once, even if the batch has it in several places.
        samples: number of samples.
        build: makes the batch of parts of other samples, in the same order; once.
    """

    names: tuple[str, ...]
    values: tuple[Part, ...]
    samples: int
    build: Callable[[Sequence[Part]], Any]

    @property
    def structure(self) -> str:
        """Names, dtypes and shapes of the parts: equal on all ranks, or their samples cannot be mixed."""
        return "; ".join(
            f"{name}: {_described(part)}" for name, part in sorted(zip(self.names, self.values, strict=True))
        )

    @staticmethod
    def of(batch: Any) -> SampleParts:
        """Take a batch apart.

        Raises:
            EmbeddingError: the batch has an object that cannot be shipped, or its parts differ in their samples.
        """
        walk = _Walk()
        rebuild = walk.visit(batch, "batch")
        sizes = [_samples(part) for part in walk.values]
        odd = next((at for at, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            raise EmbeddingError(
                f"{walk.names[0]} has {sizes[0]} samples, {walk.names[odd]} has {sizes[odd]}",
                remedy="samples can be dealt if each part of a batch has one entry for each: a dense tensor [samples, "
                "...], or Jagged with one length a sample",
            )

        return SampleParts(tuple(walk.names), tuple(walk.values), sizes[0] if sizes else 0, rebuild)


Rebuild = Callable[[Sequence[Part]], Any]


class _Walk:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Part] = []
        self._known: dict[int, Rebuild] = {}

    def visit(self, given: Any, name: str) -> Rebuild:
        """Add the parts of an object, and return what makes it anew of other parts."""
        if given is None or isinstance(given, (str, bytes, bool, int, float)):
            return lambda _: given
        # Objects live as long as the batch, so their ids are theirs. One in two places stays one.
        if id(given) not in self._known:
            self._known[id(given)] = _once(self._open(given, name))
        return self._known[id(given)]

    def _open(self, given: Any, name: str) -> Rebuild:
        if isinstance(given, Jagged):
            return self._add(name, given)
        if isinstance(given, torch.Tensor):
            return self._tensor(given, name)
        how = next((how for kind, how in _types.items() if isinstance(given, kind)), None)
        if how is not None:
            adds = [self._add(f"{name}[{key!r}]", part) for key, part in how.split(given).items()]
            return lambda parts: how.build(given, [part(parts) for part in adds])
        return self._container(given, name)

    def _container(self, given: Any, name: str) -> Rebuild:
        if isinstance(given, Mapping):
            inner = {key: self.visit(value, f"{name}[{key!r}]") for key, value in given.items()}
            kind: Any = dict if isinstance(given, dict) else type(given)
            return lambda parts: kind({key: make(parts) for key, make in inner.items()})
        if isinstance(given, (list, tuple)):
            items = [self.visit(value, f"{name}[{at}]") for at, value in enumerate(given)]
            if hasattr(given, "_fields"):
                return lambda parts: type(given)(*(make(parts) for make in items))
            return lambda parts: type(given)(make(parts) for make in items)
        if is_dataclass(given) and not isinstance(given, type):
            attributes = {
                field.name: self.visit(getattr(given, field.name), f"{name}.{field.name}")
                for field in fields(given)
                if field.init
            }
            return lambda parts: replace(given, **{key: make(parts) for key, make in attributes.items()})
        raise EmbeddingError(f"{name} is a {type(given).__name__}, which cannot be shipped", remedy=_REMEDY)

    def _tensor(self, given: torch.Tensor, name: str) -> Rebuild:
        if given.is_nested:
            part = self._add(name, Jagged.from_nested(given))
            return lambda parts: part(parts).to_nested()
        if given.layout != torch.strided or given.dim() == 0 or given.requires_grad:
            what = "requires gradients" if given.requires_grad else f"has shape {tuple(given.shape)}, {given.layout}"
            raise EmbeddingError(f"{name} {what}, which cannot be shipped", remedy=_REMEDY)
        return self._add(name, given)

    def _add(self, name: str, part: Part) -> Rebuild:
        number = len(self.values)
        self.names.append(name)
        self.values.append(part)
        return lambda parts: parts[number]


def _once(make: Rebuild) -> Rebuild:
    made: list[Any] = []

    def rebuild(parts: Sequence[Part]) -> Any:
        if not made:
            made.append(make(parts))
        return made[0]

    return rebuild


def _samples(part: Part) -> int:
    return part.lengths.shape[0] if isinstance(part, Jagged) else part.shape[0]


def _described(part: Part) -> str:
    if isinstance(part, Jagged):
        return f"jagged {part.values.dtype} {tuple(part.values.shape[1:])}"
    return f"{part.dtype} {tuple(part.shape[1:])}"
