"""Hostile clients of the control port, under training.

They send garbage, half and recorded handshakes, floods and wrong secrets; one has the secret and misbehaves.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
from collections.abc import Callable, Iterator

from flexd.control.agent.channel_client import ChannelClient
from flexd.control.protocol.credentials import ChannelCredentials
from flexd.control.protocol.frames import HEAD, MAX_BODY_BYTES
from flexd.control.protocol.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES, encode_hello
from flexd.control.protocol.versions import OWN, Versions
from flexd.core.errors import ControlError
from tests.e2e.chaos.chaos_faults import STEPS_DURING, Injection
from tests.e2e.chaos.chaos_training import JOB
from tests.e2e.chaos.chaos_world import ChaosWorld
from tests.support.channel import RawPeer, raw_connection

_CONNECTIONS = 60
_FLOOD = 1500
_DESCRIPTORS = 4 * _FLOOD
_FLOOD_BYTES = 8 * 2**20
_SECONDS = 10.0
_HELLO = encode_hello(OWN, bytes(NONCE_BYTES))
_GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: flexd\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    (2).to_bytes(8, "little") + bytes(64), bytes(2**16), MAGIC + b"\0\xff\xff", MAGIC + b"\xff\0\x2c" + bytes(44),
    encode_hello(Versions(900, 901), bytes(NONCE_BYTES)), _HELLO + bytes(PROOF_BYTES), _HELLO * 50,
)  # fmt: skip
"""HTTP, TLS, gloo's preamble, zeros, lengths and states that do not exist, another version, a false proof."""


def _send(sock: socket.socket, data: bytes) -> None:
    # The daemon closes a connection as soon as it knows enough.
    with contextlib.suppress(OSError):
        sock.sendall(data)


def garbage(world: ChaosWorld, chance: random.Random) -> str:
    for _ in range(_CONNECTIONS):
        with contextlib.closing(raw_connection(world.control_port)) as sock:
            _send(sock, chance.choice((*_GARBAGE, chance.randbytes(chance.randrange(1, 4000)))))
    world.steps_on(STEPS_DURING)
    return f"{_CONNECTIONS} connections"


def half_handshakes(world: ChaosWorld, chance: random.Random) -> str:
    with contextlib.ExitStack() as open_ones:
        for _ in range(_CONNECTIONS):
            sock = open_ones.enter_context(contextlib.closing(raw_connection(world.control_port)))
            _send(sock, (_HELLO + bytes(PROOF_BYTES))[: chance.randrange(len(_HELLO) + PROOF_BYTES)])
        world.steps_on(STEPS_DURING)
    return f"{_CONNECTIONS} connections"


