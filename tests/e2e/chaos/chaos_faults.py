"""The faults of a chaos run: each is injected and healed by one function that sees training go on meanwhile."""

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.chaos.chaos_training import TABLES, WORLD
from tests.e2e.chaos.chaos_world import BALLAST, CONTROL_SECONDS, ChaosWorld, TcpCut
from tests.support.api_requests import COMMAND_HEADERS
from tests.support.until import until

STEPS_DURING = 8
"""Steps that training makes during every fault that does not strike the training itself."""
_SECONDS = 60.0

_LINK_SECONDS = (0.5, 1.5 * CONTROL_SECONDS)
"""Shorter than the channel's deadlines, and longer."""
RANKS_STRUCK = frozenset({"rank killed", "ranks upgraded", "daemon ended while a rank hangs"})
"""Kinds that hold up training themselves."""

Injection = Callable[[ChaosWorld, random.Random], str]
"""Injects a fault and heals it; returns what was done exactly. Recovery counts from its return."""


def kill_at(point: str, count: int = 1) -> Injection:
    """The daemon kills itself at a point of its protocols."""

    def inject(world: ChaosWorld, chance: random.Random) -> str:
        reached = _live_until(world, chance, point, count, "kill")
        world.steps_on(STEPS_DURING)
        world.start_daemon()
        return f"{point}:{count}{reached}"

    return inject


def stop_at(point: str, count: int = 1) -> Injection:
    """The daemon stops at a point of its protocols, for less than the channel's deadlines or for more."""

    def inject(world: ChaosWorld, chance: random.Random) -> str:
        reached = _live_until(world, chance, point, count, "stop")
        child = world.daemon
        child.signal(signal.SIGSTOP)
        seconds = chance.choice([0.2, 1.2 * CONTROL_SECONDS])
        train_for(world, seconds)
        child.signal(signal.SIGCONT)
        return f"{point}:{count}{reached} for {seconds:.1f} s"

    return inject


def kill_daemon(world: ChaosWorld, chance: random.Random) -> str:
    time.sleep(chance.uniform(0.0, 1.0))
    world.daemon.kill()
    world.steps_on(STEPS_DURING)
    world.start_daemon()
    return "at a random moment"


def kill_rank(world: ChaosWorld, chance: random.Random) -> str:
    """The job is launched again from its newest checkpoint, as torchrun does."""
    job, victim = world.job, chance.randrange(len(world.job.children))
    job.children[victim].kill()
    for child in job.children:
        child.kill()
    launched = world.launch()
    until(lambda: launched.done >= 3, 60.0, lambda: launched.children[0].tail())
    return f"rank {victim}, on from step {launched.first_step}"


def end_daemon_while_a_rank_hangs(world: ChaosWorld, chance: random.Random) -> str:
    """SIGTERM while the ranks wait for one of them in a collective: no chunk can be agreed before the daemon ends."""
    victim = chance.randrange(len(world.job.children))
    child = world.job.children[victim]
    child.signal(signal.SIGSTOP)
    try:
        time.sleep(chance.uniform(0.1, 0.6))
        began = time.monotonic()
        world.stop_daemon()
        seconds = time.monotonic() - began
    finally:
        child.signal(signal.SIGCONT)
    world.steps_on(STEPS_DURING)
    world.start_daemon()
    return f"rank {victim}, the daemon ended within {seconds:.1f} s"


def _link(how: str, *spans: float) -> Injection:
    def inject(world: ChaosWorld, chance: random.Random) -> str:
        seconds = chance.choice(spans)
        world.link.disconnect() if how == "cut" else world.link.stall()
        train_for(world, seconds)
        world.link.mend()
        return f"for {seconds:.1f} s"

    return inject


def stop_broker(world: ChaosWorld, chance: random.Random) -> str:
    broker = world.broker
    os.kill(broker.pid, signal.SIGSTOP)
    seconds = chance.uniform(0.5, 3.0)
    try:
        train_for(world, seconds)
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    return f"for {seconds:.1f} s"


