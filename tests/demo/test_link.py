"""The emulated link: bytes take their time in both directions, and only those that leave the node."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flexd
from flexd.demo.link import EmulatedLink, limit_collectives
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.hop import AGREEMENT_NUMBERS
from tests.support.rank_pool import Ranks
from tests.support.until import Clock


class _Charged(EmulatedLink):
    """Notes what it carries instead of waiting."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.sent = self.received = 0.0

    @contextmanager
    def carry(self, sent_bytes: float, received_bytes: float) -> Iterator[None]:
        self.sent += sent_bytes
        self.received += received_bytes
        yield


STEPS = 3


def charged(rank: int, exchange: str) -> dict[str, Any]:
    """Train under a link."""
    collection = flexd.EmbeddingCollection(
        [flexd.EmbeddingTable("item", 100, 8)], layout=flexd.RankLayout(2, 2), exchange=exchange
    )
    link = _Charged()
    generator = torch.Generator().manual_seed(rank)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all", "all_reduce", "all_gather", "_measured"):
            patch.setattr(Peers, name, getattr(Peers, name))
        limit_collectives(link)
        for _ in range(STEPS):
            ids = torch.randint(100, (40,), generator=generator)
            collection({"item": flexd.Jagged(ids, torch.full((4,), 10))})["item"].values.square().sum().backward()
            collection.optimizer.step()
    totals = collection.traffic.totals()
    return {
        "sent_bytes": link.sent, "received_bytes": link.received,
        "inter_bytes": totals["all_to_all_inter_bytes"] + totals["sync_inter_bytes"],
    }  # fmt: skip


def times(link: EmulatedLink, clock: Clock, sent: float, received: float) -> tuple[float, float]:
    """When a collective begins and ends, after now."""
    start = clock.now
    with link.carry(sent, received):
        begun = clock.now - start
    return begun, clock.now - start


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> EmulatedLink:
    return EmulatedLink(1000.0, clock, clock.sleep)


def test_both_directions_run_at_the_same_time(link: EmulatedLink, clock: Clock) -> None:
    for sent, received, begun in ((200, 200, 0.2), (100, 300, 0.1), (300, 100, 0.3), (0, 0, 0.0)):
        assert times(link, clock, sent, received) == pytest.approx((begun, max(sent, received) / 1000))


def test_time_that_passes_inside_is_not_counted_again(link: EmulatedLink, clock: Clock) -> None:
    start = clock.now
    with link.carry(100, 300):
        clock.now += 0.25  # others were late
    assert clock.now - start == pytest.approx(0.35)
    clock.now += 5.0
    assert times(link, clock, 100, 100) == pytest.approx((0.1, 0.1)), "an idle link saves nothing up"


def test_collectives_of_two_threads_share_the_link(link: EmulatedLink, clock: Clock) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def beside() -> None:
        with link.carry(400, 400):
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=beside)
    thread.start()
    assert inside.wait(10)
    assert clock.now == pytest.approx(100.4)
    clock.now = 100.0
    assert times(link, clock, 0, 0) == pytest.approx((0.0, 0.0)), "a collective inside the node does not wait for them"
    assert times(link, clock, 100, 0) == pytest.approx((0.5, 0.5)), "after the bytes that left before"
    go_on.set()
    thread.join(10)


@pytest.mark.parametrize("exchange", ["chain", "direct"])
def test_what_a_rank_is_charged_is_what_it_counts_as_sent(ranks: Ranks, exchange: str) -> None:
    found: list[dict[str, Any]] = ranks(4).run(charged, exchange)
    for counted in found:
        # Not counted: in each step ranks compare their calls before they send gradients.
        compared = STEPS * (1 if exchange == "chain" else 2) * 8 * (1 + AGREEMENT_NUMBERS)
        assert counted["sent_bytes"] == pytest.approx(counted["inter_bytes"] + compared)
        assert counted["inter_bytes"] > 0
    assert sum(one["received_bytes"] for one in found) == pytest.approx(sum(one["sent_bytes"] for one in found))
