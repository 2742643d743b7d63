"""Build a leader or a follower from the configuration."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flexd.api.families import with_zeros
from flexd.config.base import split_address
from flexd.config.model import Config
from flexd.config.stream import KafkaSource
from flexd.core.errors import StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.core.secrets import KeyFile
from flexd.core.supervision import Supervisor
from flexd.daemon import factory
from flexd.daemon.state_files import NEWER
from flexd.ingest import Ingestor, IngestStats
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.scaleout.delta_sender import FAILURE_REASONS, DeltaSender, Link
from flexd.scaleout.follower import Follower, FollowerOptions, FollowerStats
from flexd.scaleout.follower_registry import REASONS, FollowerRegistry, FollowerReport
from flexd.scaleout.leader import Leader, LeaderWithoutTables
from flexd.scaleout.ledger import Ledger
from flexd.scaleout.tables_request import TablesRequest, tables_of_refusal
from flexd.scaleout.transport import HttpLink, LocalLink, listener
from flexd.server.http import HttpListener
from flexd.stream.offsets_in_work import RECORD_NAME, OffsetsInWork

logger = logging.getLogger("flexd")

OWN_NAME = "leader"
"""Name of the group member that runs inside the leader."""


def scale_out_secret(config: Config) -> KeyFile | None:
    """Raises ConfigError if the file cannot be read or holds no keys."""
    path = config.scale_out.secret_file
    return None if path is None else KeyFile(path, "scale_out.secret_file")


def dead_letters(config: Config) -> DeadLetterFile:
    letters = config.stream.dead_letters
    path = letters.path or config.state.dir / "dead-letters.jsonl"
    return DeadLetterFile(path, letters.max_bytes, letters.max_message_bytes)


def _offsets_in_work(directory: Path) -> OffsetsInWork:
    """Return the offsets in work. A follower has no other state, so a record of a newer flexd does not stop it."""
    try:
        return OffsetsInWork(directory)
    except StateVersionError as error:
        logger.warning("%s: it is kept as %s%s", error, RECORD_NAME, NEWER)
        (directory / RECORD_NAME).replace(directory / f"{RECORD_NAME}{NEWER}")
        return OffsetsInWork(directory)


class FollowerUnit:
    """Read partitions and send their counts to a leader.

    Args:
        link: connection to it; owned from now on.

    Raises:
        FlexdError: the source or the counters cannot be built.
    """

    def __init__(self, config: Config, link: Link, name: str, supervisor: Supervisor) -> None:
        settings = config.scale_out
        self._sender = DeltaSender(link, supervisor)
        work = _offsets_in_work(config.state.dir)
        self._follower = Follower(
            FollowerOptions(
                name=name,
                session=secrets.token_hex(8),
                job=config.job,
                tables=config.keyspace().digest,
                push_interval_seconds=settings.push_interval_seconds,
                max_unacknowledged_messages=settings.max_unacknowledged_messages,
                max_unacknowledged_seconds=settings.max_unacknowledged_seconds,
                settle_seconds=settings.settle_seconds,
            ),
            lambda follower: factory.make_source(config, work, follower),
            self._sender,
            grouped=isinstance(config.stream.source, KafkaSource),
        )
        self.ingestor = Ingestor(
            self._follower,
            config.keyspace().tables,
            factory.sketch_settings(config),
            None,
            dead_letters=dead_letters(config),
            poll_seconds=config.stream.poll_seconds,
            max_message_bytes=config.stream.max_message_bytes,
            supervisor=supervisor,
            thread="flexd-reader" if name == OWN_NAME else "flexd-ingest",
            work=work,
        )
        self._follower.attach(self.ingestor)

    def start(self) -> None:
        self._sender.start()
        self.ingestor.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the ingest first, which sends its last counts. Return True if both threads ended."""
        ended = self.ingestor.stop(timeout_seconds)
        return self._sender.stop(1.0) and ended

    def discard(self, timeout_seconds: float) -> bool:
        """Stop without sending the last counts, which the leader would refuse; they are read again from its positions.

        Return True if both threads ended. May be called again if not.
        """
        sent = self._sender.stop(1.0)
        return self.ingestor.stop(timeout_seconds) and sent

    def leader_tables(self) -> tuple[TableSpec, ...]:
        """Return the leader's tables if it refuses the counts because it has others; else none."""
        return tables_of_refusal(self._sender.refusal)

    def stats(self) -> FollowerStats:
        stats = self._follower.stats()
        return replace(stats, failures=with_zeros(FAILURE_REASONS, stats.failures))


