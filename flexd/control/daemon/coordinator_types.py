"""Options and status of the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexd.control.daemon.membership import RankPresence, RefusedRank
from flexd.control.daemon.pusher import ChunkLimits
from flexd.control.protocol.credentials import TlsFiles
from flexd.control.protocol.report import TrainerSettings
from flexd.core.layout import RankLayout
from flexd.core.secrets import Secret


@dataclass(frozen=True)
class ControlOptions:
    """Options of the coordinator.

    Attributes:
        listen_port: 0 binds a free port (see ``Coordinator.port``).
        secret: the shared secret, or its file (read again when it changes); None on loopback only.
        timeout_seconds: deadline of every wait on the channel, and the silence after which a rank is lost.
        tls: certificates of the daemon; ranks then need certificates of the same authority.
        tick_seconds: longest time between two ticks while ranks are registered.
        max_ranks: of a job; also the largest number of connections that have proven themselves.
        takes_tables: the tables are those of the ranks, not of the configuration: ranks that have others may propose
            theirs (``Coordinator.proposed_tables``).
    """

    job: str
    listen_host: str = "127.0.0.1"
    listen_port: int = 29_400
    secret: Secret = None
    tls: TlsFiles | None = None
    timeout_seconds: float = 15.0
    chunks: ChunkLimits = field(default_factory=ChunkLimits)
    tick_seconds: float = 0.02
    max_ranks: int = 4096
    takes_tables: bool = False


@dataclass(frozen=True)
class LiveTopology:
    """The ranks as they are now.

    Attributes:
        generation: counts the changes of the set of rank processes; a plan names the one it was made for.
        replica_slots: slots that every rank has (the minimum over ranks), for each dim-group.
        ready: whether chunks can be pushed.
        reason: why no chunk can be pushed; empty if ``ready``.
        trainer: how the trainer constructed its collections; None if it does not say.
    """

    generation: int
    attempt: str
    layout: RankLayout
    replica_slots: tuple[int, ...]
    ready: bool
    reason: str
    trainer: TrainerSettings | None = None


@dataclass(frozen=True)
class ControlStatus:
    """The channel at one moment, for users and metrics. Counters are since the start.

    Attributes:
        presence: registered ranks of the newest attempt, or, when none is, all of the last complete attempt as missing.
        reason: what the coordinator waits for; empty when all ranks are live.
        attempts_waiting: attempts that are refused because another one holds the job.
        refused_ranks: ranks that were refused lately, newest first, with the reason.
        refused_messages: number by kind, see ``rank_channels.REFUSED_KINDS``.
        malformed_reports: number of refused step reports by the field that was not in order.
        illegal_transitions: transitions of migrations that their state table refused: a fault of flexd.
    """

    epochs: int
    generation: int
    presence: RankPresence
    reason: str
    attempts_waiting: int = 0
    refused_ranks: tuple[RefusedRank, ...] = ()
    refused_messages: Mapping[str, int] = field(default_factory=dict)
    malformed_reports: Mapping[str, int] = field(default_factory=dict)
    refused_chunks: int = 0
    digest_mismatches: int = 0
    illegal_transitions: int = 0
