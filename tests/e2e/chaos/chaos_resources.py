"""Maxima of what the processes of a run use: memory, threads, descriptors, disk, and bytes queued for ranks."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path

import httpx

from flexd.control.daemon.channel_events import ChannelOptions
from tests.e2e.chaos.chaos_world import BALLAST, ChaosWorld

_SECONDS = 0.5
_EVERY = 4
"""Samples between two looks at disk and metrics."""
_QUEUED = ("flexd_control_queued_bytes", "flexd_control_unread_bytes")
MIB = 2**20


@dataclass
class Maxima:
    """The largest values seen. Memory is resident, of one process, with the pages that all of them share.

    Attributes:
        disk_bytes: of the state directory.
        queued_bytes: waiting in the daemon's memory, to be sent to ranks or received from them; -1: not measured.
    """

    daemon_bytes: int = 0
    daemon_threads: int = 0
    daemon_descriptors: int = 0
    rank_bytes: int = 0
    rank_threads: int = 0
    rank_descriptors: int = 0
    disk_bytes: int = 0
    queued_bytes: int = -1

    def raise_to(self, **values: int) -> None:
        for name, value in values.items():
            setattr(self, name, max(getattr(self, name), value))

    def merge(self, other: Maxima) -> None:
        self.raise_to(**{item.name: getattr(other, item.name) for item in fields(other)})


LIMITS = Maxima(
    daemon_bytes=1024 * MIB, daemon_threads=64, daemon_descriptors=ChannelOptions().max_unproven + 256,
    rank_bytes=768 * MIB, rank_threads=48, rank_descriptors=256,
    disk_bytes=8 * MIB, queued_bytes=320 * MIB,
)  # fmt: skip
"""Most of a process is its libraries, some 300 MiB; floods may add what docs/security.md states."""


class ResourceSampler:
    """Looks at the processes of a world until it is closed, in a thread of its own."""

    def __init__(self, world: ChaosWorld) -> None:
        self.maxima = Maxima()
        self._world = world
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        turn = 0
        while not self._done.wait(_SECONDS):
            turn += 1
            self._processes()
            if turn % _EVERY == 0:
                self.maxima.raise_to(disk_bytes=_disk_bytes(self._world.state), queued_bytes=self._queued_bytes())

    def _processes(self) -> None:
        world = self._world
        if world.daemon is not None and (used := _used(world.daemon.pid)) is not None:
            memory, threads, descriptors = used
            self.maxima.raise_to(daemon_bytes=memory, daemon_threads=threads, daemon_descriptors=descriptors)
        for child in world.job.children if world.attempts else ():
            if (used := _used(child.pid)) is not None:
                memory, threads, descriptors = used
                self.maxima.raise_to(rank_bytes=memory, rank_threads=threads, rank_descriptors=descriptors)

    def _queued_bytes(self) -> int:
        try:
            page = httpx.get(f"{self._world.url}/metrics", timeout=1.0, verify=False).text
        except httpx.HTTPError:
            return -1
        return queued_bytes(page)


def queued_bytes(page: str) -> int:
    """Return the bytes that wait, of a page of metrics; -1 if one of the metrics is missing."""
    found = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith(_QUEUED)}
    return int(sum(found.values())) if len(found) == len(_QUEUED) else -1


def is_within_limit(maxima: Maxima, name: str) -> bool:
    """Return whether a maximum was measured and is within its limit."""
    return 0 <= getattr(maxima, name) <= getattr(LIMITS, name)


def _used(pid: int) -> tuple[int, int, int] | None:
    """Return (resident bytes, threads, descriptors); None of a process that has ended."""
    process = Path("/proc") / str(pid)
    try:
        facts = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory = int(facts["VmRSS"].split()[0]) * 1024
        return memory, int(facts["Threads"]), len(os.listdir(process / "fd"))
    except (OSError, KeyError):
        return None


def _disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and path.name != BALLAST else 0
        except OSError:
            continue
    return total


def resource_table(maxima: Maxima) -> str:
    """As Markdown."""
    rows = [
        "| largest | seen | limit of the run |",
        "|---|---|---|",
    ]
    for item in fields(maxima):
        seen, limit = getattr(maxima, item.name), getattr(LIMITS, item.name)
        name = item.name.replace("_bytes", ", MiB").replace("_", " ")
        if seen < 0:
            rows.append(f"| {name} | not measured | {limit / MIB:.0f} |")
        elif item.name.endswith("_bytes"):
            rows.append(f"| {name} | {seen / MIB:.1f} | {limit / MIB:.0f} |")
        else:
            rows.append(f"| {name} | {seen} | {limit} |")
    return "\n".join(rows)
