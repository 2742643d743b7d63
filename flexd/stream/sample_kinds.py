"""The kinds and lengths of samples; commands have them as options, so nothing is imported here."""

from __future__ import annotations

from enum import StrEnum


class SampleKind(StrEnum):
    """How samples are made and given to ranks."""

    SEQUENCES = "sequences"
    """Pieces of a history that do not overlap, at most one of a user in a global batch, given to the ranks in turn."""
    IMPRESSIONS = "impressions"
    """A sample for every event, with the history before it; consecutive samples are given to the ranks in turn."""


class SampleLengths(StrEnum):
    """Events of a sample."""

    FIXED = "fixed"
    """All samples have a full history; shorter ones are left out."""
    REAL = "real"
    """Samples are as long as the histories of their users, up to the full length."""
