"""The agreement that travels with the sizes."""

from hypothesis import given
from hypothesis import strategies as st

from flexd.embedding.exchange.hop import Agreement, CallSignature


@given(
    version=st.integers(-(2**20), 2**32 - 8), fault=st.integers(-1, 2**20), passes=st.integers(0, 64),
    ranks_of=st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=4), steps=st.integers(0, 2**40),
    arm=st.integers(0, 2**19 - 1),
)  # fmt: skip
def test_packed_agreements_combine_to_minimum_and_maximum(
    version: int, fault: int, passes: int, ranks_of: list[int], steps: int, arm: int
) -> None:
    calls = [CallSignature.of(rank, steps=steps, passes=passes, flag=rank % 2 == 0) for rank in ranks_of]
    settings = [(2**22 - 1 - n, 2**22 - 1 - n) for n in range(len(calls))]
    packed = [
        Agreement(version + n, fault - n, call, call, of_rank, max(0, arm - n)).pack()
        for n, (call, of_rank) in enumerate(zip(calls, settings, strict=True))
    ]
    assert all(-(2**63) <= word < 2**63 for words in packed for word in words)
    both = Agreement.combined(packed)
    assert (both.version, both.fault) == (version, fault)
    assert (both.first, both.last) == (min(calls), max(calls))
    assert both.settings == (2**22 - len(calls), 2**22 - 1)
    assert (both.arm, both.settings_differ) == (arm, len(calls) > 1)
    assert both.diverged == (len({rank % 2 for rank in ranks_of}) > 1)
