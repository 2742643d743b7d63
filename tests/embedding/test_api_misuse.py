"""Any sequence of legal and illegal calls on one to four ranks ends in the result of one process, or in a named error
on every rank within its deadline.

``FLEXD_MISUSE_EXAMPLES`` sets the number of sequences.
"""

import os
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from flexd.core.placement import RankLayout
from tests.support.misuse_jobs import (
    FATAL,
    LEGAL,
    OF_ONE_RANK,
    REFUSED,
    Call,
    Reference,
    play,
    play_to_the_end,
)  # fmt: skip
from tests.support.rank_pool import RankPool, Ranks

EXAMPLES = int(os.environ.get("FLEXD_MISUSE_EXAMPLES", "8"))
TIMEOUT_SECONDS = 16.0
"""Of the process groups of ranks of which one makes other calls."""

layouts = st.sampled_from([RankLayout(1, 1), RankLayout(2, 1), RankLayout(1, 2), RankLayout(2, 2), RankLayout(3, 1)])
collections = st.sampled_from(
    [
        {}, {}, {"exchange": "direct"}, {"fast_memory_bytes": 1}, {"copies_memory_bytes": 2000}, {"comm_dtype": None},
        {"unbounded_ids": True}, {"unbounded_ids": True, "exchange": "direct"},
    ]
)  # fmt: skip
calls = st.builds(Call, kind=st.sampled_from([*LEGAL, *REFUSED]), seed=st.integers(0, 1000), odd=st.integers(0, 3))
sequences = st.lists(calls, min_size=3, max_size=10)
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def of(layout: RankLayout, drawn: list[Call]) -> list[Call]:
    """Return calls with a rank of this job each; without those that are wrong only if ranks differ."""
    size = layout.world_size
    return [replace(call, odd=call.odd % size) for call in drawn if size > 1 or call.kind not in OF_ONE_RANK]


def check_refusals(texts: list[list[str]], drawn: list[Call]) -> None:
    """Each rank has its error of each illegal call, and none of a legal one."""
    for number, call in enumerate(drawn):
        of_call = [of_rank[number] for of_rank in texts]
        if call.kind not in REFUSED:
            assert not any(of_call), (call, of_call)
            continue
        for rank, text in enumerate(of_call):
            own = call.kind == "bad loader" and rank == call.odd
            assert text.startswith("unnamed: OSError" if own else ("EmbeddingError", "TopologyError")), (call, text)
            assert REFUSED[call.kind] in text, (call, text)


@pytest.mark.timeout(120 + 10 * EXAMPLES)
@settings(SETTINGS, max_examples=EXAMPLES)
@given(layout=layouts, given=collections, drawn=sequences)
@example(
    layout=RankLayout(2, 1), given={},
    drawn=[Call(kind, seed, seed % 2) for seed, kind in enumerate(("accumulate", "clip", "accumulate", "apply"))],
)  # fmt: skip
@example(
    layout=RankLayout(2, 2),
    given={},
    drawn=[Call(kind, seed, seed % 4) for seed, kind in enumerate((*LEGAL, *REFUSED))],
)
@example(
    layout=RankLayout(1, 2),
    given={"unbounded_ids": True},
    drawn=[Call(kind, seed, seed % 2) for seed, kind in enumerate((*LEGAL, *REFUSED))],
)
def test_any_sequence_of_calls_is_refused_by_name_or_trains_as_one_process(
    ranks: Ranks, layout: RankLayout, given: dict[str, Any], drawn: list[Call]
) -> None:
    drawn = of(layout, drawn)
    results = ranks(layout.world_size).run(play, layout, given, drawn)
    check_refusals([texts for _, texts, _ in results], drawn)
    reference = Reference(results[0][0], layout.world_size)
    for call in drawn:
        reference.play(call)
    for _, _, table in results:
        torch.testing.assert_close(table, reference.weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(120 + 40 * EXAMPLES)
@settings(SETTINGS, max_examples=max(2, EXAMPLES // 4), phases=[Phase.explicit, Phase.generate])
@given(
    layout=st.sampled_from([RankLayout(2, 1), RankLayout(1, 2), RankLayout(2, 2)]),
    given=collections,
    drawn=st.lists(calls, max_size=3),
    fatal=st.builds(Call, st.sampled_from(FATAL), st.integers(0, 99), st.integers(0, 3)),
)
@example(layout=RankLayout(1, 2), given={"unbounded_ids": True}, drawn=[], fatal=Call("skips a step", 3, 1))
def test_a_call_of_one_rank_that_ends_training_is_named_on_every_rank(
    layout: RankLayout, given: dict[str, Any], drawn: list[Call], fatal: Call
) -> None:
    drawn, (fatal,) = of(layout, drawn), of(layout, [fatal])
    with closing(RankPool(layout.world_size)) as pool:
        results = pool.run(play_to_the_end, layout, given, drawn, fatal, TIMEOUT_SECONDS, timeout=90)
    for rank, found in enumerate(results):
        if found is None:
            raise AssertionError(f"rank {rank} ended in C++")
        texts, own, after = found
        assert all(bool(text) == (call.kind in REFUSED) for text, call in zip(texts, drawn, strict=True))
        if rank == fatal.odd and fatal.kind in ("raises", "leaves"):
            continue  # it has its own error, or has left
        assert (own or after).startswith(("EmbeddingError: ", "CollectiveError: ")), (rank, own, after)
        assert "gloo" not in own + after, (rank, own, after)
