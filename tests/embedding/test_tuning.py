"""The tuner of a job: its choice reaches all ranks and changes nothing that is learned."""

from typing import Any

import numpy as np
import pytest
import torch

import flexd
from flexd.core.placement import RankLayout
from flexd.embedding.exchange.arms import AgreedArm
from flexd.embedding.row_optimizers import SGD
from flexd.embedding.tuning import StepTuner
from tests.support.rank_pool import Ranks

SECONDS = {"chain": 1.0, "direct": 0.8, "chain with prefetch": 0.9, "direct with prefetch": 0.6}
WIRES = {"float32": 1.0, "bfloat16": 0.5}
STEPS = 260


def trained(rank: int, layout: RankLayout, fixed: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """Train with default settings or ``fixed`` ones; a step takes the seconds of its arm by the tuner's clock."""
    exchange = fixed.get("exchange")
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 200, 4, dtype="float64")], layout=layout, optimizer=flexd.Adagrad(lr=0.1), seed=3,
        **({} if exchange is None else {"exchange": exchange}), comm_dtype=fixed.get("comm_dtype"),
    )  # fmt: skip
    now = [0.0]
    if (tuner := collection.engine.tuner()) is not None:
        tuner._clock = lambda: now[0]
    draw = np.random.default_rng([5, rank])
    batches = [
        {"item": flexd.Jagged(torch.from_numpy(draw.integers(0, 200, 12)), torch.tensor([12]))} for _ in range(STEPS)
    ]
    used, losses = [], []
    for batch in flexd.prefetch(batches, collection, ahead=fixed.get("ahead")):
        loss = collection(batch)["item"].values.square().sum()
        loss.backward()
        now[0] += seconds[str(collection.engine.arm.in_use)]
        collection.optimizer.step()
        used.append(str(collection.engine.arm.in_use))
        losses.append(float(loss.detach()))
        told = collection.tuning()
    return {"used": used, "losses": losses, "table": collection.gather_table("item"), "tuning": told, "text": str(told)}


def test_all_ranks_use_the_arm_that_wins_and_train_as_with_a_fixed_one(ranks: Ranks) -> None:
    layout = RankLayout(2, 2)
    plain = ranks(4).run(trained, layout, {"exchange": "chain", "ahead": 1}, SECONDS)
    tuned = ranks(4).run(trained, layout, {}, SECONDS)
    assert {arm for result in plain for arm in result["used"]} == {"chain with prefetch"}
    for fixed, result in zip(plain, tuned, strict=True):
        assert result["used"] == tuned[0]["used"]
        assert set(result["used"]) == set(SECONDS)
        np.testing.assert_allclose(result["losses"], fixed["losses"], rtol=1e-9)
        torch.testing.assert_close(result["table"], fixed["table"], rtol=1e-9, atol=1e-12)
    assert set(tuned[0]["used"][-100:]) == {"direct with prefetch"}
    told = tuned[0]["tuning"]
    assert (told.reason, told.measuring, round(dict(told.milliseconds)["direct"])) == ("measured", False, 800)
    assert "in use  direct with prefetch        600.0 ms" in tuned[0]["text"]
    assert tuned[1]["text"].startswith("direct with prefetch, as rank 0 proposes")


def test_a_node_of_one_rank_has_no_exchange_to_choose_but_the_pipeline(ranks: Ranks) -> None:
    results = ranks(2).run(trained, RankLayout(2, 1), {}, SECONDS | {"chain": 0.5})
    assert [set(result["used"]) for result in results] == [{"chain", "chain with prefetch"}] * 2
    assert results[0]["used"][-100:] == results[1]["used"][-100:] == ["chain"] * 100


def test_two_collections_of_a_process_measure_in_turns() -> None:
    now = [0.0]
    tuners = [StepTuner(AgreedArm("chain"), ("chain", "direct"), clock=lambda: now[0]) for _ in range(2)]
    measured = [0, 0]
    for _ in range(600):
        now[0] += 1.0
        for tuner in tuners:
            tuner.updated(SGD(), 0)
            tuner._choice.agreed(tuner._choice.proposed)
            tuner._choice.exchange = tuner._choice.next.exchange
        measuring = [tuner.tuning().measuring for tuner in tuners]
        assert not all(measuring)
        measured = [before + each for before, each in zip(measured, measuring, strict=True)]
    assert min(measured) > 100


def test_of_the_wires_that_a_user_allows_the_fastest_is_used(ranks: Ranks) -> None:
    wires = {f"chain{way} in {wire}": seconds for way in ("", " with prefetch") for wire, seconds in WIRES.items()}
    results = ranks(4).run(trained, RankLayout(2, 2), {"exchange": "chain", "comm_dtype": tuple(WIRES)}, wires)
    assert results[0]["used"] == results[3]["used"]
    assert set(results[0]["used"]) == set(wires)
    assert len({len(line) for line in results[0]["text"].splitlines()[1:]}) == 1, "one column of times"
    assert {arm.rpartition(" in ")[2] for arm in results[0]["used"][-50:]} == {"bfloat16"}
    plain = ranks(4).run(trained, RankLayout(2, 2), {"exchange": "chain"}, SECONDS)
    # Rounded rows change what is learned by what the narrow wire rounds, and by no more.
    assert 0 < (results[0]["table"] - plain[0]["table"]).abs().max() < 0.02


def test_a_loop_without_prefetch_is_told_once_what_it_could_hide(caplog: pytest.LogCaptureFixture) -> None:
    times = {"now": 0.0, "waited": 0.0, "outside": 0.0}

    def steps(number: int, waited: float, *, prefetch: tuple[bool, ...] = (False,)) -> list[str]:
        caplog.clear()
        tuner = StepTuner(
            AgreedArm("chain"), ("chain", "direct"),
            waited_and_outside=lambda: (times["waited"], times["outside"]), clock=lambda: times["now"],
        )  # fmt: skip
        tuner.prefetch = prefetch
        for step in range(number):
            for name, seconds in (("now", 0.5), ("waited", waited), ("outside", 0.14)):
                times[name] += seconds
            tuner.updated(SGD(lr=0.1), step)
        return [record.getMessage() for record in caplog.records if "flexd.prefetch" in record.getMessage()]

    (message,) = steps(1_000, 0.2)
    assert "up to 140 ms of 500 ms per step" in message
    assert "up to 100 ms of" in steps(1_000, 0.1)[0], "no more than what waits"
    assert steps(1_000, 0.02) == [], "too little to be worth a line"
    assert steps(1_000, 0.2, prefetch=(False, True)) == []