def kill_broker(world: ChaosWorld, chance: random.Random) -> str:
    """The broker keeps its log in memory and loses it, so counts cannot be checked after this. The accesses of all
    ranks are in the next one.
    """
    world.broker.kill()
    world.steps_on(STEPS_DURING)
    world.broker.start()
    began = time.monotonic()
    until(lambda: world.publishing_ranks() == set(range(WORLD)), 60.0, lambda: f"only {world.publishing_ranks()}")
    return f"with its log; all ranks publish again after {time.monotonic() - began:.1f} s"


def jump_clock(world: ChaosWorld, chance: random.Random) -> str:
    seconds = chance.choice([-1.0, 1.0]) * 10 ** chance.uniform(1, 6)
    world.clock.jump(seconds)
    world.steps_on(3 * STEPS_DURING)
    if chance.random() < 0.5:
        world.clock.jump(0.0)
    return f"by {seconds:+.0f} s"


def fill_disk(world: ChaosWorld, chance: random.Random) -> str:
    """Other files take the state directory's last byte; half the time the daemon is killed and started meanwhile."""
    ballast = world.state / BALLAST
    restart = chance.random() < 0.5
    with ballast.open("wb", buffering=0) as file:
        full_until = time.monotonic() + 2.0
        while time.monotonic() < full_until:
            try:
                file.write(bytes(4096))
            except OSError:
                time.sleep(0.005)
    if restart:
        world.daemon.kill()
        world.start_daemon()
    world.steps_on(3 * STEPS_DURING)
    ballast.unlink()
    if world.daemon is None or not world.daemon.alive:
        world.start_daemon()
    return "with a restart" if restart else ""


def truncate(what: str) -> Injection:
    """The newest file is cut off anywhere while the daemon is dead."""

    def inject(world: ChaosWorld, chance: random.Random) -> str:
        world.daemon.kill()
        path = _newest(world, what)
        length = 0
        if path is not None:
            length = chance.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.truncate(length)
        world.steps_on(STEPS_DURING)
        world.start_daemon()
        return "there was none" if path is None else f"{path.name} at {length} bytes"

    return inject


def two_daemons(world: ChaosWorld, chance: random.Random) -> str:
    """A second one on the same state directory, or on the same ports, does not come up; the first does not notice."""
    first = world.daemon
    same_state = chance.random() < 0.5
    other = {} if same_state else {"FLEXD__STATE__DIR": str(world.directory / "other-state")}
    second = world.start_daemon("", **other)
    world.daemon = first
    try:
        second.wait(60.0)
    finally:
        second.kill()
    assert second.exit_code not in (0, None), second.tail()
    assert first.alive
    return "same state directory" if same_state else "same ports"


def _messages(how: str) -> Injection:
    def inject(world: ChaosWorld, chance: random.Random) -> str:
        vandal = Vandal(world.link, world.control_port, chance)
        vandal.listen()
        deadline = time.monotonic() + 10.0
        while vandal.heard < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        world.steps_on(2)
        try:
            getattr(vandal, how)()
            world.steps_on(STEPS_DURING)
        finally:
            vandal.leave()
        return f"{vandal.heard} segments"

    return inject


AT_A_POINT = {"daemon killed at a point": kill_at, "daemon stopped at a point": stop_at}


def kinds(*, disk: bool) -> dict[str, list[Injection]]:
    """Every fault there is in such a world, by kind; ``kill_broker`` apart, after which counts mean nothing, and those
    of ``AT_A_POINT``, of which there is one a point.
    """
    found: dict[str, list[Injection]] = {
        "daemon killed": [kill_daemon],
        "daemon killed in a rollback": [kill_in_a_rollback],
        "daemon ended while a rank hangs": [end_daemon_while_a_rank_hangs],
        "rank killed": [kill_rank],
        "control link cut": [_link("cut", *_LINK_SECONDS)],
        "control link stalled": [_link("stall", *_LINK_SECONDS)],
        "broker stopped": [stop_broker],
        "clock jump": [jump_clock],
        "snapshot truncated": [truncate("snapshot")],
        "journal truncated": [truncate("journal")],
        "two daemons": [two_daemons],
        "messages duplicated": [_messages("duplicate")],
        "messages reordered": [_messages("reorder")],
        "messages replayed": [_messages("replay")],
        "messages forged": [_messages("forge"), _messages("rubbish")],
    }
    if disk:
        found["disk full"] = [fill_disk]
    return found


