"""``tools/bench_bags.py``: bytes of real ranks beside those that the simulator counts."""

from __future__ import annotations

import pytest
import torchrec_peer
from bench_bags import Setting, real_bytes, simulated_bytes, table
from bench_bags_rank import FLEXD, TORCHREC, bags_of

from flexd.core.layout import RankLayout

SETTINGS = [Setting(RankLayout(2, 2), 4, 300, 8, 800, 1.05, bag) for bag in (1, 20)]


@pytest.mark.long
def test_real_ranks_send_what_the_simulator_counts_and_torchrec_what_its_vectors_weigh() -> None:
    short, long = found = real_bytes(SETTINGS)
    for setting, sent in zip(SETTINGS, found, strict=True):
        assert simulated_bytes(setting) == {answer: sent[answer] for answer in FLEXD}
    assert short["rows"] < short["sums"]
    assert long["sums"] < long["rows"]
    figures = table("title", SETTINGS, found)
    assert [entry["better"] for entry in figures] == [
        min(short["rows"], short["node rows"]), min(long["sums"], long["node sums"])
    ]  # fmt: skip
    assert long["node sums"] < long["sums"]
    if torchrec_peer.missing() is None:
        assert set(long) == {*FLEXD, *TORCHREC}
        # Half of the 40 bags of a rank are of tables on the other node: a vector, and its gradient, of 8 floats each;
        # and 8 bytes an id and a length.
        vectors, ids = 20 * 2 * 32, 400 * 8
        assert vectors + ids <= long["table-wise"] <= vectors + ids + 20 * 8 + 200


def test_hot_rows_are_spread_over_the_table_and_every_rank_has_its_own_bags() -> None:
    bags = [bags_of(SETTINGS[1], rank)["t0"] for rank in (0, 1)]
    assert all(one.lengths.tolist() == [20] * 10 for one in bags)
    assert bags[0].values.tolist() != bags[1].values.tolist()
    assert 0 <= int(bags[0].values.min()) < 100 < 200 < int(bags[0].values.max()) < 300
