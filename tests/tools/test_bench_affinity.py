"""The benchmark of affinity cuts traces into samples that do not overlap."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tools.bench.cases.affinity import trace_samples


def test_pieces_of_users_do_not_overlap_and_are_in_order_of_their_last_event(tmp_path: Path) -> None:
    user = np.resize(np.array([1, 0, 2]), 320)
    np.savez(tmp_path / "shop.npz", row=np.arange(320), user=user, table_rows=np.array([320]))
    samples = trace_samples(tmp_path / "shop.npz")
    assert samples.lengths.tolist() == [32] * 9
    rows = np.split(samples.keys[samples.rows], samples.offsets[1:-1])
    assert all(len(np.unique(user[each])) == 1 for each in rows)
    assert len(np.unique(np.concatenate(rows))) == 9 * 32
    assert (np.diff([each.max() for each in rows]) > 0).all()