def recorded_handshake(world: ChaosWorld, chance: random.Random) -> str:
    honest = _proven(world)
    for _ in range(_CONNECTIONS // 3):
        with contextlib.closing(raw_connection(world.control_port)) as sock:
            _send(sock, b"".join(honest.sent) + honest.frame(b"recorded"))
    world.steps_on(STEPS_DURING)
    honest.sock.close()
    return f"{_CONNECTIONS // 3} times"


def flood_of_connections(world: ChaosWorld, chance: random.Random) -> str:
    """More than the daemon accepts at a time, each with a byte now and then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with contextlib.ExitStack() as open_ones:
        sockets = []
        for _ in range(_FLOOD):
            sock = open_ones.enter_context(contextlib.closing(socket.socket()))
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", world.control_port))
            sockets.append(sock)
        for at in range(4):
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.send(_HELLO[at : at + 1])
            world.steps_on(STEPS_DURING // 4)
    return f"{_FLOOD} connections"


def wrong_secret(world: ChaosWorld, chance: random.Random) -> str:
    for _ in range(_CONNECTIONS // 3):
        try:
            ChannelClient.connect(
                "127.0.0.1", world.control_port, ChannelCredentials(chance.randbytes(32)), _SECONDS
            ).close()  # fmt: skip
        except ControlError:
            continue
        raise AssertionError("a client with another secret was accepted")
    world.steps_on(STEPS_DURING)
    return f"{_CONNECTIONS // 3} times"


def proven_peer(world: ChaosWorld, chance: random.Random) -> str:
    """It has the secret, and sends what no rank sends."""
    name = chance.choice(sorted(_MISBEHAVIOUR))
    peer = _proven(world)
    peer.sock.settimeout(0.5)
    with contextlib.closing(peer.sock):
        for data in _MISBEHAVIOUR[name](peer, chance):
            try:
                peer.sock.sendall(data)
            except OSError:
                # The daemon has closed it, or does not read it any more.
                break
        world.steps_on(STEPS_DURING)
    return name


def _oversized(peer: RawPeer, chance: random.Random) -> Iterator[bytes]:
    yield HEAD.pack(chance.choice((MAX_BODY_BYTES + 2**19, 2**32 - 1)), 0, chance.choice((0, 2**31)))
    yield bytes(2**20)


def _changed(peer: RawPeer, chance: random.Random) -> Iterator[bytes]:
    frame = bytearray(peer.frame(b'{"kind":"hello"}', bytes(300)))
    frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    yield bytes(frame)


def _half_a_frame(peer: RawPeer, chance: random.Random) -> Iterator[bytes]:
    yield peer.frame(b"slow", bytes(MAX_BODY_BYTES))[: chance.randrange(1, MAX_BODY_BYTES)]


def _flood(peer: RawPeer, chance: random.Random) -> Iterator[bytes]:
    """Frames as fast as they are taken, without reading one."""
    size = chance.choice((0, 1000, 500_000))
    for _ in range(min(20_000, _FLOOD_BYTES // (size + 100))):
        yield peer.frame(b'{"kind":"progress"}', bytes(size))


def _nonsense(peer: RawPeer, chance: random.Random) -> Iterator[bytes]:
    """Authentic messages that mean nothing, or claim to be of the job."""
    claims = {
        "job": JOB, "attempt": "a1", "generation": 1, "epoch": 1, "token": "0" * 32, "rank": 0,
        "sequence": 2**62, "session": "s", "nonce": "n", "instance": "i", "world_size": 1, "nodes": 1,
        "local_ranks": 1, "replica_slots": [1], "table_digest": "d", "agreed_version": 2**60, "agreed_digest": 1,
        "applied_version": 2**60, "version": 5, "rows": 2**40, "sha256": "", "reason": "no", "number": 0,
        "bytes": 2**40, "pieces": 2**20, "error": "",
    }  # fmt: skip
    kinds = ("hello", "settled", "progress", "chunk_refused", "listing", "tap_offer", "tap_piece", "daemon", "greeting")
    for _ in range(200):
        yield peer.frame(json.dumps({**claims, "kind": chance.choice(kinds)}).encode(), chance.randbytes(10))
        yield peer.frame(chance.choice((b"", b"{}", b"[" * 5000, b"\x00\xff" * 100, b'{"kind":"hello"}')))


_MISBEHAVIOUR: dict[str, Callable[[RawPeer, random.Random], Iterator[bytes]]] = {
    "oversized": _oversized, "changed": _changed, "half a frame": _half_a_frame, "flood": _flood, "nonsense": _nonsense,
}  # fmt: skip


def _proven(world: ChaosWorld) -> RawPeer:
    key = (world.directory / "secret").read_text().split("\n")[0]
    return RawPeer(world.control_port, key.encode())


def kinds() -> dict[str, list[Injection]]:
    return {
        "hostile: garbage": [garbage],
        "hostile: half handshakes": [half_handshakes],
        "hostile: recorded handshake": [recorded_handshake],
        "hostile: flood of connections": [flood_of_connections],
        "hostile: wrong secret": [wrong_secret],
        "hostile: proven peer": [proven_peer],
    }
