"""Uses that torch allows train as in torch, or are refused or warned of by name: nothing is silent."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexd
from flexd.core.errors import EmbeddingError
from flexd.core.placement import RankLayout
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.exchange.arms import wires_of
from flexd.embedding.features import Jagged
from flexd.embedding.pending_passes import MAX_PENDING_PASSES
from tests.support.rank_pool import Ranks

IDS = torch.tensor([3, 7, 7, 11])


def batch(shift: int = 0) -> dict[str, Jagged]:
    return {"item": Jagged((IDS + shift) % 20, torch.tensor([4]))}


def collection_of(optimizer: Any = None, **given: Any) -> EmbeddingCollection:
    table = flexd.EmbeddingTable("item", 20, 4, dtype="float64")
    return EmbeddingCollection([table], optimizer=optimizer or flexd.SGD(lr=0.1), layout=RankLayout(2, 1), **given)


def train(collection: EmbeddingCollection, batches: Iterable[dict[str, Jagged]]) -> torch.Tensor:
    for features in batches:
        collection(features)["item"].values.square().sum().backward()
        collection.optimizer.step()
    return collection.gather_table("item")


@pytest.mark.parametrize("given", [(), "float8", ("float32", "int8"), (None, None), ["bfloat16"] * 2])
def test_what_is_no_choice_of_wires_is_refused(given: Any) -> None:
    with pytest.raises(EmbeddingError, match="one of float32, float16, bfloat16"):
        wires_of(given)


def late_backward(rank: int, between: str) -> str:
    collection = collection_of()
    values = collection(batch())["item"].values
    values[:2].sum().backward(retain_graph=True)
    if between == "step":
        collection.optimizer.step()
    elif between == "clip":
        collection.clip_grad_norm_(1e9)
    else:
        collection.optimizer.gradients()
    with pytest.raises(EmbeddingError) as caught:
        values[2:].sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("between", ["step", "clip", "sum"])
def test_a_backward_pass_that_comes_too_late_is_refused_and_not_lost(ranks: Ranks, between: str) -> None:
    for rank, text in enumerate(ranks(2).run(late_backward, between)):
        assert text.startswith(f"rank {rank}: a backward pass after the gradients of its look-up were summed")
        assert "look the rows up again" in text


def evaluate_first(rank: int, inference: bool, ahead: bool, one_thread: bool, given: dict[str, Any]) -> torch.Tensor:
    """Train after an evaluation under ``torch.inference_mode()``, or after none."""
    collection = collection_of(**given)

    def loop() -> Iterable[dict[str, Jagged]]:
        batches = [batch(shift) for shift in range(4)]
        return flexd.prefetch(batches, collection, one_thread=one_thread, ahead=1) if ahead else batches

    if inference:
        with torch.inference_mode():
            for features in loop():
                collection(features)
    return train(collection, loop())


@pytest.mark.parametrize(
    ("ahead", "one_thread", "given"),
    [
        (False, False, {}), (True, False, {}), (True, True, {}),
        (True, False, {"fast_memory_bytes": 1}), (False, False, {"copies_memory_bytes": 2000}),
    ],
)  # fmt: skip
def test_training_after_inference_mode_is_as_without(
    ranks: Ranks, ahead: bool, one_thread: bool, given: dict[str, Any]
) -> None:
    with_it, without = (ranks(2).run(evaluate_first, on, ahead, one_thread, given) for on in (True, False))
    torch.testing.assert_close(with_it[0], without[0], rtol=0, atol=0)


def skip_steps(rank: int, way: str, skipped: int) -> tuple[torch.Tensor, str]:
    collection, kept, text = collection_of(), [], ""
    try:
        for _ in range(skipped):
            values = collection(batch())["item"].values
            if way == "zero_grad":
                values.sum().backward()
                collection.optimizer.zero_grad()
            elif way == "kept on a rank" and rank == 1:
                kept.append(values)
    except EmbeddingError as error:
        text = str(error)
    return train(collection, [batch(1)]) if not text else collection.gather_table("item"), text


@pytest.mark.parametrize("way", ["zero_grad", "no backward"])
def test_steps_that_are_skipped_leave_no_trace(ranks: Ranks, way: str) -> None:
    skipped, plain = (ranks(2).run(skip_steps, way, count)[0] for count in (2 * MAX_PENDING_PASSES + 7, 0))
    assert skipped[1] == ""
    torch.testing.assert_close(skipped[0], plain[0], rtol=0, atol=0)


def test_passes_whose_output_one_rank_keeps_are_refused_on_all(ranks: Ranks) -> None:
    for _, text in ranks(2).run(skip_steps, "kept on a rank", MAX_PENDING_PASSES + 1):
        assert text.startswith(f"{MAX_PENDING_PASSES} forward passes without a step")


def idle(rank: int, optimizer: Any, recomputed: bool) -> list[str]:
    """Step after a look-up without a backward pass, or only in a checkpoint that recomputes; return what was logged."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("flexd").addHandler(handler)
    collection = collection_of(optimizer)
    for _ in range(2):
        if recomputed:
            checkpoint(lambda: collection(batch())["item"].values.tanh().sum(), use_reentrant=False).backward()
        else:
            collection(batch())
            collection(batch())["item"].values.sum().backward()
        collection.optimizer.step()
    logging.getLogger("flexd").removeHandler(handler)
    USAGE_WARNINGS._noted.pop(UsageWarningKind.NO_BACKWARD, None)  # the process is used again
    return [line for line in lines if "backward" in line]


@pytest.mark.parametrize(
    ("optimizer", "recomputed", "warned"),
    [
        (flexd.Adam(lr=0.1), False, 1),
        (flexd.Adam(lr=0.1), True, 0),
        (flexd.SGD(lr=0.1, weight_decay=0.1), False, 1),
        (flexd.SGD(lr=0.1), False, 0),
    ],
)
def test_rows_that_move_without_a_gradient_are_warned_of_once(
    ranks: Ranks, optimizer: Any, recomputed: bool, warned: int
) -> None:
    for rank, lines in enumerate(ranks(2).run(idle, optimizer, recomputed)):
        assert len(lines) == warned
        assert all(line.startswith(f"rank {rank}: 1 of 2 look-ups of a step had no backward pass") for line in lines)
