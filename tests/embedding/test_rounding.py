"""Stochastic rounding: exact where it can be, unbiased, and the same on every holder of a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.embedding.rounding import round_stochastically

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_every_number_of_the_dtype_stays(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rounded = round_stochastically(numbers.float()[:, None], dtype, torch.arange(2**16), 1)[:, 0]
    assert torch.equal(rounded.isnan(), numbers.isnan())
    known = ~numbers.isnan()
    assert torch.equal(rounded[known].float(), numbers[known].float())


@pytest.mark.parametrize("dtype", HALF)
@given(
    value=st.floats(2**-26, 60000.0, width=32) | st.floats(2**-26, 2**-13, width=32),
    negative=st.booleans(),
    step=st.integers(0, 2**40),
    first_key=st.integers(0, 2**62),
)
@settings(max_examples=40, deadline=None)
def test_rounding_is_unbiased(dtype: torch.dtype, value: float, negative: bool, step: int, first_key: int) -> None:
    """The mean of 2^15 draws is within 5 standard deviations, and all are one of the two neighbours."""
    value = -value if negative else value
    keys = torch.arange(2**12) + first_key
    rounded = round_stochastically(torch.full((len(keys), 8), value), dtype, keys, step).double().view(-1)
    below, above = rounded.min().item(), rounded.max().item()
    assert below <= value <= above or below == above, "one neighbour alone may be drawn if the other is improbable"
    assert len(torch.unique(rounded)) <= 2
    nearest = torch.tensor(value).to(dtype)
    ulp = max(
        abs(torch.nextafter(nearest, nearest.new_tensor(towards)).double().item() - nearest.double().item())
        for towards in (float("-inf"), float("inf"))
    )
    assert above - below <= ulp
    assert abs(rounded.mean().item() - value) <= 5 * 0.5 * ulp / len(rounded) ** 0.5
