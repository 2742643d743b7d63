"""Seconds of a step's collectives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.simulate.byte_counter import INTER, INTRA, CollectiveBytes, StepPart
from flexd.simulate.simulation import CollectivePricer
from flexd.topology.cluster import Collective, CollectiveCurve, Link, WorldModel
from flexd.topology.files import load_preset


def test_a_collective_takes_as_long_as_its_busiest_rank_on_its_slower_link() -> None:
    cluster = load_preset("azure-a100-200g")
    pricer = CollectivePricer(cluster)
    curve = {link: cluster.curve(link, Collective.ALL_TO_ALL) for link in Link}
    both = CollectiveBytes(
        StepPart.FORWARD, Collective.ALL_TO_ALL, INTER, np.array([[5, 7], [1, 2]]) * 10**6, np.array([6, 8]) * 10**6
    )
    slow = curve[Link.INTER_NODE]
    assert pricer.seconds([both])[StepPart.FORWARD] == pytest.approx(slow.latency_seconds + 8e6 / slow.bandwidth(8e6))
    near = CollectiveBytes(StepPart.IDS, Collective.ALL_TO_ALL, INTRA, np.zeros((2, 2), int), np.zeros(2, int))
    seconds = pricer.seconds([near, near, both])
    assert seconds[StepPart.IDS] == pytest.approx(2 * curve[Link.INTRA_NODE].latency_seconds)


def test_an_all_to_all_over_both_links_takes_the_time_of_the_one_over_all_ranks() -> None:
    world = CollectiveCurve(7e-5, ((1e6, 2e9),))
    cluster = replace(load_preset("azure-a100-200g"), world=WorldModel(2, 2, world))
    both = CollectiveBytes(
        StepPart.FORWARD, Collective.ALL_TO_ALL, INTER, np.array([[5, 7], [1, 2]]) * 10**6, np.array([6, 8]) * 10**6
    )
    assert CollectivePricer(cluster).seconds([both])[StepPart.FORWARD] == pytest.approx(world.seconds(8e6))
    sent, peak = both.sent * [0, 1], both.peak * [0, 1]
    rail = replace(both, sent=sent, peak=peak)
    expected = cluster.curve(Link.INTER_NODE, Collective.ALL_TO_ALL).seconds(8e6)
    assert CollectivePricer(cluster).seconds([rail])[StepPart.FORWARD] == pytest.approx(expected)
