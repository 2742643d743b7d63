from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)
