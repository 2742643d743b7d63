"""Questions to the ranks of an emulated cluster: a JSON line goes to each, a JSON line comes back, by a deadline."""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from subprocess import PIPE, TimeoutExpired
from typing import Any

from cluster import Cluster, ClusterError

_MAX_ANSWER_BYTES = 16 * 2**20


class Ranks:
    """Rank programs that wait for questions (``answer_questions``). A context manager: they are gone afterwards.

    Args:
        environment: besides what ``Cluster.environment`` sets.
    """

    def __init__(
        self, cluster: Cluster, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._processes = cluster.start(command, environment=environment, stdin=PIPE, stdout=PIPE)
        self._unread = [b""] * len(self._processes)
        for process in self._processes:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # of a question that the rank did not read
                    pipe.close()

    def ask(self, question: Mapping[str, Any], seconds: float) -> list[Any]:
        """Answers by rank.

        Raises:
            ClusterError: a rank ended or raised, with its traceback; or some have not answered within ``seconds``. The
                ranks are of no use after that.
        """
        line = json.dumps(dict(question)).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError as error:
                raise self._ended(rank) from error
        return [answer["answer"] for answer in self._lines(time.monotonic() + seconds, seconds)]

    def _lines(self, deadline: float, seconds: float) -> list[dict[str, Any]]:
        lines: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(lines) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    silent = [rank for rank in range(len(self._processes)) if rank not in lines]
                    raise ClusterError(f"ranks {silent} have not answered in {seconds:g} s")
                for key, _ in ready:
                    rank = key.data
                    chunk = os.read(key.fd, 2**16)
                    if not chunk:
                        raise self._ended(rank)
                    self._unread[rank] += chunk
                    if len(self._unread[rank]) > _MAX_ANSWER_BYTES:
                        raise ClusterError(f"rank {rank}: an answer of more than {_MAX_ANSWER_BYTES} bytes")
                    line, newline, rest = self._unread[rank].partition(b"\n")
                    if newline:
                        lines[rank] = json.loads(line)
                        self._unread[rank] = rest
                        selector.unregister(key.fileobj)
                        # The others wait for a rank that failed: its error must not wait for them.
                        if "error" in lines[rank]:
                            raise ClusterError(f"rank {rank}: {lines[rank]['error']}")
        return [lines[rank] for rank in range(len(self._processes))]

    def _ended(self, rank: int) -> ClusterError:
        process = self._processes[rank]
        try:
            code: int | None = process.wait(5)
        except TimeoutExpired:
            code = None
        return ClusterError(f"rank {rank} ended with exit code {code}; its own output is above")


def answer_questions(handle: Callable[[dict[str, Any]], Any]) -> None:
    """The rank's side: until standard input ends. What the program prints goes to standard error meanwhile."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer = {"answer": handle(json.loads(line))}
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
