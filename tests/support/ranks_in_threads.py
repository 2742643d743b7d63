"""Ranks of one job inside this process: real agents and inboxes, and one training loop that exchanges for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flexd.control.agent.agent import Agent
from flexd.control.agent.inbox import ChunkInbox, Prepare, Prepared
from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.membership import Topology
from flexd.control.daemon.migration import Migration, MigrationRecord, MigrationState
from flexd.control.protocol.handshake import TlsFiles
from flexd.control.protocol.messages import Hello, RankIdentity
from flexd.control.protocol.report import PlacementState, SentBytes, StepReport
from flexd.core.keyspace import Homes, KeySpace, TableSpec
from flexd.core.placement import Delta, Placement, RankLayout, Tier
from flexd.core.secrets import Secret

TABLES = KeySpace([TableSpec("item", 50_000, 8), TableSpec("shop", 1_000, 16)])
SECRET = b"a secret for the tests"


def target(seed: int, rows: int = 600, version: int = 0) -> Placement:
    """Return a random placement with rows at both tiers above HOME."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(TABLES.total_rows, size=rows, replace=False).astype(np.int64)
    return Placement.of(keys, rng.integers(1, 3, size=rows).astype(np.uint8), version)


def identity(rank: int, layout: RankLayout, attempt: str = "a1", slots: int = 20_000) -> RankIdentity:
    return RankIdentity("job", attempt, rank, layout.nodes, layout.local_ranks, (slots, slots), TABLES.digest)


def migrate(
    coordinator: Coordinator, name: str, planned: Placement, rows: int = 4096, generation: int | None = None
) -> Migration:
    """Start a migration in chunks of ``rows``."""
    coordinator.limit_chunks(rows, 2**30)
    return coordinator.migrate(MigrationRecord(migration_id=name, plan_id=name, generation=generation), planned)


def topology_of(layout: RankLayout, slots: int = 20_000) -> Topology:
    """Return the registered ranks of a job."""
    placement = PlacementState(0, 0)
    return Topology(tuple(
        Hello(identity(rank, layout, slots=slots), "i", f"s{rank}", f"n{rank}", placement)
        for rank in range(layout.world_size)
    ))  # fmt: skip


def no_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return the list of a rank without rows above HOME."""
    return np.empty(0, np.int64), np.empty(0, np.uint8)


@dataclass(frozen=True)
class Made:
    """A prepared chunk of any content."""

    nbytes: int = 1


def prepare_nothing(delta: Delta, after: Prepared | None) -> Made:
    """Prepare a chunk for a rank that has no rows to copy."""
    return Made()


@dataclass
class _Rank:
    inbox: ChunkInbox
    agent: Agent
    placement: Placement


class Ranks:
    """W ranks that step together until ``stop``.

    Args:
        port: port of the daemon, or addresses.
        prepare_of_rank: makes the prepared chunks of a rank; those of the other ranks are empty.
    """

    def __init__(
        self,
        port: int | str,
        layout: RankLayout | None = None,
        attempt: str = "a1",
        secret: Secret = SECRET,
        timeout_seconds: float = 4.0,
        identities: Callable[[RankIdentity], RankIdentity] = lambda it: it,
        tables: KeySpace = TABLES,
        prepare_of_rank: dict[int, Prepare] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.layout = layout or RankLayout(2, 2)
        self.steps = 0
        self.history: list[list[tuple[int, bytes]]] = [[] for _ in range(self.layout.world_size)]
        """(version, content) of each chunk that a rank applied, by rank."""
        self.ranks: list[_Rank] = []
        for rank in range(self.layout.world_size):
            who = identities(identity(rank, self.layout, attempt))
            state = _Rank(None, None, Placement.empty())  # type: ignore[arg-type]
            state.inbox = ChunkInbox(
                Homes(TABLES, self.layout),
                rank,
                who.replica_slots,
                lambda keys, tiers, state=state: state.placement.tiers_of(keys) == tiers,
                (prepare_of_rank or {}).get(rank, prepare_nothing),
            )
            state.agent = Agent(
                state.inbox, who, port if isinstance(port, str) else f"127.0.0.1:{port}", secret=secret,
                timeout_seconds=timeout_seconds, tls=tls, tables=tables.tables,
                placement_lists=lambda state=state, rank=rank: self._listed(state, rank),
            )  # fmt: skip
            self.ranks.append(state)
        self.false_digests: dict[int, int] = {}
        """By rank: the digest that it reports instead of that of its placement."""
        self._stop = threading.Event()
        self.moving = threading.Event()
        self.moving.set()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Ranks:
        for rank in self.ranks:
            rank.agent.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for rank in self.ranks:
            rank.agent.stopping.set()
            rank.agent.wake()
        self._stop.set()
        self.moving.set()
        self._thread.join(10)
        for rank in self.ranks:
            rank.agent.stop(10)

    @property
    def placements(self) -> list[Placement]:
        return [rank.placement for rank in self.ranks]

    def all_at(self, planned: Placement) -> bool:
        return all(p.digest() == planned.digest() and len(p) == len(planned) for p in self.placements)

    def state(self) -> str:
        return "; ".join(f"{rank.agent.state} {rank.agent.counters}" for rank in self.ranks)

    def _listed(self, state: _Rank, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that the embedding lists: DEVICE rows, and NODE rows of this rank's rail."""
        keys, tiers = state.placement.keys, state.placement.tiers
        listed = (tiers == Tier.DEVICE) | (keys % self.layout.local_ranks == self.layout.local_rank_of(rank))
        return keys[listed], tiers[listed]

    def _train(self) -> None:
        while not self._stop.is_set():
            self.moving.wait()
            announced = [rank.inbox.begin_exchange() for rank in self.ranks]
            for rank in self.ranks:
                rank.inbox.end_exchange(min(announced))
            for number, rank in enumerate(self.ranks):
                for version, delta, _ in rank.inbox.poll_agreed(4096, lambda delta: 8 * len(delta)):
                    rank.placement = rank.placement.apply(delta)
                    assert rank.placement.version == version
                    self.history[number].append((version, delta.keys.tobytes() + delta.new_tiers.tobytes()))
                    rank.inbox.applied(version)
            self.steps += 1
            for number, rank in enumerate(self.ranks):
                report = step_report(self.steps, rank.placement)
                digest = self.false_digests.get(number, report.placement.digest)
                rank.agent.report(replace(report, placement=replace(report.placement, digest=digest)))
            time.sleep(0.002)


def step_report(step: int, placement: Placement) -> StepReport:
    return StepReport(
        step, 1, PlacementState(placement.version, placement.digest()), 0.002, 0.0, (3, 2, 1),
        SentBytes(10, 20, 1, 2),
    )  # fmt: skip


def same_content(history: list[list[tuple[int, bytes]]]) -> bool:
    """Return whether all ranks applied the same content for every version that more than one has applied."""
    merged: dict[int, bytes] = {}
    return all(merged.setdefault(version, content) == content for rank in history for version, content in rank)


def committed(coordinator: Coordinator, ranks: Ranks, name: str, planned: Placement, rows: int) -> None:
    """Migrate in chunks of ``rows``, and check that every rank has the placement."""
    migration = migrate(coordinator, name, planned, rows)
    assert migration.wait(30) is MigrationState.COMMITTED, (migration.record, ranks.state())
    assert ranks.all_at(planned)
