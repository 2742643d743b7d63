"""Requests to ranks: responses by rank; silence, failure and oversized responses end at the deadline."""

from __future__ import annotations

import sys

import pytest

from tests.support.repository import child_environment
from tools.bench.cluster import Cluster, ClusterError
from tools.bench.ranks import Ranks

PROGRAM = """
import os, time
from tools.bench.ranks import answer_questions
rank = int(os.environ["RANK"])

def handle(question):
    print("chatter on standard output")
    if question.get("raise") == rank:
        raise ValueError("bad batch")
    if question.get("exit") == rank:
        os._exit(7)
    if question.get("silent") == rank:
        time.sleep(600)
    if question.get("wait_unless") not in (None, rank):
        time.sleep(600)
    return [rank, "x" * question.get("size", 0)]

answer_questions(handle)
"""

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("can_emulate")]


@pytest.fixture
def ranks():
    with (
        Cluster(2, 1) as cluster,
        Ranks(cluster, [sys.executable, "-c", PROGRAM], environment=child_environment()) as ranks,
    ):
        yield ranks


def test_every_rank_answers_in_its_place(ranks: Ranks) -> None:
    for size in (0, 3, 300_000):
        assert ranks.ask({"size": size}, 20) == [[0, "x" * size], [1, "x" * size]]


def test_the_error_of_one_rank_does_not_wait_for_the_others(ranks: Ranks) -> None:
    with pytest.raises(ClusterError, match=r"(?s)rank 1: .*ValueError: bad batch"):
        ranks.ask({"raise": 1, "wait_unless": 1}, 60)


def test_a_rank_that_ends_is_named(ranks: Ranks) -> None:
    with pytest.raises(ClusterError, match="rank 0 ended with exit code 7"):
        ranks.ask({"exit": 0, "silent": 1}, 60)


def test_silence_ends_at_the_deadline(ranks: Ranks) -> None:
    assert ranks.ask({}, 20) == [[0, ""], [1, ""]]
    with pytest.raises(ClusterError, match=r"ranks \[1\] have not answered"):
        ranks.ask({"silent": 1}, 0.5)


def test_a_flood_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ClusterError, match="more than"):
        ranks.ask({"size": 20 * 2**20}, 60)
