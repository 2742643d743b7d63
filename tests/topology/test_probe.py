"""The probe on real gloo ranks: measurements, files, deadlines and errors."""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexd.cli.main import main
from flexd.core.errors import TopologyError
from flexd.core.placement import RankLayout
from flexd.demo.processes import free_ports
from flexd.topology import probe as probe_module
from flexd.topology.cluster import Cluster, Collective, Link
from flexd.topology.files import dump_cluster, load_cluster, parse_cluster
from flexd.topology.probe import ProbeGroups, ProbeOptions, make_collective, probe
from tests.support import forked
from tests.support.forked import Forked
from tests.support.rank_pool import RankPool, Ranks

SMALL = ProbeOptions(min_bytes=256, max_bytes=65_536, budget_seconds=1.0)


def measured(rank: int, layout: RankLayout, options: ProbeOptions) -> tuple[Cluster, dict[str, list[float]]]:
    """Return the cluster, and message bytes by link and collective."""
    groups = ProbeGroups.create(layout, "cpu", timedelta(seconds=30))
    report = probe(groups, options)
    groups.close()
    sizes = {f"{link} {collective}": times.message_bytes.tolist() for (link, collective), times in report.times.items()}
    return report.cluster(), sizes


def leave_during_a_collective(rank: int, layout: RankLayout, victim: int, hangs: bool, timeout_seconds: float) -> str:
    """Let one rank exit, or stop responding, in the middle of its tenth collective."""
    groups = ProbeGroups.create(layout, "cpu", timedelta(seconds=timeout_seconds))
    seconds, calls = ProbeGroups.seconds, itertools.count()

    def leave(self: ProbeGroups, work: Any, times: int) -> float:
        if next(calls) < 10:
            return seconds(self, work, times)
        self.max_over_ranks(np.zeros(1))  # the others start
        if not hangs:
            os._exit(9)
        time.sleep(300)
        return 0.0

    if rank == victim:
        ProbeGroups.seconds = leave  # type: ignore[method-assign]
    try:
        probe(groups, SMALL)
    except TopologyError as error:
        return str(error)
    return "no error"


LAYOUT = RankLayout(2, 2)


@pytest.fixture
def pool(ranks: Ranks) -> RankPool:
    return ranks(4)


