"""The emulated cluster: who reaches whom at which rate, and that nothing of it stays behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import until
from tools.bench.cluster import Cluster, remove_leftovers

pytestmark = pytest.mark.alone

NAMESPACES = Path("/run/netns")

# A run of its own: two nodes with one rank of the program argv[1] each, until the ranks end or SIGTERM comes.
OTHER_RUN = """
import sys
from tools.bench.cluster import Cluster
from tools.bench.harness import exit_on_sigterm
exit_on_sigterm()
with Cluster(2, 1) as cluster:
    for rank in cluster.start([sys.executable, "-c", *sys.argv[1:]]):
        rank.wait()
"""
# Sends argv[2] bytes to every rank of the node given by argv[1], which counts what arrives and how long it takes.
SENDER = """
import json, os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
to, count = int(sys.argv[1]), int(sys.argv[2])
if rank == 0:
    with socket.create_connection((f"10.77.0.{to + 1}", 7000), 20) as wire:
        wire.sendall(bytes(count))
        wire.shutdown(socket.SHUT_WR)
        print(json.dumps({"answer": wire.recv(100).decode()}))
"""
RECEIVER = """
import os, socket, sys, time
with socket.create_server(("0.0.0.0", 7000)) as server:
    os.write(1, b"ready\\n")  # at once: other ranks write to the same pipe
    wire, _ = server.accept()
    first, count = None, 0
    while chunk := wire.recv(2**16):
        first = first or time.monotonic()
        count += len(chunk)
    wire.sendall(f"{count} {time.monotonic() - first}".encode())
"""


def transfer(cluster: Cluster, to: int, count: int) -> tuple[int, float]:
    """(bytes, seconds) of a message from node 0, as its receiver in node ``to`` saw it."""
    receiver = cluster.start_in(to, [sys.executable, "-c", RECEIVER], {}, stdout=subprocess.PIPE)
    assert receiver.stdout.readline() == b"ready\n"
    sender = cluster.start_in(
        0, [sys.executable, "-c", SENDER, str(to), str(count)], cluster.environment(0), stdout=subprocess.PIPE
    )
    out, _ = sender.communicate(timeout=60)
    receiver.communicate(timeout=60)
    got, seconds = json.loads(out)["answer"].split()
    return int(got), float(seconds)


def names_of(pid: int) -> list[str]:
    return sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(f"flexd-{pid}-"))


@pytest.mark.usefixtures("can_emulate")
def test_no_byte_faster_than_the_rate_and_each_counted_on_its_link() -> None:
    with Cluster(2, 2, rate_mbit=16.0) as cluster:
        before = cluster.sent()
        count, seconds = transfer(cluster, to=1, count=1_000_000)
        far = cluster.sent() - before
        assert count == 1_000_000
        # What two idle buckets may let through at once comes on top; a slow machine only lets through less.
        assert count <= 16e6 / 8 * seconds + 4 * cluster.burst_kib * 1024
        assert 1_000_000 < far.inter < 1_120_000
        assert far.intra < 10_000

        before = cluster.sent()
        assert transfer(cluster, to=0, count=1_000_000)[0] == 1_000_000
        near = cluster.sent() - before
        assert near.inter < 10_000
        assert 1_000_000 < near.intra < 1_120_000


@pytest.mark.usefixtures("can_emulate")
def test_of_a_killed_run_the_ranks_die_and_the_next_run_removes_the_rest(tmp_path: Path) -> None:
    pids = f"import os,time; open(r'{tmp_path}/'+os.environ['RANK'],'w').write(str(os.getpid())); time.sleep(600)"
    killed = subprocess.Popen([sys.executable, "-c", OTHER_RUN, pids])
    files = [tmp_path / "0", tmp_path / "1"]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    ranks = [int(file.read_text()) for file in files]
    killed.kill()
    killed.wait(10)
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    assert len(names_of(killed.pid)) == 3
    with Cluster(1, 1) as alive:
        assert names_of(killed.pid) == []
        assert remove_leftovers() == []
        assert (NAMESPACES / alive.namespaces[0]).exists()
