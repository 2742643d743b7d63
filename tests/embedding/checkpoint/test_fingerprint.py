"""Fingerprints of tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexd.embedding.checkpoint.given_rows import fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_fingerprints_of_different_tables_differ(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    rows, state = torch.from_numpy(rng.normal(size=(9000, 3))).to(dtype), torch.from_numpy(rng.random((9000, 1)))
    unchanged = rows.clone()
    whole = int(fingerprint(0, [rows, state]))
    assert torch.equal(rows, unchanged)
    parts = [
        int(fingerprint(first, [rows[first:end], state[first:end]])) for first, end in ((0, 11), (11, 11), (11, 9000))
    ]
    assert (sum(parts) - whole) % 2**64 == 0
    others = []
    for change in ("swap rows", "swap columns", "negate", "state", "last bit"):
        r, s = rows.clone(), state.clone()
        if change == "swap rows":
            r[[5, 6]], s[[5, 6]] = r[[6, 5]], s[[6, 5]]
        elif change == "swap columns":
            r[7, [0, 1]] = r[7, [1, 0]]
        elif change == "negate":
            r[8999, 2] *= -1
        elif change == "state":
            s[8, 0] += 1
        else:
            r.view(torch.uint8)[0, 0] ^= 1
        others.append(int(fingerprint(0, [r, s])))
    assert len({whole, *others}) == 6
    assert int(fingerprint(1, [rows, state])) != whole
    assert int(fingerprint(0, [rows, state[:, :0]])) != whole
