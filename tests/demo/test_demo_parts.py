"""The demo's parts without processes: alignment, baselines, options, the scale model, progress."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flexd.core.errors import ConfigError, FlexdError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.demo.model import NextItem, right_aligned
from flexd.demo.options import DemoOptions
from flexd.demo.processes import Ranks
from flexd.demo.reference import ID_BYTES, RowWiseBaseline
from flexd.stream.trace import Batch
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model


def test_sequences_are_aligned_to_the_right_and_padded_with_zeros() -> None:
    rows = torch.arange(1.0, 7.0).unsqueeze(1)
    order = torch.tensor([5, 0, 1, 2, 4, 3])
    sequences, mask = right_aligned(rows, order, torch.tensor([1, 3, 2]), width=3)
    assert sequences.squeeze(2).tolist() == [[0, 0, 6], [1, 2, 3], [0, 5, 4]]
    assert mask.tolist() == [[False, False, True], [True, True, True], [False, True, True]]


def test_padding_has_no_part_in_loss_or_gradient() -> None:
    torch.manual_seed(0)
    model = NextItem(4, 3).double()
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    sequences, mask = right_aligned(rows, torch.arange(5), torch.tensor([2, 3]), width=4)
    loss = model(sequences, mask)
    noisy = sequences + torch.randn_like(sequences) * ~mask.unsqueeze(2)
    assert torch.equal(model(noisy, mask), loss)
    loss.backward()
    assert torch.isfinite(rows.grad).all()
    assert (rows.grad.abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(3, 1), RankLayout(1, 4), RankLayout(2, 3)])
def test_row_wise_baseline_counts_as_a_loop_over_requests_does(layout: RankLayout) -> None:
    keyspace = KeySpace([TableSpec("a", 40, 4, "float64"), TableSpec("b", 13, 6), TableSpec("c", 9, 4, "float64")])
    baseline = RowWiseBaseline(keyspace, layout)
    rng = np.random.default_rng(3)
    ids = tuple(rng.integers(0, table.rows, 30) for table in keyspace.tables)
    none = np.empty(0, dtype=np.int64)
    batch = Batch(ids, (none, none, none), none, none, 0.0)
    # Keys by hand: tables a and c share a group (dim and dtype), which stands before b's.
    offsets, row_bytes = (0, 40 + 9, 40), (32, 24, 32)
    for rank in range(layout.world_size):
        counted = {False: 0, True: 0}
        for table in range(3):
            for dedup in (False, True):
                for row in set(ids[table].tolist()) if dedup else ids[table].tolist():
                    home = (offsets[table] + row) % layout.world_size
                    if home // layout.local_ranks != rank // layout.local_ranks:
                        counted[dedup] += ID_BYTES + 2 * row_bytes[table]
        for dedup in (False, True):
            assert baseline.bytes_of(batch, rank, dedup=dedup) == counted[dedup]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 17}, "--nodes 17"),
        ({"local_ranks": 0}, "--local-ranks 0"),
        ({"steps": 19}, "--steps 19"),
        ({"batch_size": 1}, "--batch-size 1"),
        ({"replica_budget": -0.1}, "--replica-budget -0.1"),
        ({"replica_budget": 1.1}, "--replica-budget 1.1"),
        ({"replica_budget": float("nan")}, "--replica-budget nan"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"kill_daemon_at": 0}, "--kill-daemon-at 0"),
        ({"steps": 50, "kill_daemon_at": 50}, "--kill-daemon-at 50"),
        ({"restart_daemon_after": 5}, "--restart-daemon-after"),
        ({"steps": 50, "kill_daemon_at": 40, "restart_daemon_after": 10}, "--restart-daemon-after 10"),
        ({"steps": 50, "kill_daemon_at": 40, "restart_daemon_after": -1}, "--restart-daemon-after -1"),
    ],
)
def test_options_that_no_run_can_have(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        DemoOptions(**options)  # type: ignore[arg-type]
    assert error.value.message.startswith(named)
    assert error.value.remedy


def test_usable_options_are_taken() -> None:
    assert DemoOptions(nodes=3, local_ranks=4, kill_daemon_at=10, restart_daemon_after=0).world_size == 12


def test_the_scale_model_changes_latencies_alone() -> None:
    cluster = load_preset("azure-a100-200g")
    scaled = scale_model(cluster, 100.0)
    for link, small in ((cluster.intra_node, scaled.intra_node), (cluster.inter_node, scaled.inter_node)):
        for name in ("all_to_all", "all_reduce", "all_gather"):
            curve, other = getattr(link, name), getattr(small, name)
            assert other.latency_seconds == pytest.approx(curve.latency_seconds / 100)
            assert replace(other, latency_seconds=curve.latency_seconds) == curve
    assert "scale model" in scaled.source
    assert cluster.source.rstrip(".") in scaled.source


def _ranks_that_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> Ranks:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    script.chmod(0o755)
    monkeypatch.setattr("flexd.demo.processes.sys.executable", str(script))
    return Ranks(tmp_path / "setup.json", 1, tmp_path)


def test_output_of_libraries_among_the_progress_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = 'print("[Gloo] connected"); print("{\\"step\\": 0}"); print("7"); print("{\\"step\\": 1}")'
    ranks = _ranks_that_run(monkeypatch, tmp_path, program)
    ranks.join()
    assert [record["step"] for record in ranks.records[0]] == [0, 1]


def test_a_failed_rank_is_reported_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = _ranks_that_run(monkeypatch, tmp_path, 'import sys; print("what went wrong", file=sys.stderr); sys.exit(3)')
    ranks.join()

    def wait_for_end() -> None:
        while ranks.running():
            pass

    with pytest.raises(FlexdError, match=r"rank 0 ended with exit code 3:\nwhat went wrong"):
        wait_for_end()
