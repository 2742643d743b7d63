"""One rank of ``cases.verify``: trains with and without a daemon, as requests on standard input say.

Rank 0 also talks to the daemon's API, which only its node's loopback interface reaches.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flexd
from flexd.api.base import REQUEST_HEADER
from flexd.core.placement import Placement
from flexd.topology.files import write_cluster
from flexd.topology.probe import ProbeGroups, ProbeOptions, probe
from tools.bench import workloads as data
from tools.bench.programs.cluster import Attention, FlexdTrainer, Rank
from tools.bench.ranks import serve
from tools.bench.workloads import Setting

REQUEST_SECONDS = 5.0


class VerifyingRank(Rank):
    """Answers the requests of ``cases.verify``. Every one is collective."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._connection: Any = None
        self._api = ""

    def probe(self, file: str, max_bytes: int, budget_seconds: float) -> None:
        """Measure the links as ``flexd probe`` does, and write the topology file."""
        groups = ProbeGroups.create(self._setting.layout, torch.device("cpu"), timedelta(seconds=60))
        report = probe(groups, ProbeOptions(max_bytes=max_bytes, budget_seconds=budget_seconds))
        groups.close()
        if dist.get_rank() == 0:
            write_cluster(report.cluster(), Path(file))

    def begin(self, setting: dict[str, Any]) -> None:
        """Begin another job: other batches, no collections."""
        self.forget()
        self._setting = Setting(**setting)
        self._batches = data.batches_of(self._setting, dist.get_rank())
        self._dense = Attention(self._setting.dim)

    def join(
        self, address: str, api: str, secret_file: str, micro_batches: int, *, default: bool, prefetch: bool
    ) -> None:
        """Make the collection without a daemon and the one with."""
        self._api = api
        given: dict[str, Any] = {"micro_batches": micro_batches}
        if default:
            given |= {"exchange": "auto", "prefetch": [None] if prefetch else []}
        self._trainer["chain"] = FlexdTrainer(self._setting, self._batches, **given)
        # An empty placement: replica slots, and no copies until the daemon plans them.
        trainer = FlexdTrainer(self._setting, self._batches, target=Placement.empty(), **given)
        self._trainer["daemon"] = trainer
        tap = flexd.Tap(trainer.collection, interval_seconds=2.0)
        self._connection = flexd.connect(
            trainer.collection, address, job="verify", secret_file=secret_file, timeout_seconds=20.0, tap=tap
        )

    def leave(self) -> None:
        self._connection.close(10.0)
        for name in ("chain", "daemon"):
            trainer = self._trainer[name]
            assert isinstance(trainer, FlexdTrainer)
            trainer.collection.close()
        self.forget()

    def replicated(self) -> int:
        """Rows that have copies."""
        trainer = self._trainer["daemon"]
        assert isinstance(trainer, FlexdTrainer)
        return len(trainer.collection.engine.migrator.placement()[0])

    def status(self) -> dict[str, Any] | None:
        """Return the daemon's status from rank 0; None from the others and while it does not answer."""
        return self._request("/v1/status")

    def command(self, path: str) -> None:
        """Send a command to the daemon."""
        self._request(path, {"reason": "comparison", "requested_by": "bench_verify"})

    def wait_until_healthy(self, api: str, within: float) -> bool:
        """Wait at rank 0 until the daemon answers; the others return at once."""
        self._api = api
        deadline = time.monotonic() + within
        while dist.get_rank() == 0 and self._request("/v1/status") is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        if dist.get_rank() != 0:
            return None
        given = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._api + path, given, {"Content-Type": "application/json", REQUEST_HEADER: "bench"}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if body is not None:
                raise
            return None


if __name__ == "__main__":
    serve(lambda: VerifyingRank(Setting(**json.loads(sys.argv[1]))))
