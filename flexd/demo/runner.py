"""Run the demo: daemon, stream, training ranks and reference as real processes, then the summary."""

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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flexd.core.errors import ConfigError, FlexdError
from flexd.core.keyspace import DTYPE_BYTES
from flexd.demo.link import link_cluster
from flexd.demo.processes import DaemonProcess, Ranks, free_ports
from flexd.demo.setup import DIM, HISTORY, JOB, LEAST_BATCH_SIZE, DemoOptions, ExchangeStrategy, RunSetup
from flexd.demo.summary import DemoSummary, RunRecord, summarise
from flexd.stream.batches import Batches
from flexd.stream.trace import Trace, built_in_trace, load_trace
from flexd.topology.files import PRODUCTION_RANK_BYTES, load_preset, scale_model, write_cluster

PRESET = "azure-a100-200g"
PEERS = (ExchangeStrategy.ROW_WISE, ExchangeStrategy.CHAIN, ExchangeStrategy.DEFAULT)
"""Trained one after the other on the same batches where the link is emulated."""


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
        trace_file = options.trace or directory / "synthetic.npz"
        if options.trace is None:
            _write_trace(built_in_trace(options.seed), trace_file)
        batches = Batches(load_trace(trace_file), options.cluster.world_size, options.batches.options())
        if batches.batch_size < LEAST_BATCH_SIZE:
            raise ConfigError(
                f"{trace_file.name} has samples for {batches.steps} steps of {batches.batch_size} a rank",
                remedy="fewer steps or ranks, or --samples impressions",
            )
        store_port, control_port, http_port = free_ports(3)
        self.setup = RunSetup(
            replace(options, batches=replace(options.batches, batch_size=batches.batch_size, steps=batches.steps)),
            trace_file.resolve(),
            directory,
            directory / "stream",
            f"{JOB}-{os.getpid()}-{int(time.time())}",
            store_port,
            f"127.0.0.1:{control_port}",
        )
        self.setup.save()
        self.state = directory / "state"
        config_file = self._write_config(batches, control_port, http_port)
        self.daemon = DaemonProcess(config_file, f"http://127.0.0.1:{http_port}", directory)

    def _write_config(self, batches: Batches, control_port: int, http_port: int) -> Path:
        setup, options, trace = self.setup, self.setup.options, batches.trace
        topology = setup.directory / "topology.yaml"
        look_up_bytes = batches.batch_size * (HISTORY + 1) * 2 * DIM * DTYPE_BYTES[options.dtype]
        cluster = scale_model(load_preset(PRESET), max(1.0, PRODUCTION_RANK_BYTES / look_up_bytes))
        if options.cluster.has_link:
            cluster = link_cluster(options.cluster)
        write_cluster(cluster, topology)
        source: dict[str, Any] = {"kind": "file_log", "path": str(setup.stream)}
        if options.kafka:
            source = {
                "kind": "kafka", "bootstrap_servers": options.kafka, "topic": setup.topic,
                "group_id": setup.topic, "session_timeout_seconds": 6.0,
            }  # fmt: skip
        elif options.tap:
            source = {"kind": "tap"}
        config = {
            "job": JOB,
            "tables": [
                {
                    "name": f"{name}{suffix}", "rows": int(rows), "dim": dim, "dtype": dtype,
                    "optimizer": "rowwise_adagrad",
                }
                for suffix, dim, dtype in options.kinds
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
                "interval_seconds": 2.0, "min_spacing_seconds": 0.5, "horizon_steps": setup.steps,
                # A scale model's prices are far below the step of this machine.
                **({} if options.cluster.has_link else {"min_saving": {"seconds": 0.0, "share": 0.0}}),
                # Its own strategies are compared; a run is too short to measure plans in blocks as well.
                "verify_budget_steps": 0,
                # The first plan waits for a tenth of the run, so that there is a `before` to compare with.
                "min_samples": 2 * setup.steps * batches.samples_per_step * HISTORY // 10,
            },
            "control": {"listen_port": control_port, "timeout_seconds": 15.0},
            "server": {"port": http_port},
            "state": {"dir": str(self.state), "snapshot_interval_seconds": 1.0},
        }  # fmt: skip
        path = setup.directory / "flexd.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def run(self) -> RunRecord:
        setup, options = self.setup, self.setup.options
        if options.kafka:
            from flexd.stream.kafka.topic_admin import ensure_topic

            ensure_topic(
                options.kafka, setup.topic, partitions=options.cluster.world_size, timeout_seconds=20.0
            )  # fmt: skip
        peers = PEERS if options.cluster.has_link else ()
        deadline = time.monotonic() + 120 + setup.steps * 5.0 * (1 + len(peers))
        console = Console(stderr=True)
        with Progress(
            BarColumn(bar_width=8), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
            console=console, transient=True, disable=not console.is_terminal,
        ) as progress:  # fmt: skip
            task = progress.add_task("the daemon starts", total=setup.steps)
            self.daemon.start()

            def show(ranks: Ranks) -> None:
                newest = ranks.newest()
                status = self.daemon.status() if self.daemon.alive else None
                step = min((record["step"] for record in newest), default=0)
                progress.update(task, completed=step, description=_describe(newest, status))

            try:
                _train(setup, deadline, show)
            finally:
                self.daemon.stop()
            for strategy in peers:
                text = f"training the same steps without a daemon: {strategy.value.replace('_', '-')}"
                progress.update(task, description=text)
                directory = setup.directory / strategy.value
                directory.mkdir(exist_ok=True)
                peer = replace(setup, strategy=strategy, directory=directory, store_port=free_ports(1)[0])
                peer.save()
                _train(peer, deadline)
            progress.update(task, description="training the same data in one plain process")
            from flexd.demo.training import (
                train_reference,
            )  # loads torch, which the daemon and the ranks have loaded by now

            return RunRecord.load(setup, train_reference(setup), self.state)


