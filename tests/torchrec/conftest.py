from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Two gloo processes, started on first use and kept for the session."""
    pool = RankPool(2)
    yield pool
    pool.close()
