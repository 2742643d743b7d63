"""Measure the transport of the control channel beside torch's TCPStore, and its handshakes.

    python tools/bench_channel.py [--quick] [--json] [--clients N]

**Body.** A server gives the same 1 MiB to every client, as a chunk is given to every rank. *channel*: one ``send`` to
all, each frame authenticated. *store*: clients that wait in ``get`` for a key that is then set (not authenticated).
Reported: seconds until the last client has it, processor time of the serving process, its extra resident memory.

**Round trips.** One client sends 200 bytes and waits for 200 bytes.

**Handshakes.** Connections that prove a shared secret, one after the other from two processes; with and without TLS 1.3
and client certificates (``trustme`` is needed to make them).

``--quick`` takes 16 clients and 100 handshakes. The last line of ``--json`` output is ``{"figures", "checks"}``.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_report import check, last_line

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.daemon.channel_types import ChannelOptions, Opened, Received
from flexd.control.protocol.credentials import ChannelCredentials, TlsFiles

SECRET = b"the secret of the benchmark....."
BODY_BYTES = 2**20
REPEATS = 5
PROCESSES = 4
_DEADLINE_SECONDS = 60.0


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def store_clients(pipe: Connection, port: int, clients: int) -> None:
    """Wait for each of the keys in so many clients, and report when all have it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_DEADLINE_SECONDS)
    stores = [TCPStore("127.0.0.1", port, timeout=timeout, wait_for_workers=False) for _ in range(clients)]
    for repeat in range(REPEATS):
        pipe.send("ready")

        def get(number: int, repeat: int = repeat) -> None:
            assert len(stores[number].get(f"body/{repeat}")) == BODY_BYTES

        in_threads(clients, get)
        pipe.send("done")
    pipe.recv()


def channel_clients(pipe: Connection, port: int, clients: int) -> None:
    credentials = ChannelCredentials(SECRET)
    ends = [ChannelClient.connect("127.0.0.1", port, credentials, _DEADLINE_SECONDS) for _ in range(clients)]
    for _ in range(REPEATS):
        pipe.send("ready")

        def receive(number: int) -> None:
            frame = ends[number].receive(_DEADLINE_SECONDS)
            assert frame is not None
            assert len(frame.body) == BODY_BYTES

        in_threads(clients, receive)
        pipe.send("done")
    pipe.recv()


def serve_bodies(result: Connection, kind: str, clients: int) -> None:
    """Serve in a process of its own, so that its processor time and memory are the server's alone."""
    context = mp.get_context("spawn")
    server: Any
    if kind == "store":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        target: Callable[..., None] = store_clients
    else:
        server = ChannelServer(ChannelOptions(max_peers=clients + 8), ChannelCredentials(SECRET))
        server.start()
        target = channel_clients
    pipes = []
    for _ in range(PROCESSES):
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(theirs, server.port, clients // PROCESSES), daemon=True).start()
        pipes.append(ours)
    opened: list[int] = []
    while kind == "channel" and len(opened) < clients // PROCESSES * PROCESSES:
        opened += [event.peer for event in server.receive(1000, 1.0) if isinstance(event, Opened)]
    seconds, processor = [], []
    for repeat in range(REPEATS):
        for pipe in pipes:
            assert pipe.recv() == "ready"
        # Until all threads wait.
        time.sleep(0.5)
        if repeat == 0:
            before = peak_bytes()
        begun, used = time.perf_counter(), processor_seconds()
        body = bytes(BODY_BYTES)
        if kind == "store":
            server.set(f"body/{repeat}", body)
        else:
            server.send(opened, b"body", body)
        for pipe in pipes:
            assert pipe.recv() == "done"
        seconds.append(time.perf_counter() - begun)
        processor.append(processor_seconds() - used)
    result.send(
        {"seconds": min(seconds), "server_processor_seconds": min(processor), "server_bytes": peak_bytes() - before}
    )
    for pipe in pipes:
        pipe.send("end")


def connect_often(pipe: Connection, port: int, credentials: ChannelCredentials, count: int) -> None:
    pipe.send("ready")
    pipe.recv()
    for _ in range(count):
        ChannelClient.connect("127.0.0.1", port, credentials, _DEADLINE_SECONDS).close()
    pipe.send("done")


def handshakes(count: int, tls: tuple[TlsFiles, TlsFiles] | None) -> dict[str, float]:
    context = mp.get_context("spawn")
    daemon, rank = (ChannelCredentials(SECRET, files) for files in tls or (None, None))
    server = ChannelServer(ChannelOptions(), daemon)
    server.start()
    pipes = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=connect_often, args=(theirs, server.port, rank, count // 2), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    begun, used = time.perf_counter(), processor_seconds()
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        assert pipe.recv() == "done"
    seconds, processor = time.perf_counter() - begun, processor_seconds() - used
    assert server.counters().proven == count // 2 * 2
    server.stop(5)
    return {"per_second": count / seconds, "server_processor_milliseconds": 1000 * processor / count}


def round_trips(count: int) -> dict[str, float]:
    server = ChannelServer(ChannelOptions(), ChannelCredentials(SECRET))
    server.start()
    client = ChannelClient.connect("127.0.0.1", server.port, ChannelCredentials(SECRET), _DEADLINE_SECONDS)

    def answer() -> None:
        answered = 0
        while answered < count:
            for event in server.receive(10, 1.0):
                if isinstance(event, Received):
                    server.send([event.peer], event.message)
                    answered += 1

    thread = threading.Thread(target=answer)
    thread.start()
    begun = time.perf_counter()
    for _ in range(count):
        client.send(bytes(200))
        assert client.receive(_DEADLINE_SECONDS)
    seconds = time.perf_counter() - begun
    thread.join()
    server.stop(5)
    return {"microseconds": 1e6 * seconds / count}


def certificates(folder: Path) -> tuple[TlsFiles, TlsFiles]:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    made = []
    for name, host in (("daemon", "127.0.0.1"), ("rank", "rank.test")):
        issued = authority.issue_cert(host)
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        made.append(TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem"))
    return made[0], made[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, default=None)
    args = parser.parse_args()
    clients = args.clients or (16 if args.quick else 128)
    connections = 100 if args.quick else 1000
    figures: dict[str, Any] = {"clients": clients}
    for kind in ("store", "channel"):
        ours, theirs = mp.get_context("spawn").Pipe()
        process = mp.get_context("spawn").Process(target=serve_bodies, args=(theirs, kind, clients))
        process.start()
        figures[kind] = ours.recv()
        process.join(30)
        found = figures[kind]
        print(
            f"{kind:8} {BODY_BYTES >> 20} MiB to {clients} clients: {found['seconds']:.3f} s, server's processor "
            f"{found['server_processor_seconds']:.3f} s, its memory +{found['server_bytes'] / 2**20:.0f} MiB"
        )
    figures["round_trip"] = round_trips(connections)
    print(f"round trip of 200 bytes: {figures['round_trip']['microseconds']:.0f} us")
    with tempfile.TemporaryDirectory() as folder:
        for name, tls in (("secret", None), ("tls", certificates(Path(folder)))):
            found = figures[f"handshake_{name}"] = handshakes(connections, tls)
            print(
                f"handshakes with {name}: {found['per_second']:.0f} a second, server's processor "
                f"{found['server_processor_milliseconds']:.2f} ms each"
            )
    ratio = figures["channel"]["seconds"] / figures["store"]["seconds"]
    name = "time until all clients have a body, channel / store"
    checks = [check(name, ratio, "<= 2", ratio <= 2)]
    if args.json:
        print(last_line(figures, checks))
    return 0 if all(entry["ok"] for entry in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
