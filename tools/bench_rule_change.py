"""A table's traffic grows tenfold in training: the daemon plans home rules again, and tables move while it goes on.

    python tools/bench_rule_change.py --quick [--json]

Four gloo ranks (2 nodes x 2) train pooled tables that answer by sums, connected to the parts of a daemon in this
process: the rules are planned from counted accesses (``flexd/operations/rule_changes.py``) and changed by a migration
over the control channel. Then the same training runs without a daemon, for its losses, and once more with the rules of
a plan from scratch. Loads, of the busiest rank, are seconds of the cost model, and bytes that real ranks send to the
other node.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_rule_change_rank as ranks
import numpy as np
import torch.multiprocessing as mp
from bench_report import check, ending
from bench_rule_change_rank import Job

from flexd.config.load import parse_config
from flexd.control.daemon.coordinator import ControlOptions, Coordinator
from flexd.control.daemon.journal import PlacementJournal
from flexd.core.errors import FlexdError
from flexd.core.keyspace import KeySpace
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.demo.ports import free_ports
from flexd.operations.executions import Executions
from flexd.operations.plan_log import PlanLog
from flexd.operations.rule_changes import RuleChanger
from flexd.operations.triggers import Trigger, TriggerKind
from flexd.planner.tables.live_rules import RuleChanges
from flexd.sketch.sketch_set import SketchSet
from flexd.topology.files import load_preset

MOST_OF_SCRATCH = 1.05
PRESET = "azure-a100-200g"
SEEN_STEPS = 10


class Daemon:
    """Sketches, rules and the control channel of a job."""

    def __init__(self, job: Job, directory: Path) -> None:
        self._job = job
        document = {
            "job": "bench",
            "tables": [
                {"name": f"t{at}", "rows": rows, "dim": ranks.DIM, "dtype": "float64", "optimizer": "sgd", "homes": of}
                for at, (rows, of) in enumerate(zip(job.rows, job.rules, strict=True))
            ],
            "stream": {"source": {"kind": "tap"}},
            "control": {"chunk_bytes": ranks.CAP_BYTES},
            "planner": {
                "change_home_rules": True, "horizon_steps": 10_000_000, "min_saving": {"seconds": 0.0, "share": 0.0},
                "pooled_tables": {f"t{at}": "sums" for at in range(len(job.rows))},
            },
        }  # fmt: skip
        self.config = parse_config(document)
        self.keyspace: KeySpace = self.config.keyspace()
        self.cluster = load_preset(PRESET).of_layout(job.layout.nodes, job.layout.local_ranks).bandwidth_only()
        self.steps = 0
        self._journal = PlacementJournal(directory)
        self.coordinator = Coordinator(
            ControlOptions("bench", listen_port=0, timeout_seconds=10.0), self.keyspace, self._journal,
            on_report=self._count,
        )  # fmt: skip
        executions = Executions(self.config.control, self.keyspace, self.coordinator, PlanLog(directory / "plans"))
        self._sketches: SketchSet | None = None
        self.rules = RuleChanger(self.keyspace, executions, self._lengths)

    def __enter__(self) -> Daemon:
        self.coordinator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.stop(15)
        self._journal.close()

    def _count(self, rank: int, report: Any) -> None:
        self.steps = max(self.steps, report.step)

    def _lengths(self, table: str, places: Any) -> np.ndarray:
        assert self._sketches is not None
        return self._sketches.sequence_length_quantiles(table, places)

    def see(self, first_step: int) -> Any:
        """Return the profile of some steps' accesses of all ranks."""
        job, world = self._job, self._job.layout.world_size
        self._sketches = SketchSet(self.keyspace.tables, half_life_seconds=None)
        total = 0
        for step in range(first_step, first_step + SEEN_STEPS):
            for rank in range(world):
                for table in range(len(job.rows)):
                    ids = ranks.ids_of(job, step, rank, table)
                    total += len(ids)
                    lengths = np.full(job.bags, len(ids) // job.bags)
                    self._sketches.ingest(f"t{table}", ids, 0, float(step), lengths)
        return self._sketches.profile(total / SEEN_STEPS, 1)

    def plan(self, first_step: int, live: Placement, spare: int) -> RuleChanges:
        """Return the rules for the traffic of some steps, from a placement."""
        profile = self.see(first_step)
        topology = _topology(self._job.layout, spare)
        return self.rules.plan(profile, topology, self.cluster, live, self.config.planner).changes


def _topology(layout: RankLayout, spare: int) -> Any:
    from flexd.control.daemon.coordinator_types import LiveTopology

    return LiveTopology(1, "one", layout, (0,), True, "", spare_home_slots=(spare,))


def train(job: Job, during: Callable[[Any], None] = lambda changed: None) -> list[Any]:
    """Run ranks to their end, with work of this process meanwhile; return the answers of all, by rank."""
    context = mp.get_context("spawn")
    answers, changed = context.SimpleQueue(), context.Value("i", 0)
    arguments = (free_ports(1)[0], job, changed, answers)
    running = mp.spawn(ranks.run, arguments, nprocs=job.layout.world_size, join=False)
    try:
        during(changed)
        found = sorted(answers.get() for _ in range(job.layout.world_size))
        while not running.join():
            pass
    finally:
        for process in running.processes:
            process.kill()
    return found


def until(ready: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise FlexdError(f"{what} took more than {seconds:.0f} s")
        time.sleep(0.05)


def measure(job: Job) -> dict[str, Any]:
    spread = replace(job, rules=("all",) * len(job.rows))
    with tempfile.TemporaryDirectory() as directory:
        roomy = 10 * sum(job.rows)
        first = Daemon(spread, Path(directory, "first"))
        begun = first.plan(0, Placement.empty(), roomy)
        scratch = first.plan(job.grows_at, Placement.empty(), roomy)
        job = replace(job, rules=_rules(begun, job))
        with Daemon(job, Path(directory, "live")) as daemon:
            model: list[RuleChanges] = []

            def change(changed: Any) -> None:
                live = daemon.coordinator.live
                until(
                    lambda: daemon.steps >= job.grows_at and (now := live()) is not None and now.ready, 120, "training"
                )
                topology, placement = live(), daemon.coordinator.placement()
                assert topology is not None
                profile = daemon.see(job.grows_at)
                started = daemon.rules.start(
                    profile, topology, daemon.cluster, placement, daemon.config.planner,
                    Trigger(TriggerKind.DRIFT, "a table's traffic has grown"), None,
                )  # fmt: skip
                if started is None or daemon.rules.planned is None:
                    raise FlexdError(f"no rules changed: {daemon.rules.outcome}")
                model.append(daemon.rules.planned.changes)
                until(lambda: started.migration.done, 120, "moving tables")
                print(f"{started.migration.state.value} {started.migration.reason}: {daemon.rules.outcome}")
                changed.value = 1

            port = daemon.coordinator.port
            with_daemon = train(replace(job, address=f"127.0.0.1:{port}"), change)
    steps = len(with_daemon[0][1])
    alone = train(replace(job, steps=steps))
    planned = train(replace(job, rules=_rules(scratch, job), steps=steps))
    after = with_daemon[0][4]
    loads = np.array([of_rank[2] for of_rank in with_daemon], dtype=float)
    from_scratch = np.array([of_rank[2] for of_rank in planned], dtype=float)[:, after:].mean(axis=1).max()
    still = np.array([of_rank[2] for of_rank in alone], dtype=float)
    differs = max(np.abs(np.array(a[1]) - np.array(b[1])).max() for a, b in zip(with_daemon, alone, strict=True))
    return {
        "steps": steps,
        "model": {
            "busiest_before_us": 1e6 * model[0].live_seconds, "busiest_after_us": 1e6 * model[0].seconds,
            "busiest_from_scratch_us": 1e6 * scratch.seconds,
        },
        "sent_to_the_other_node": {
            "busiest_before_growth_kb": loads[:, : job.grows_at].mean(axis=1).max() / 1e3,
            "busiest_without_change_kb": still[:, after:].mean(axis=1).max() / 1e3,
            "busiest_after_change_kb": loads[:, after:].mean(axis=1).max() / 1e3,
            "busiest_from_scratch_kb": from_scratch / 1e3,
        },
        "moved_kb": sum(sum(of_rank[3]) for of_rank in with_daemon) / 1e3,
        "most_moved_in_a_step_kb": max(np.array([of_rank[3] for of_rank in with_daemon]).sum(axis=0)) / 1e3,
        "cap_kb": ranks.CAP_BYTES / 1e3,
        "largest_difference_of_losses": float(differs),
    }  # fmt: skip


def _rules(changes: RuleChanges, job: Job) -> tuple[str, ...]:
    return tuple(str(changes.rules.get(at, "all")) for at in range(len(job.rows)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 small tables instead of 24")
    parser.add_argument("--json", action="store_true", help="print all figures in a last line")
    options = parser.parse_args()
    rng = np.random.default_rng(5)
    count = 8 if options.quick else 24
    rows = tuple(rng.integers(200, 1_000 if options.quick else 5_000, count).tolist())
    lengths = tuple(rng.integers(4, 24, count).tolist())
    grown = int(np.argsort(lengths)[count // 2])
    job = Job(RankLayout(2, 2), rows, lengths, ("all",) * count, grown, 20, 16, 20, spare=2 * sum(rows))
    figures = measure(job)
    model, sent = figures["model"], figures["sent_to_the_other_node"]
    for name, value in {**model, **sent}.items():
        print(f"{name.replace('_', ' '):>32} {value:10.2f}")
    print(
        f"losses differ by {figures['largest_difference_of_losses']:.1e} at most; {figures['moved_kb']:.0f} kB moved, "
        f"at most {figures['most_moved_in_a_step_kb']:.1f} kB in a step"
    )
    of_scratch = model["busiest_after_us"] / model["busiest_from_scratch_us"]
    bytes_of_scratch = sent["busiest_after_change_kb"] / sent["busiest_from_scratch_kb"]
    checks = [
        check("busiest rank of a plan from scratch, by the model", of_scratch, f"<= {MOST_OF_SCRATCH}",
              of_scratch <= MOST_OF_SCRATCH),
        check("busiest rank of a plan from scratch, in bytes sent", bytes_of_scratch, f"<= {MOST_OF_SCRATCH}",
              bytes_of_scratch <= MOST_OF_SCRATCH),
        check("largest difference of losses", figures["largest_difference_of_losses"], "<= 1e-9",
              figures["largest_difference_of_losses"] <= 1e-9),
        check("most moved in a step, of the cap", figures["most_moved_in_a_step_kb"] / figures["cap_kb"], "<= 1",
              figures["most_moved_in_a_step_kb"] <= figures["cap_kb"]),
    ]  # fmt: skip
    return ending(figures, checks, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
