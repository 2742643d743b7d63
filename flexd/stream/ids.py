"""Ids of events as rows of a table: integers, text and bytes by hash, text by a vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from flexd.core.arrays import Int64Array
from flexd.core.errors import ConfigError
from flexd.stream.schemas import import_extra


def make_hash() -> Callable[[Any], int]:
    """Return xxh64 with seed 0 of text (UTF-8), bytes, and integers (8 bytes, little-endian), as int64.

    UUIDs are hashed as the text that JSON has. The function raises TypeError for other values, OverflowError for
    integers beyond int64.
    """
    digest: Callable[[Any], int] = import_extra("xxhash").xxh64_intdigest

    def hashed(value: Any) -> int:
        if type(value) is str:
            value = value.encode()
        elif type(value) is int:
            value = value.to_bytes(8, "little", signed=True)
        elif isinstance(value, UUID):
            value = str(value).encode()
        unsigned = digest(value)
        return unsigned - 2**64 if unsigned >= 2**63 else unsigned

    return hashed


class TableIds:
    """Converts the ids of one table; see ``flexd.config.mapping.IdsConfig`` for the arguments.

    ``extend`` runs in the interpreter's own loops: no statement is run for an id. ``convert`` is the same for one id.

    Raises:
        ConfigError: the vocabulary cannot be read, or has a token twice.
        MissingExtraError: xxhash is not installed.
    """

    def __init__(
        self,
        hash: str | None = None,
        decimal: bool = False,
        vocabulary: Path | None = None,
        modulo: int | None = None,
    ) -> None:
        self._modulo = modulo
        self._code = "q"
        self.convert: Callable[[Any], int] = _integer
        # From an id to another, one after another.
        self._each: tuple[Callable[[Any], Any], ...] = ()
        if hash is not None:
            # Unsigned while they are collected: the remainder is that of the unsigned hash.
            self._code, self._each = "Q", (str.encode, import_extra("xxhash").xxh64_intdigest)
            signed = make_hash()
            self.convert = lambda value: signed(value) % 2**64
        elif decimal:
            self._each, self.convert = (_decimal,), _decimal
        elif vocabulary is not None:
            self.convert = _read_vocabulary(vocabulary).__getitem__
            self._each = (self.convert,)

    def collector(self) -> array[int]:
        """Return an empty array to extend."""
        return array(self._code)

    def extend(self, collected: array[int], values: Iterable[Any]) -> None:
        """Append ids, or none of them.

        Raises:
            KeyError, TypeError, ValueError, OverflowError, AttributeError: an id is missing, or cannot be converted.
        """
        for each in self._each:
            values = map(each, values)
        # All or none, and in two thirds of the time of ``extend``.
        collected.fromlist(values if type(values) is list else list(values))

    def rows(self, collected: array[int]) -> Int64Array:
        """Return the rows of collected ids, int64 [n]."""
        ids = np.frombuffer(collected, dtype=np.uint64 if self._code == "Q" else np.int64)
        if self._modulo is None:
            return ids.view(np.int64).copy()
        return np.remainder(ids, ids.dtype.type(self._modulo)).astype(np.int64)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} where an integer was expected")
    if not -(2**63) <= value < 2**63:
        raise OverflowError("an integer beyond 64 bits")
    return value


def _decimal(value: Any) -> int:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} where a number as text was expected")
    # Longer ones would cost the square of their length.
    return _integer(int(value[:24]))


def _read_vocabulary(file: Path) -> dict[Any, int]:
    try:
        tokens = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"stream.mapping.ids: {file} cannot be read: {error}", remedy="give a UTF-8 file with a token in each line"
        ) from error
    if tokens and not tokens[-1]:
        tokens.pop()
    rows = {token: row for row, token in enumerate(tokens)}
    if len(rows) != len(tokens):
        raise ConfigError(f"stream.mapping.ids: {file} has a token twice", remedy="give each row a token of its own")
    return rows
