"""A rank whose process ends by an error in the dense part tells the ranks that wait for it, without ``with``."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from flexd.embedding.exchange.process_end import ProcessEnd
from tests.support.repository import ROOT

SECONDS = 180.0
"""Less than half of the timeout of the process group."""


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("error", "rank 1: ValueError: batch 7 is broken"),
        ("error of a thread", "rank 1: ValueError: batch 7 is broken"),
        ("exit in a step", "rank 1: RuntimeError: the process ended during a step"),
        ("exit between steps", None),
    ],
)
def test_the_other_rank_is_told_why(tmp_path: Path, end: str, told: str | None) -> None:
    # As a launcher does, so that the store outlives the ranks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = tmp_path / "done"
    command = [sys.executable, "-m", "tests.support.ending_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), end, str(done)], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = ranks[0].communicate(timeout=SECONDS)[1]
        done.touch()
        own = ranks[1].communicate(timeout=SECONDS)[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert ranks[0].returncode == 1
    assert "CollectiveError: rank 0: all_to_all with ranks 1" in said
    if told is None:
        assert "the process ended" not in said, "what ends between steps may be the regular end of a trainer"
    else:
        assert f"with ranks 1: {told} - see the log of the rank named last" in said
    if end.startswith("error"):
        assert "ValueError: batch 7 is broken" in own, "the hook that was there before prints the error"


class Told:
    closed = False
    used_by: threading.Thread | None = None
    in_step = True

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def publish(self, error: BaseException) -> bool:
        self.errors.append(error)
        return True


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> ProcessEnd:
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    return ProcessEnd()


def test_collections_that_are_closed_or_gone_tell_nobody(end: ProcessEnd) -> None:
    closed, alive, gone = Told(), Told(), Told()
    for each in (closed, alive, gone):
        end.watch(each)
    closed.closed = True
    errors = gone.errors
    del each, gone
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    assert (closed.errors, alive.errors, errors) == ([], [error], [])
    end._at_exit()
    assert alive.errors == [error], "told once"
