"""Inputs of TorchRec's types: tensor dicts and invalid ``KeyedJaggedTensor``."""

from __future__ import annotations

import pytest

from tests.support.rank_pool import RankPool

torchrec = pytest.importorskip("torchrec")

from flexd.core.layout import RankLayout  # noqa: E402
from tests.support import torchrec_jobs  # noqa: E402


def test_invalid_input_is_refused_on_every_rank(pair: RankPool) -> None:
    causes = ["a Tensor instead of a KeyedJaggedTensor", "has no history, target", "2 values and 3 lengths", "row 99"]
    for rank, errors in enumerate(pair.run(torchrec_jobs.refused, RankLayout(2, 1), 1)):
        for text, cause in zip(errors, causes, strict=True):
            assert (cause if rank == 1 else "rank 1 has input") in text
