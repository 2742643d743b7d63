#!/usr/bin/env python3
"""Compare the bytes that gloo's collectives send, by the interface counters, with the bytes that flexd counts.

Runs itself in a network namespace of its own (root needed; says so and exits 0 without), so that nothing else is on the
loopback interface. Usage: tools/check_collective_bytes.py [--ranks 4] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

PORT = 29_731


def _loopback_bytes() -> int:
    with open("/proc/net/dev") as file:
        return next(int(line.split()[1]) for line in file if line.strip().startswith("lo:"))


def _measure(rank: int, world_size: int, sizes: list[int], results: Any) -> None:
    import torch
    import torch.distributed as dist

    from flexd.core.layout import RankLayout
    from flexd.embedding.exchange.collectives import Peers, Traffic

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", PORT, world_size, rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    traffic = Traffic()
    peers = Peers(dist.group.WORLD, list(range(world_size)), rank, RankLayout(world_size, 1), traffic)
    collectives = {
        "all_to_all": lambda flat: peers.all_to_all(
            flat, [len(flat) // world_size] * world_size, [len(flat) // world_size] * world_size
        ),
        "all_reduce": peers.all_reduce,
        "all_gather": lambda flat: peers.all_gather(flat[: len(flat) // world_size]),
    }
    for name, run in collectives.items():
        for size in sizes:
            flat = torch.ones(size // 4)
            dist.barrier()
            time.sleep(0.2)
            before, counted = _loopback_bytes(), traffic.all_to_all_inter_bytes
            time.sleep(0.1)
            run(flat)
            dist.barrier()
            time.sleep(0.2)
            total = torch.tensor([traffic.all_to_all_inter_bytes - counted])
            wire = _loopback_bytes() - before
            dist.all_reduce(total)
            if rank == 0:
                results.append((name, size, int(total), wire))
            dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "FLEXD_IN_NAMESPACE" not in os.environ:
        if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
            print("skipped: needs root, unshare and ip (util-linux, iproute2)")
            return 0
        command = f'ip link set lo up && exec "{sys.executable}" ' + " ".join(f'"{part}"' for part in sys.argv)
        environment = {**os.environ, "FLEXD_IN_NAMESPACE": "1"}
        return subprocess.run(["unshare", "-n", "sh", "-c", command], env=environment, check=False).returncode
    sizes = [8_000_000] if arguments.quick else [800_000, 8_000_000, 64_000_000]
    context = mp.get_context("spawn")
    with context.Manager() as manager:
        results = manager.list()
        ranks = [
            context.Process(target=_measure, args=(rank, arguments.ranks, sizes, results))
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        rows = list(results)
    if len(rows) != 3 * len(sizes):
        print("a rank failed", file=sys.stderr)
        return 1
    figures, checks = {}, []
    print(f"{'collective':<12}{'bytes':>12}{'counted':>14}{'on the wire':>14}{'wire/counted':>14}")
    for name, size, counted, wire in rows:
        print(f"{name:<12}{size:>12,}{counted:>14,}{wire:>14,}{wire / counted:>14.4f}")
        figures[f"{name}_{size}_wire_per_counted"] = wire / counted
        # TCP/IP headers and acknowledgements come on top; nothing may be missing.
        ok = 1.0 <= wire / counted <= 1.05
        checks.append({"name": f"{name}_{size}", "value": wire / counted, "target": "1.00 to 1.05", "ok": ok})
    if arguments.json:
        print(json.dumps({"figures": figures, "checks": checks}))
    return 0 if all(check["ok"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
