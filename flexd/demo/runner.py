"""Run the demo: daemon, stream, training ranks and reference as real processes, then the summary."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flexd.core.errors import ConfigError, FlexdError
from flexd.core.keyspace import DTYPE_BYTES
from flexd.demo.link import link_cluster
from flexd.demo.options import LEAST_BATCH_SIZE, DemoOptions
from flexd.demo.ports import free_ports
from flexd.demo.processes import DaemonProcess, Ranks, run_reference
from flexd.demo.rank import PEERS, RunSetup
from flexd.demo.screen import describe, live_progress
from flexd.demo.summary import RunRecord, summarise, tolerance
from flexd.stream.batches import Batches
from flexd.stream.trace import Trace, built_in_trace, load_trace
from flexd.topology.files import PRODUCTION_RANK_BYTES, load_preset, scale_model, write_cluster

HISTORY = 32
DIM = 16
PRESET = "azure-a100-200g"
PLAN_SECONDS = 2.0
STEP_SECONDS_LIMIT = 5.0


def _write_trace(trace: Trace, path: Path) -> None:
    arrays: dict[str, Any] = {
        "table": trace.table, "row": trace.row, "ts": trace.seconds,
        "table_rows": trace.table_rows, "table_names": np.array(trace.table_names),
    }  # fmt: skip
    if trace.user is not None:
        arrays["user"] = trace.user
    np.savez(path, **arrays)


class Demo:
    """One run in one directory."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self.trace_file = options.trace or directory / "synthetic.npz"
        if options.trace is None:
            _write_trace(built_in_trace(options.seed), self.trace_file)
        batches = Batches(
            load_trace(self.trace_file),
            world_size=options.world_size,
            batch_size=options.batch_size,
            steps=options.steps,
            history=HISTORY,
            kind=options.samples,
            lengths=options.lengths,
            micro_batches=options.micro_batches,
        )
        if batches.batch_size < LEAST_BATCH_SIZE:
            raise ConfigError(
                f"{self.trace_file.name} has samples for {options.steps} steps of {batches.batch_size} a rank",
                remedy="fewer steps or ranks, or --samples impressions",
            )
        store_port, control_port, http_port = free_ports(3)
        self.setup = RunSetup(
            trace=str(self.trace_file.resolve()),
            job="flexd-demo",
            nodes=options.nodes,
            local_ranks=options.local_ranks,
            steps=options.steps,
            batch_size=batches.batch_size,
            history=HISTORY,
            samples=options.samples.value,
            lengths=options.lengths.value,
            dim=DIM,
            dtype=options.dtype,
            learning_rate=0.05,
            dense_learning_rate=0.05,
            replica_budget=options.replica_budget,
            seed=options.seed,
            store_port=store_port,
            control=f"127.0.0.1:{control_port}",
            directory=str(directory),
            file_log=str(directory / "stream"),
            kafka=options.kafka,
            tap=options.tap,
            topic=f"flexd-demo-{os.getpid()}-{int(time.time())}",
            check_every=5,
            micro_batches=options.micro_batches,
            link_mbit=options.link_mbit if options.has_link else 0.0,
        )
        self.setup_file = directory / "setup.json"
        self.setup.save(self.setup_file)
        self.state = directory / "state"
        config_file = self._write_config(batches, control_port, http_port)
        self.daemon = DaemonProcess(config_file, f"http://127.0.0.1:{http_port}", directory)

    def _write_config(self, batches: Batches, control_port: int, http_port: int) -> Path:
        setup, trace = self.setup, batches.trace
        topology = self._directory / "topology.yaml"
        look_up_bytes = setup.batch_size * (HISTORY + 1) * DIM * DTYPE_BYTES[setup.dtype]
        cluster = scale_model(load_preset(PRESET), max(1.0, PRODUCTION_RANK_BYTES / look_up_bytes))
        if setup.link_mbit:
            cluster = link_cluster(setup.link_mbit, setup.local_ranks)
        write_cluster(cluster, topology)
        source: dict[str, Any] = {"kind": "file_log", "path": setup.file_log}
        if setup.kafka:
            source = {
                "kind": "kafka", "bootstrap_servers": setup.kafka, "topic": setup.topic,
                "group_id": setup.topic, "session_timeout_seconds": 6.0,
            }  # fmt: skip
        elif setup.tap:
            source = {"kind": "tap"}
        config = {
            "job": setup.job,
            "tables": [
                {
                    "name": name, "rows": int(rows), "dim": DIM, "dtype": setup.dtype, "optimizer": "rowwise_adagrad",
                }
                for name, rows in zip(trace.table_names, trace.table_rows, strict=True)
            ],
            "stream": {"source": source},
            # A run passes through the whole trace, so its event time jumps from batch to batch.
            "sketch": {
                "memory_bytes": 64 * 2**20, "half_life_seconds": max(1.0, batches.span_seconds / 6),
                "max_future_seconds": max(1.0, batches.span_seconds),
            },
            "topology": {"file": str(topology)},
            "planner": {
                "interval_seconds": PLAN_SECONDS, "min_spacing_seconds": 0.5, "horizon_steps": setup.steps,
                # The prices leave latencies out or scale them down, so that there are plans to see.
                "min_saving": {"seconds": 0.0, "share": 0.0},
                # The first plan waits for a tenth of the run, so that there is a `before` to compare with.
                "min_samples": setup.steps * setup.micro_batches * setup.batch_size * setup.world_size * HISTORY // 10,
            },
            "control": {"listen_port": control_port, "timeout_seconds": 15.0},
            "server": {"port": http_port},
            "state": {"dir": str(self.state), "snapshot_interval_seconds": 1.0},
        }  # fmt: skip
        path = self._directory / "flexd.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def run(self) -> RunRecord:
        setup = self.setup
        if setup.kafka:
            from flexd.stream.kafka.topic_admin import ensure_topic

            ensure_topic(setup.kafka, setup.topic, partitions=setup.world_size, timeout_seconds=20.0)
        peers = PEERS if setup.link_mbit else ()
        deadline = time.monotonic() + 120 + setup.steps * STEP_SECONDS_LIMIT * (1 + len(peers))
        with live_progress() as progress:
            task = progress.add_task("the daemon starts", total=setup.steps)
            self.daemon.start()

            def show(ranks: Ranks) -> None:
                newest = [records[-1] for records in ranks.records if records]
                status = self.daemon.status() if self.daemon.alive else None
                progress.update(task, completed=ranks.step(), description=describe(newest, status))

            try:
                self._train(setup, self.setup_file, deadline, show)
            finally:
                self.daemon.stop()
            for strategy in peers:
                text = f"training the same steps without a daemon: {strategy.value.replace('_', '-')}"
                progress.update(task, description=text)
                directory = self._directory / strategy.value
                directory.mkdir(exist_ok=True)
                (port,) = free_ports(1)
                peer = replace(setup, strategy=strategy.value, directory=str(directory), store_port=port)
                peer.save(directory / "setup.json")
                self._train(peer, directory / "setup.json", deadline)
            progress.update(task, description="training the same data in one plain process")
            run_reference(self.setup_file, self._directory, deadline - time.monotonic())
        return RunRecord.load(setup, self._directory, self.state)

    def _train(
        self, setup: RunSetup, file: Path, deadline: float, show: Callable[[Ranks], None] = lambda ranks: None
    ) -> None:
        """Train with ranks of the setup in ``file``; ``show`` is called again and again meanwhile."""
        ranks = Ranks(file, setup.world_size, Path(setup.directory))
        try:
            while ranks.running():
                if time.monotonic() > deadline:
                    raise FlexdError(
                        f"the ranks of {setup.strategy} did not end in time", remedy=f"see {setup.directory}"
                    )
                show(ranks)
                time.sleep(0.1)
            ranks.join()
        finally:
            ranks.stop()


def run_demo(options: DemoOptions) -> tuple[dict[str, Any], list[str]]:
    """Return the summary of a run, and the invariants that it broke in words."""
    directory = options.out_dir or Path(tempfile.mkdtemp(prefix="flexd-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        record = Demo(options, directory).run()
    except BaseException:
        print(f"the run's files are in {directory}", file=sys.stderr)
        raise
    summary = summarise(record)
    broken = _broken_invariants(record, summary)
    if options.out_dir is None and not broken:
        shutil.rmtree(directory, ignore_errors=True)
    return summary, broken


def _broken_invariants(record: RunRecord, summary: dict[str, Any]) -> list[str]:
    broken = []
    if not summary["replicas_bit_equal"]:
        broken.append("a replica differed from its home copy")
    if not summary["placement_versions_equal"]:
        broken.append("ranks were at different placement versions in the same step")
    # Written so that NaN, which a run that diverged gives, is a difference.
    if not summary["max_abs_difference_to_single_process"] <= tolerance(record.setup):
        broken.append("the tables differ from single-process training by more than rounding")
    return broken
