"""Answers of pooled tables: rows, which the requester pools, or sums of bags, which the homes make."""

from __future__ import annotations

from dataclasses import dataclass

ROWS, SUMS = "rows", "sums"


@dataclass(frozen=True)
class TableAnswers:
    """The pooled tables of a trainer, and those of them that answer by sums."""

    pooled: frozenset[int] = frozenset()
    by_sums: frozenset[int] = frozenset()


NO_POOLED = TableAnswers()
