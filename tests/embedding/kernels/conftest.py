from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    """Two gloo processes, started on first use and kept for the folder."""
    pool = RankPool(2)
    yield pool
    pool.close()
