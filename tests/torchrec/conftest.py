"""Without TorchRec there is nothing to test here: ``make torchrec``."""

from importlib.util import find_spec

import pytest

from tests.support.rank_pool import RankPool, Ranks

collect_ignore_glob = [] if find_spec("torchrec") else ["test_*.py"]


@pytest.fixture
def pair(ranks: Ranks) -> RankPool:
    return ranks(2)