class LeaderUnit:
    """Own the ledger (the ``Source`` of the daemon's ingest), the listener, and the leader's own reader if it has one.

    Raises:
        FlexdError: a component cannot be built.
    """

    def __init__(self, config: Config, supervisor: Supervisor) -> None:
        settings = config.scale_out
        self._followers = FollowerRegistry(settings.follower_timeout_seconds)
        self.ledger = Ledger(self._followers)
        self._leader = Leader(
            config.job, config.keyspace(), factory.sketch_settings(config), self.ledger, self._followers
        )
        self._listener = listener(
            self._leader, scale_out_secret(config), settings.listen_host, settings.listen_port, supervisor
        )
        own = LocalLink(self._leader) if settings.read_partitions else None
        self._own = None if own is None else FollowerUnit(config, own, OWN_NAME, supervisor)
        if self._own is not None:
            self._followers.set_local_reader(self._own.ingestor)

    @property
    def port(self) -> int:
        """Return the port of the listener."""
        return self._listener.port

    def attach(self, ingestor: Ingestor) -> None:
        """Set the ingest whose source is the ledger, before it starts."""
        self._leader.serve(ingestor)

    def start(self) -> None:
        """Start after the ingest. Raises ApiError if the address is taken."""
        self._listener.start()
        if self._own is not None:
            self._own.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop before the ingest, so that its last snapshot holds the last deltas."""
        ended = True if self._own is None else self._own.stop(timeout_seconds / 2)
        return self._listener.stop(timeout_seconds / 2) and ended

    def own_stats(self) -> IngestStats | None:
        """Return the counters of the leader's own reader; None if it has none."""
        return None if self._own is None else self._own.ingestor.stats()

    def followers(self) -> tuple[FollowerReport, ...]:
        return self._followers.reports()

    def refused(self) -> dict[str, int]:
        return with_zeros(REASONS, self._followers.refused())


def remote_follower(config: Config, supervisor: Supervisor) -> FollowerUnit:
    """Build the unit of ``scale_out.role: follower``.

    Raises:
        FlexdError: a component cannot be built.
    """
    return FollowerUnit(config, _link_to_leader(config), _follower_name(config), supervisor)


def tables_request(config: Config, supervisor: Supervisor) -> TablesRequest:
    """Build the request of a follower whose configuration lists no tables.

    Raises:
        FlexdError: a component cannot be built.
    """
    session = secrets.token_hex(8)
    return TablesRequest(_link_to_leader(config), _follower_name(config), session, config.job, supervisor)


def listener_without_tables(config: Config, supervisor: Supervisor, reason: Callable[[], str]) -> HttpListener:
    """Build the listener of a leader that has no tables yet.

    Args:
        reason: returns what is missing, in words.

    Raises:
        FlexdError: a component cannot be built.
    """
    settings = config.scale_out
    leader = LeaderWithoutTables(factory.sketch_settings(config), reason)
    return listener(leader, scale_out_secret(config), settings.listen_host, settings.listen_port, supervisor)


def _link_to_leader(config: Config) -> HttpLink:
    host, port = split_address(config.scale_out.leader or "")
    return HttpLink(host, port, scale_out_secret(config))


def _follower_name(config: Config) -> str:
    return config.scale_out.name or _host_name()


def _host_name() -> str:
    allowed = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return allowed.lstrip("._-")[:128] or "follower"
