"""What the docs say of ``TrainPipelineSparseDist`` on a CPU: it trains there, and cannot trace a replaced model."""

from __future__ import annotations

import pytest

from tests.support.rank_pool import RankPool

pytest.importorskip("torchrec")
from flexd.core.layout import RankLayout

STEPS = 5


def test_torchrecs_pipeline_trains_on_a_cpu_and_cannot_trace_a_replaced_model(pair: RankPool) -> None:
    results = pair.run("torchrec_pipeline_jobs:train_pipelined", RankLayout(2, 1), "rowwise_adagrad", STEPS)
    for result in results:
        assert result["losses"] == pytest.approx(result["expected"], abs=2e-6)
        assert len(result["expected"]) == STEPS
        assert result["modules"] == 4, "the inputs of all collections are exchanged ahead"
        assert "torch.fx traces the model" in result["text"]
        assert "flexd.prefetch" in result["text"]
