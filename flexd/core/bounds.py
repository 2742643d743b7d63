"""Bounds of the fields of what ranks report, declared in their types: ``Annotated[int, Range(0, 10)]``."""

from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """Bounds of a number, both inclusive."""

    low: float
    high: float


class Longest(NamedTuple):
    """Largest number of characters of a text, or of items of a tuple."""

    length: int


# As many as a float counts one by one.
Count = Annotated[int, Range(0, 2**53)]
# Thirty years.
Seconds = Annotated[float, Range(0.0, 1e9)]
UnixSeconds = Annotated[float, Range(0.0, 1e11)]
Name = Annotated[str, Longest(64)]