def test_all_ranks_report_one_cluster_that_prices_a_plan(pool: RankPool) -> None:
    results = pool.run(measured, LAYOUT, SMALL)
    cluster, sizes = results[0]
    assert all(other == cluster for other, _ in results)
    assert set(sizes) == {f"{link} {collective}" for link in Link for collective in Collective}
    assert parse_cluster(dump_cluster(cluster), "x") == cluster
    assert "2 nodes x 2 ranks" in cluster.source
    assert "gloo on cpu" in cluster.source
    for link in Link:
        for collective in Collective:
            # More than 1 us and less than a second on any machine: the figures are seconds and bytes per second.
            assert 1e-6 < cluster.curve(link, collective).seconds(4096) < 1.0
    world = cluster.world
    assert (world.nodes, world.local_ranks) == (2, 2)
    # Whole float32 for each of three peers, two of which are on the other node.
    sent = {2 * 4 * -(-size // 12) for size in SMALL.sizes}
    assert {round(size) for size, _ in world.all_to_all.points} <= sent


@pytest.mark.parametrize(("layout", "missing"), [(RankLayout(1, 4), "inter_node"), (RankLayout(4, 1), "intra_node")])
def test_a_link_that_the_job_does_not_have_gets_other_figures(pool: RankPool, layout: RankLayout, missing: str) -> None:
    cluster, sizes = pool.run(measured, layout, ProbeOptions(min_bytes=1024, max_bytes=1024, budget_seconds=0.01))[0]
    assert not any(name.startswith(missing) for name in sizes)
    assert f"{missing}: not measured" in cluster.source
    assert cluster.intra_node == cluster.inter_node


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_a_missing_rank_fails_the_probe_within_the_deadline(hangs: bool) -> None:
    with closing(RankPool(4)) as pool:
        for pipe in pool._pipes:
            pipe.send((leave_during_a_collective, (LAYOUT, 3, hangs, 3.0)))
        deadline = time.monotonic() + 60
        for pipe in pool._pipes[:3]:
            assert pipe.poll(max(0.0, deadline - time.monotonic())), "a survivor hangs"
            kind, text = pipe.recv()
            assert kind == "ok", text
            assert "a collective failed" in text
            assert "see the first error among the other ranks" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_bytes": 0},
        {"min_bytes": 4096, "max_bytes": 1024},
        {"budget_seconds": float("nan")},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(TopologyError, match="probe:"):
        ProbeOptions(**wrong)  # type: ignore[arg-type]


def launch(folder: Path, ranks: int, *options: str) -> list[Forked]:
    """Run ``flexd probe`` as torchrun starts it: one process a rank, configured by the environment."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    command = (forked.flexd, "probe", "--backend", "gloo", *options)
    return [
        Forked(*command, directory=folder, name=f"rank{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(ranks)
    ]


def test_the_command_writes_a_file_that_loads(tmp_path: Path) -> None:
    ranks = launch(
        tmp_path, 2, "--out", "c.yaml", "--local-ranks", "1", "--max-bytes", "16384", "--budget-seconds", "0.5",
        "-o", "json",
    )  # fmt: skip
    ended = [process.wait(90) for process in ranks]
    assert [each.returncode for each in ended] == [0, 0], ended
    cluster = load_cluster(tmp_path / "c.yaml")
    costs = cluster.step_costs
    assert costs.row_bytes_per_second > 0
    answer = json.loads(ended[0].stdout)
    assert [(one["link"], one["collective"]) for one in answer["measured"]] == [
        ("inter_node", collective.value) for collective in Collective
    ]
    curve = cluster.curve(Link.INTER_NODE, Collective.ALL_REDUCE)
    by_name = {one["collective"]: one for one in answer["measured"]}
    assert by_name["all_reduce"]["points"] == [list(point) for point in curve.points]
    assert by_name["all_reduce"]["latency_seconds"] == curve.latency_seconds
    assert (answer["source"], answer["step_costs"], ended[1].stdout) == (cluster.source, asdict(costs), "")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``flexd probe`` in this process, which is no rank of a job, and return its error output."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*options: str, **environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["flexd", "probe", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (1, 2)
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--out"),
        (["--out", "c.yaml"], "no rank of a job"),
        (["--out", "c.yaml", "--timeout-seconds", "0"], "--timeout-seconds"),
        (["--out", "c.yaml", "--max-bytes", "10"], "min_bytes <= max_bytes"),
    ],
)
def test_invalid_arguments_fail_before_measuring(
    tmp_path: Path, command: Callable[..., str], options: list[str], message: str
) -> None:
    assert message in command(*options)
    assert not list(tmp_path.iterdir())


def test_ranks_that_never_join_fail_it_at_the_deadline(command: Callable[..., str]) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    error = command("--out", "c.yaml", "--timeout-seconds", "1", "--backend", "gloo", **job, LOCAL_WORLD_SIZE="1")
    assert "no process group" in error
    assert "GLOO_SOCKET_IFNAME" in error


def groups_of(rank: int, layouts: dict[int, RankLayout]) -> str:
    """Return the ranks of this rank's groups and two numbers shared by all ranks, or the error."""
    try:
        groups = ProbeGroups.create(layouts[rank], "cpu", timedelta(seconds=30))
    except TopologyError as error:
        return str(error)
    members = [group and dist.get_process_group_ranks(group) for group in (groups.node, groups.rail)]
    largest = float(groups.max_over_ranks(np.array([rank], dtype=np.float64))[0])
    text = f"node {members[0]}, rail {members[1]}, max {largest}, of rank 0 {groups.from_rank0(10.0 + rank)}"
    groups.close()
    return text


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", [1, 1000, 4099, 65_536])
def test_stated_bytes_equal_those_of_the_arguments(monkeypatch: pytest.MonkeyPatch, ranks: int, size: int) -> None:
    sent: list[float] = []

    def all_to_all(received: Any, send: Any, _received: list[int], splits: list[int], group: Any) -> None:
        assert received.numel() == send.numel() == sum(splits)
        sent.append((sum(splits) - splits[0]) * send.itemsize)

    def all_gather(received: Any, part: Any, group: Any) -> None:
        assert received.numel() == part.numel() * ranks
        sent.append(part.nbytes * (ranks - 1))

    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda flat, group: sent.append(2 * flat.nbytes * (ranks - 1) / ranks))
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(probe_module, "_all_gather", all_gather)
    for collective in Collective:
        stated, work = make_collective(collective, size, cast(Any, None), torch.device("cpu"))
        work()
        assert stated == sent.pop(), collective
        assert size <= stated <= size + 4 * 2 * ranks, collective


def test_different_layouts_are_refused_on_every_rank(pool: RankPool) -> None:
    texts = pool.run(groups_of, {rank: RankLayout(2, 2) for rank in (0, 1, 2)} | {3: RankLayout(4, 1)})
    assert all("layout of rank 3 is [4.0, 1.0], of rank 0 [2.0, 2.0]" in text for text in texts)