def _train(setup: RunSetup, deadline: float, show: Callable[[Ranks], None] = lambda ranks: None) -> None:
    """Train with the ranks of a setup; ``show`` is called again and again meanwhile."""
    ranks = Ranks(setup)
    try:
        while ranks.running():
            if time.monotonic() > deadline:
                raise FlexdError(f"the ranks of {setup.strategy} did not end in time", remedy=f"see {setup.directory}")
            show(ranks)
            time.sleep(0.1)
    finally:
        ranks.stop()


def _describe(newest: list[dict[str, Any]], status: dict[str, Any] | None) -> str:
    """Return the mean loss of the newest step, and what the daemon has done."""
    loss = f"loss {sum(record['loss'] for record in newest) / len(newest):.4f}, " if newest else ""
    if status is None:
        return f"{loss}the daemon does not respond (training continues)"
    stream, rows = status["stream"], status["placement"].get("rows") or {}
    replicated = sum(count for tier, count in rows.items() if tier != "HOME")
    return f"{loss}{stream['accesses']:,} accesses read, {replicated:,} rows replicated"


def run_demo(options: DemoOptions) -> tuple[DemoSummary, list[str]]:
    """Return the summary of a run, and the invariants that it broke in words."""
    directory = options.out or Path(tempfile.mkdtemp(prefix="flexd-demo-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        record = Demo(options, directory).run()
    except BaseException:
        print(f"the run's files are in {directory}", file=sys.stderr)
        raise
    summary = summarise(record)
    broken = _broken_invariants(record, summary)
    if options.out is None and not broken:
        shutil.rmtree(directory, ignore_errors=True)
    return summary, broken


def _broken_invariants(record: RunRecord, summary: DemoSummary) -> list[str]:
    difference = summary.max_abs_difference_to_single_process
    # Rounding of a run: a few hundred units in the last place of 1.
    tolerance = 1e-9 if record.setup.options.dtype == "float64" else 2e-4
    invariants = {
        "a replica differed from its home copy": summary.replicas_bit_equal,
        "ranks were at different placement versions in the same step": summary.placement_versions_equal,
        # None stands for NaN, which a run that diverged gives.
        "the tables differ from single-process training by more than rounding": difference is not None
        and difference <= tolerance,
    }
    return [text for text, holds in invariants.items() if not holds]
