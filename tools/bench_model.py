#!/usr/bin/env python3
"""Model against reality: seconds of communication that the cost model predicts, beside those of real gloo ranks.

Two nodes of an emulated cluster (tools/cluster.py), with an adapter for each rank: a message goes out by the adapter
of the receiver's rail, as NCCL's PXN sends it. The links are probed (flexd.topology.probe), a plan is made on the
topology file that comes of it, and each strategy is trained and timed. Needs root, ip, tc and setpriv; says so and
exits 0 without.

Usage: tools/bench_model.py [--rate-mbit 25] [--local-ranks 2] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_report import last_line
from cluster import Cluster, ClusterError, exit_on_sigterm, wait, why_not

RANK_PROGRAM = Path(__file__).parent / "bench_model_rank.py"
LARGEST_ERROR = 0.25
LARGEST_BYTES_ERROR = 0.02


def show(answer: dict[str, Any]) -> None:
    print(answer["source"])
    print(
        f"{'strategy':<24}{'replicas':>9}{'predicted':>12}{'measured':>12}{'error':>8}"
        f"{'inter-node bytes':>18}{'error':>8}"
    )
    for row in answer["rows"]:
        print(
            f"{row['strategy']:<24}{row['replicated_rows']:>9,}{row['predicted_seconds'] * 1e3:>9.1f} ms"
            f"{row['measured_seconds'] * 1e3:>9.1f} ms{row['error']:>+8.1%}{row['counted_inter_node_bytes']:>18,.0f}"
            f"{row['bytes_error']:>+8.1%}"
        )


def checks_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors of time and bytes, and whether the model puts the strategies in the order that the clock does."""
    checks = []
    for row in rows:
        for what, limit in (("error", LARGEST_ERROR), ("bytes_error", LARGEST_BYTES_ERROR)):
            ok = abs(row[what]) <= limit
            checks.append({"name": f"{row['strategy']}: {what}", "value": row[what], "target": f"+-{limit}", "ok": ok})
    wrong = sum(
        (a["predicted_seconds"] < b["predicted_seconds"]) != (a["measured_seconds"] < b["measured_seconds"])
        for i, a in enumerate(rows)
        for b in rows[i + 1 :]
        # Pairs that lie closer than the clock can tell have no order.
        if abs(a["measured_seconds"] / b["measured_seconds"] - 1) > 0.15
    )
    checks.append({"name": "pairs in the wrong order", "value": wrong, "target": "0", "ok": wrong == 0})
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=25.0, help="of a rank's adapter, each direction")
    parser.add_argument("--local-ranks", type=int, default=2)
    parser.add_argument("--topology", type=Path, metavar="FILE.yaml", help="keep what the probe wrote")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    exit_on_sigterm()
    settings = {
        "probe_seconds": 30.0 if arguments.quick else 60.0,
        "probe_bytes": 2**20 if arguments.quick else 2**22,
        "accesses": 4096,
        "zipf": 1.05,
        "steps": 8 if arguments.quick else 25,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        command = [sys.executable, str(RANK_PROGRAM), str(out), json.dumps(settings)]
        local = arguments.local_ranks
        try:
            with Cluster(2, local, adapters=local, rate_mbit=arguments.rate_mbit) as cluster:
                ranks = cluster.start(command, environment={"OMP_NUM_THREADS": "1"})
                wait(ranks, 300.0 if arguments.quick else 900.0)
        except ClusterError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        answer = json.loads(out.read_text())
    show(answer)
    if arguments.topology is not None:
        arguments.topology.write_text(answer["topology"])
    checks = checks_of(answer["rows"])
    if arguments.json:
        figures = {
            f"{row['strategy']}: {key}": row[key]
            for row in answer["rows"]
            for key in row
            if key.endswith(("seconds", "error"))
        }
        print(last_line(figures, checks))
    for check in checks:
        if not check["ok"]:
            print(f"not met: {check['name']}: {check['value']} (target {check['target']})", file=sys.stderr)
    return 0 if all(check["ok"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
