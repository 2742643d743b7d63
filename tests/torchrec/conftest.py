"""Without TorchRec there is nothing to test here: ``make torchrec``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.support.rank_pool import RankPool

collect_ignore_glob = [] if find_spec("torchrec") else ["test_*.py"]


@pytest.fixture
def pair(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)