LONG: dict[str, Injection] = {
    "control link cut for a minute": _link("cut", 60.0),
    "control link stalled for a minute": _link("stall", 60.0),
}
"""Once a world is enough."""


def _live_until(world: ChaosWorld, chance: random.Random, point: str, count: int, action: str) -> str:
    """A life of the daemon that ends (or stops) at the point; what to add if it never got there."""
    world.daemon.kill()
    if point.startswith("journal.be") or point == "journal.renamed":
        # A whole placement is written once, for ranks that the journal does not know.
        count = 1
        journal = _newest(world, "journal")
        if journal is not None:
            journal.unlink()
    child = world.start_daemon(f"{point}:{count}:{action}")
    if point.startswith("epoch."):
        for _ in range(count if point.startswith("epoch.end") else count - 1):
            # An epoch ends when ranks are lost, and another begins.
            with contextlib.suppress(AssertionError):
                until(lambda: world.ready() or not child.alive or child.stopped, _SECONDS)
            if not child.alive or child.stopped:
                break
            world.link.disconnect()
            time.sleep(CONTROL_SECONDS / 2)
            world.link.mend()
            time.sleep(CONTROL_SECONDS / 2)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        assert child.exit_code is None, f"the daemon has ended:\n{child.tail()}"
        if not child.alive if action == "kill" else child.stopped:
            return ""
        time.sleep(0.01)
    child.kill()
    if action != "kill":
        # Armed, it would stop later, when nobody resumes it.
        world.start_daemon()
    return " (not reached)"


def train_for(world: ChaosWorld, seconds: float) -> None:
    """Shows that steps are made all the time."""
    until_ = time.monotonic() + seconds
    world.steps_on(STEPS_DURING)
    while time.monotonic() < until_:
        world.steps_on(2)


def _newest(world: ChaosWorld, what: str) -> Path | None:
    pattern = "snapshots/snapshot-*.flexd" if what == "snapshot" else "placement/placement.journal"
    found = sorted(path for path in world.state.glob(pattern) if path.stat().st_size > 0)
    # A daemon whose only snapshot is damaged does not start, which is another test's subject.
    return found[-1] if len(found) > (what == "snapshot") else None


_ROWS_A_CHUNK = 4
_SLOWLY = {
    "FLEXD__PLANNER__INTERVAL_SECONDS": "3600",
    "FLEXD__CONTROL__CHUNK_ROWS": str(_ROWS_A_CHUNK),
    "FLEXD__CONTROL__THROTTLE__BYTES_PER_SECOND": "300",
}
"""One plan in a life, of which four or five rows per second are copied: it is met in the middle."""
_PINNED_ROWS = 60


def kill_in_a_rollback(world: ChaosWorld, chance: random.Random) -> str:
    """Abort with a rollback; the daemon is killed before the rollback begins, the next one in the middle of its second
    chunk. The third continues until the ranks have their former placement, and its history has every attempt.
    """
    world.daemon.kill()
    # Whatever is popular just now, this is something to migrate.
    pin = {"table": "item", "tier": "DEVICE", "rows": chance.sample(range(TABLES["item"][0]), _PINNED_ROWS)}
    slowly = {**_SLOWLY, "FLEXD__PLANNER__PINS": json.dumps([pin])}
    # When what is taken back has ended, or when its rollback has started.
    point = chance.choice(["migration.finished:1", "migration.started:2"])
    first = world.start_daemon(f"{point}:kill", **slowly)
    stopped = dict(until(lambda: _in_the_middle(world), _SECONDS, world.where))
    before = _digest_at(world, stopped["base_version"])
    with contextlib.suppress(httpx.TransportError):
        # The answer may be lost with the daemon; the request is not: both points lie behind its being written down.
        body = {"rollback": True, "wait_seconds": 0}
        httpx.post(f"{world.url}/v1/abort", json=body, headers=COMMAND_HEADERS, timeout=10.0).raise_for_status()
    until(lambda: not first.alive, _SECONDS, world.where)
    world.steps_on(STEPS_DURING)
    second = world.start_daemon("chunk.half_sent:2:kill", **slowly)
    until(lambda: not second.alive, _SECONDS, world.where)
    assert _newest_digest(world) != before
    world.steps_on(STEPS_DURING)
    third = world.start_daemon(**slowly)
    until(lambda: world.ready() and _newest_digest(world) == before, _SECONDS, world.where)
    rollback = f"{stopped['migration_id']}.rollback"
    told = until(lambda: _committed(world), _SECONDS, world.where)
    tries = [(each["migration_id"], each["state"]) for each in told if each["migration_id"].startswith(rollback)]
    assert tries[0][1] == "committed", tries
    # The history is written behind: of a try that died at once it knows nothing.
    assert all(state == "failed" for _, state in tries[1:]), tries
    assert tries[0][0] != rollback, "the id of the second daemon's"
    third.kill()
    world.start_daemon()
    return f"{point}, {len(tries)} tries"


