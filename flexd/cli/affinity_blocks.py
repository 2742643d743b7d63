"""Affinity, for ``flexd plan``."""

from __future__ import annotations

from flexd.api.affinity import AffinityReport
from flexd.cli.blocks import Block, Sentences


def affinity_blocks(shown: AffinityReport) -> list[Block]:
    """Return what homes and dealing by affinity would win, in sentences."""
    return [Sentences("affinity", shown.words)]
