"""The input of a look-up as it was when it was announced, and what it is compared with when it is looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.embedding.exchange.collectives import TrafficKind
from flexd.embedding.exchange.column import Column, ReceivedRows
from flexd.embedding.exchange.hop import Hop
from flexd.embedding.exchange.route import FeatureKeys
from flexd.embedding.features import Jagged
from flexd.embedding.meetings import agree_on_end

if TYPE_CHECKING:
    from flexd.embedding.engine import RowEngine

Flag = bool | torch.Tensor
"""A bool of the host, or a bool [] on the device."""


@dataclass(frozen=True)
class InputValues:
    """Numbers and names that the look-up of an input depends on.

    Attributes:
        weighted: the features that have a factor for each id.
        joined: of a copy, all ``numbers`` of each dtype.
    """

    features: Mapping[str, Jagged]
    weighted: frozenset[str] = frozenset()
    joined: Mapping[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> list[torch.Tensor]:
        """Ids and lengths of the features."""
        features = self.features.values()
        return [*(one.values for one in features), *(one.lengths for one in features)]

    @torch.no_grad()
    def copy(self) -> InputValues:
        """Copy all numbers, with one kernel for each dtype."""
        numbers, joined = _copied(self.numbers)
        values, lengths = numbers[: len(self.features)], numbers[len(self.features) :]
        features = dict(zip(self.features, map(Jagged.checked, values, lengths), strict=True))
        return replace(self, features=features, joined=joined)

    def like(self, other: InputValues) -> InputValues:
        """Return this input with its features in the order of another one, if that has the same."""
        if list(self.features) == list(other.features) or self.features.keys() != other.features.keys():
            return self
        return replace(self, features={name: self.features[name] for name in other.features})


def may_be_input(given: object, announced: object, *, by_value: bool = False) -> bool:
    """Return whether two inputs of a forward pass are the same object, or mappings of the same objects or ids.

    Args:
        by_value: the objects may be others: mappings of the same features, or one type.
    """
    if given is announced:
        return True
    if not isinstance(given, Mapping) or not isinstance(announced, Mapping):
        return by_value and type(given) is type(announced)
    return given.keys() == announced.keys() and (
        by_value or all(_is_same(value, announced[name]) for name, value in given.items())
    )


def _is_same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, Jagged) and isinstance(other, Jagged) and one.values is other.values)


@dataclass(frozen=True)
class LoaderEnd:
    """In place of a batch: the loader has no further one.

    Attributes:
        error: why, if it raised one; the other ranks learn of it with the look-up of the batch.
    """

    error: Exception | None = None

    def agree(self, engine: RowEngine) -> None:
        """Collective. Meet the end of the other ranks' loops where no job has announced it. Raises ``error``, else an
        EmbeddingError if another rank has a further batch or its loader failed."""
        with nullcontext() if self.error is None else suppress(EmbeddingError):
            agree_on_end(engine, failed=self.error is not None)
        if self.error is not None:
            raise self.error


class AnnouncedInput:
    """An input of ``flexd.prefetch``, kept by value: the trainer may write to its objects at any time.

    Args:
        read: converts an input; raises an error if it cannot be looked up.
        keys_of: returns the keys of what ``read`` returns; raises an error if it cannot be looked up.
    """

    def __init__(
        self, given: Any, read: Callable[[Any], InputValues], keys_of: Callable[[InputValues], FeatureKeys]
    ) -> None:
        self.given = given
        self._read, self._keys_of = read, keys_of
        self._error: Exception | None = None
        self._overwritten: list[Flag] = []
        self._at: frozenset[int] = frozenset()
        try:
            self._live = read(given)  # kept: the address of a temporary tensor would be used again
            self._kept = self._live.copy()
            self._at = frozenset(part.data_ptr() for part in self._live.numbers if part.numel())
        except Exception as error:  # the look-up raises it
            self._error = error

    def values(self) -> InputValues:
        """Return the input as it was announced, in memory that nobody else writes to.

        Raises:
            Exception: the input could not be read.
        """
        if self._error is not None:
            raise self._error
        return self._kept

    @cached_property
    def keys(self) -> FeatureKeys:
        """Keys of the input as it was announced. A batch is, before it is the next, one of those farther ahead.

        Raises:
            Exception: the input cannot be looked up.
        """
        return self._keys_of(self.values())

    def forget_keys(self) -> None:
        """Find the keys anew when they are needed again: rows have other dim-groups now."""
        self.__dict__.pop("keys", None)

    def compare(self, given: Any) -> tuple[InputValues, Flag]:
        """Compare with the input of a look-up, by value and without waiting for the device.

        Returns:
            (the input of the look-up, or the announced one if it has another form; whether they differ).
        """
        kept = self.values()
        try:
            now = self._read(given).like(kept)
        except Exception:  # its own look-up raises it
            return kept, True
        differs = _differ(now, kept)
        return (kept if differs is True else now), differs

    def differs(self, given: Any) -> bool:
        """Return whether the input of a look-up is another one, or this one could not be read. Waits for the device."""
        return self._error is not None or bool(self.compare(given)[1])

    def check_overwritten(self, later: AnnouncedInput) -> None:
        """Note whether the loader has written a later batch to the memory of this one."""
        if self._error is None and not self._at.isdisjoint(later._at):
            differs = _differ(self._live.like(self._kept), self._kept)
            self._overwritten.append(differs)

    @property
    def overwritten(self) -> bool:
        """Return True if the loader has written a later batch to its memory. Waits for the device."""
        return any(map(bool, self._overwritten))

    def is_lost_in(self, given: Any) -> bool:
        """Return whether the input of a look-up is in memory of this one that holds a later batch. Waits for the device
        where the loader gave two batches the same memory."""
        if not self._overwritten:
            return False
        try:
            at = {part.data_ptr() for part in self._read(given).numbers}
        except Exception:  # its own look-up raises it
            return False
        return not self._at.isdisjoint(at) and self.overwritten


class ChangeNotice:
    """Tells all ranks beside the rows of a look-up whether any rank's input has changed. A ``RowPiggyback``."""

    def __init__(self, changed: torch.Tensor) -> None:
        self._changed = changed.to(torch.int64).view(1, 1)

    @property
    def changed(self) -> bool:
        """Return True if it has on any rank, once every hop has exchanged its columns. Waits for the device."""
        return bool(self._changed)

    def columns(self, hop: Hop) -> list[Column]:
        once = [1] * hop.peers.size
        words = self._changed.expand(hop.peers.size, 1).contiguous()
        return [Column(words, None, once, once, torch.int64, TrafficKind.SYNC)]

    def receive(self, hop: Hop, arrived: Sequence[ReceivedRows]) -> None:
        del hop
        self._changed = arrived[0].whole(torch.int64).amax().view(1, 1)

    def exchange(self, hops: Sequence[Hop]) -> None:
        """Collective. Exchange it where there are no rows to go with."""
        for hop in reversed(hops):
            self.receive(hop, hop.exchange(self.columns(hop)))


def _form(values: InputValues) -> tuple[object, ...]:
    """Return what the host knows of an input."""
    numbers = values.numbers
    return list(values.features), [part.numel() for part in numbers], [part.dtype for part in numbers], values.weighted


@torch.no_grad()
def _differ(now: InputValues, kept: InputValues) -> Flag:
    """Compare an input with a copy. Where the host sees that they differ it returns True."""
    if _form(now) != _form(kept):
        return True
    pairs = [(torch.cat(parts), kept.joined[dtype]) for dtype, parts in _by_dtype(now.numbers).items()]
    flags = [torch.ne(*pair).any() for pair in pairs]
    return torch.stack(flags).any() if len(flags) > 1 else flags[0] if flags else False


def _by_dtype(parts: Sequence[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        found.setdefault(part.dtype, []).append(part)
    return found


def _copied(parts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[torch.dtype, torch.Tensor]]:
    """Return copies of 1-d tensors, and what they are views of."""
    some = _by_dtype(parts)
    joined = {dtype: torch.cat(alike) for dtype, alike in some.items()}
    copies = {
        dtype: iter(joined[dtype].split_with_sizes([part.numel() for part in alike])) for dtype, alike in some.items()
    }
    return [next(copies[part.dtype]) for part in parts], joined
