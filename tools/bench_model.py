#!/usr/bin/env python3
"""Model against reality: seconds of communication that the cost model predicts, beside those of real gloo ranks.

Two network namespaces stand for two nodes, joined by a veth pair for each local rank (its adapter) that ``tc tbf``
limits in both directions. The links are probed (flexd.topology.probe), a plan is made on the
topology file that comes of it, and each strategy is trained and timed. Needs root, ip and tc; says so and exits 0
without.

Usage: tools/bench_model.py [--rate-mbit 25] [--local-ranks 2] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_report import last_line

PORT = 29_741
RANK_PROGRAM = Path(__file__).parent / "bench_model_rank.py"
LARGEST_ERROR = 0.25
LARGEST_BYTES_ERROR = 0.02


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def address(node: int, local: int) -> str:
    return f"10.77.{local}.{node + 1}"


def ip(namespace: str, *words: str) -> None:
    run("ip", "-n", namespace, *words)


@contextmanager
def two_nodes(local_ranks: int, rate_mbit: float) -> Iterator[tuple[str, str]]:
    """Names of two namespaces, joined by a limited link for each local rank; gone afterwards.

    A message goes out by the adapter of the receiver's rail (the route follows its address), as NCCL's PXN sends it.
    """
    names = (f"flexd{os.getpid()}a", f"flexd{os.getpid()}b")
    # A queue that nothing is dropped from: a lossless network, as RDMA is. A small burst, so that the rate holds for
    # the messages measured here.
    limit = ("rate", f"{rate_mbit}mbit", "burst", "16kb", "limit", "32mb")
    try:
        for name in names:
            run("ip", "netns", "add", name)
            ip(name, "link", "set", "lo", "up")
        for local in range(local_ranks):
            here = f"eth{local}"
            ends = ("type", "veth", "peer", "name", here, "netns", names[1])
            run("ip", "link", "add", here, "netns", names[0], *ends)
            for node, name in enumerate(names):
                ip(name, "addr", "add", f"{address(node, local)}/24", "dev", here)
                ip(name, "link", "set", here, "up")
                run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", here, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def launch(
    names: tuple[str, str], local_ranks: int, out: Path, settings: dict[str, Any]
) -> list[subprocess.Popen[bytes]]:
    """Rank processes, as torchrun would tell them where they are."""
    shared = os.environ | {
        "MASTER_ADDR": address(0, 0), "MASTER_PORT": str(PORT), "WORLD_SIZE": str(2 * local_ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(RANK_PROGRAM), str(out), json.dumps(settings)],
            env=shared
            | {
                "RANK": str(node * local_ranks + local),
                "LOCAL_RANK": str(local),
                "GLOO_SOCKET_IFNAME": f"eth{local}",
            },
        )
        for node, name in enumerate(names)
        for local in range(local_ranks)
    ]


def wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Raises OSError if a rank fails or does not end in time; none is left behind."""
    deadline = time.monotonic() + seconds
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        codes = [rank.poll() for rank in ranks]
        if any(code != 0 for code in codes):
            raise OSError(f"ranks ended with {codes} (None: still running after {seconds:.0f} s)")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


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
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("skipped: needs root, ip and tc (iproute2)")
        return 0
    settings = {
        "probe_seconds": 30.0 if arguments.quick else 60.0,
        "probe_bytes": 2**20 if arguments.quick else 2**22,
        "accesses": 4096,
        "zipf": 1.05,
        "steps": 8 if arguments.quick else 25,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        try:
            with two_nodes(arguments.local_ranks, arguments.rate_mbit) as names:
                wait(launch(names, arguments.local_ranks, out, settings), 300.0 if arguments.quick else 900.0)
        except OSError as error:
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