def _in_the_middle(world: ChaosWorld) -> dict[str, Any] | None:
    migration = world.status().get("migration") or {}
    # So many that the rollback has more than two chunks.
    return migration if migration.get("state") == "pushing" and migration["chunks_applied"] >= 5 else None


def _committed(world: ChaosWorld) -> list[dict[str, Any]]:
    """The history, once the newest migration is at its end."""
    found = httpx.get(f"{world.url}/v1/migrations", timeout=10.0).json()["migrations"]
    return list(found) if found[0]["state"] == "committed" else []


def _digest_at(world: ChaosWorld, version: int) -> int:
    """Return the digest of the placement that the ranks had at a version."""
    world.job.follow()
    return next(step.digest for step in reversed(world.job.steps[0]) if step.version == version)


def _newest_digest(world: ChaosWorld) -> int:
    world.job.follow()
    return world.job.steps[0][-1].digest


_KEPT_BYTES = 2**20
_SEGMENTS = 6
"""Segments that are changed before the link is honest again."""


class Vandal:
    """Changes what passes a link. ``listen`` first, then one of the others, then ``leave``."""

    def __init__(self, link: TcpCut, port: int, chance: random.Random) -> None:
        self._link = link
        self._port = port
        self._chance = chance
        self._kept: deque[bytes] = deque()
        self._left = 0
        self.heard = 0

    def listen(self) -> None:
        """Keep what ranks and daemon send each other, while it passes."""
        self._link.tamper = self._keep

    def leave(self) -> None:
        self._link.tamper = None

    def duplicate(self) -> None:
        """Some segments arrive three times."""
        self._change(lambda data: 3 * data)

    def reorder(self) -> None:
        """The halves of some segments are exchanged."""
        self._change(lambda data: data[len(data) // 2 :] + data[: len(data) // 2])

    def forge(self) -> None:
        """One bit of some segments is changed."""

        def flip(data: bytes) -> bytes:
            at = self._chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

        self._change(flip)

    def replay(self) -> None:
        """Send what was heard to the daemon again, on connections of its own, and into those of the ranks."""
        kept = list(self._kept)
        for _ in range(4):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5.0) as raw:
                for data in kept:
                    raw.sendall(data)
        self._change(lambda data: self._chance.choice(kept) if kept else data)

    def rubbish(self) -> None:
        """Connections that send what is no message at all."""
        for text in (b"", b"{}", b"[" * 5000, b"\x00\xff" * 100, b'{"kind":"hello"}', b"FLEXD\r\n" + bytes(300)):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5.0) as raw:
                raw.sendall(text)

    def _keep(self, data: bytes) -> bytes:
        self.heard += 1
        self._kept.append(data)
        while sum(map(len, self._kept)) > _KEPT_BYTES:
            self._kept.popleft()
        return data

    def _change(self, change: Callable[[bytes], bytes]) -> None:
        self._left = _SEGMENTS

        def tamper(data: bytes) -> bytes:
            self._left -= 1
            return change(data) if self._left >= 0 else data

        self._link.tamper = tamper
