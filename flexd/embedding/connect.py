"""Connect a collection to the daemon: chunks arrive in its inbox, step reports are sent."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexd.control.agent.agent import Agent
from flexd.control.protocol.handshake import TlsContext, TlsFiles
from flexd.control.protocol.messages import RankIdentity
from flexd.control.protocol.report import (
    IdsReport,
    PhasesReport,
    PlacementState,
    SlowMemoryReport,
    StepReport,
    TrainerSettings,
    TrainingTotals,
    UsedExchange,
)
from flexd.core.errors import ConfigError
from flexd.core.secrets import KeyFile
from flexd.core.usage_warnings import USAGE_WARNINGS
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.rank_rows import RankRows
from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.step import StepMoments
from flexd.embedding.store.store import GroupStore
from flexd.embedding.tap import Tap

logger = logging.getLogger(__name__)

# Share of the deadline of ``Connection.close`` that the tap may use.
_TAP_SHARE = 0.8
SLOW_MEMORY_SECONDS, IDS_SECONDS = 2.0, 5.0
"""Between two reports of slow memory, and of unbounded ids: on an accelerator the host waits for the counts."""
ADDRESS_VARIABLE = "FLEXD_CONTROL"
SECRET_VARIABLE = "FLEXD_SECRET_FILE"
TLS_VARIABLES = ("FLEXD_CONTROL_CERT_FILE", "FLEXD_CONTROL_KEY_FILE", "FLEXD_CONTROL_CA_FILE")
_MAX_RUN_ID_CHARACTERS = 100


class Connection(StepMoments):
    """A running agent that receives a report after every step. Loss of the daemon does not affect the trainer."""

    def __init__(self, collection: EmbeddingCollection, agent: Agent, tap: Tap | None = None) -> None:
        self.agent = agent
        self.tap = tap
        self._collection = collection
        self._steps = self._phase_steps = 0
        self._slow_memory_at = self._ids_at = time.monotonic()
        self._slow_memory = _slow_memory_of(collection.engine.stores)
        self._ids = _use_counts_of(collection.engine)
        collection.phases.drain()
        agent.report(totals=self._totals())
        collection.engine.joined.append(self)
        USAGE_WARNINGS.add_listener(self._report_usage_warning)
        if USAGE_WARNINGS.reports():  # made before there was a connection
            self._report_usage_warning()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Send pending reports and the tap's counts, and stop the agent's thread, within the deadline.

        With a tap it waits, for a part of the deadline, until all ranks have handed over their counts: the daemon
        accepts none once a rank has left.
        """
        deadline = time.monotonic() + timeout_seconds
        if self in self._collection.engine.joined:
            self._collection.engine.joined.remove(self)
        USAGE_WARNINGS.remove_listener(self._report_usage_warning)
        if self.tap is not None:
            if not self.tap.close(timeout_seconds * _TAP_SHARE):
                logger.warning("rank %d: the daemon did not acknowledge all counts of the tap", self._collection.rank)
            groups, until = self._collection.engine.groups, deadline - timeout_seconds * (1 - _TAP_SHARE)
            groups.notices.wait_for_all(
                groups.rank, groups.layout.world_size, f"{self.agent.identity.attempt}/counted", until
            )
        self.agent.stop(deadline - time.monotonic())

    def _report_usage_warning(self) -> None:
        """Report at once: the step of a mistake may not end."""
        self.agent.report(self._report_without_steps())

    def _report_without_steps(self, **parts: Any) -> StepReport:
        collection = self._collection
        return StepReport(
            collection.steps, 0, self._placement(), 0.0, 0.0, (0, 0, 0), exchange=_used_arm(collection.engine),
            usage_warnings=USAGE_WARNINGS.reports(), **parts,
        )  # fmt: skip

    def _placement(self) -> PlacementState:
        return PlacementState(self._collection.placement_version, self._collection.engine.migrator.digest)

    def _totals(self) -> TrainingTotals:
        collection, engine = self._collection, self._collection.engine
        totals = collection.traffic.totals() | {
            "steps": self._steps, "apply_seconds": engine.apply_seconds, "passes": engine.summed_passes,
            "unused_prefetches": engine.unused_batches, "prefetches": engine.prefetched_batches,
        }  # fmt: skip
        return TrainingTotals(
            collection.steps, time.monotonic(), self._placement(), _used_arm(engine), totals, USAGE_WARNINGS.reports()
        )

    def regrouped(self, before: RankRows, after: RankRows) -> bool:
        """Tell the daemon at once which tables are read only now."""
        del before
        self._slow_memory = _slow_memory_of(after.stores)
        self.agent.change_settings(_trainer_settings(self._collection))
        return True

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Give the totals to the agent, which reports what has added up several times per second."""
        del optimizer, step
        self._steps += 1
        self._phase_steps += 1
        # A few times per second: adding phases up in each step would cost more.
        more = None if self.agent.report_waiting else self._report_without_steps(**self._parts())
        self.agent.report(more, self._totals())

    def _parts(self) -> dict[str, Any]:
        """Return what is measured of some steps together: the parts of a report."""
        by_phase, cover_seconds = self._collection.phases.drain()
        parts: dict[str, Any] = {"phases": PhasesReport(by_phase, self._phase_steps, cover_seconds)}
        self._phase_steps, now = 0, time.monotonic()
        if self._slow_memory is not None and now - self._slow_memory_at >= SLOW_MEMORY_SECONDS:
            self._slow_memory_at, parts["slow_memory"] = now, self._slow_memory()
        if self._ids is not None and now - self._ids_at >= IDS_SECONDS:
            self._ids_at, parts["ids"] = now, self._ids()
        return parts


def connect(
    collection: EmbeddingCollection,
    address: str | None = None,
    *,
    job: str,
    attempt: str | None = None,
    secret_file: str | Path | None = None,
    cert_file: str | Path | None = None,
    key_file: str | Path | None = None,
    ca_file: str | Path | None = None,
    timeout_seconds: float = 15.0,
    tap: Tap | None = None,
) -> Connection:
    """Start the agent of this rank. Returns at once, also while no daemon can be reached.

    Args:
        address: "host:port" of the daemon's control channel, resolved again at every reconnect; default from
            ``FLEXD_CONTROL``.
        job: name of the job in the daemon's configuration.
        attempt: name of this launch of the job, equal on all ranks and different for every launch; by default
            rank 0's run id and restart count of torchrun, if there are any, and a random number (collective).
        secret_file: file with the shared secret, read again when it changes; default from ``FLEXD_SECRET_FILE``.
        cert_file: certificate chain of this rank, PEM, for a daemon with ``control.tls``; default from
            ``FLEXD_CONTROL_CERT_FILE``. Without it the connection has no TLS.
        key_file: private key of the certificate; default from ``FLEXD_CONTROL_KEY_FILE``.
        ca_file: CA of the daemon's certificate, which has to be for the host of ``address``; default from
            ``FLEXD_CONTROL_CA_FILE``.
        timeout_seconds: deadline of every wait of the agent's thread.
        tap: counter of the collection's look-ups for a daemon with ``stream.source: {kind: tap}``; started here.

    Raises:
        ConfigError: no address, a tap of another collection, or the secret file or a certificate file cannot be read or
            does not hold what it should.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise ConfigError("no control address", remedy=f"pass address='host:port' or set {ADDRESS_VARIABLE}")
    if tap is not None and tap.collection is not collection:
        raise ConfigError("the tap is of another collection", remedy="make it with flexd.Tap(collection)")
    identity = RankIdentity(
        job=job,
        attempt=attempt or _agreed_attempt(collection.engine.groups, collection.device),
        rank=collection.rank,
        nodes=collection.layout.nodes,
        local_ranks=collection.layout.local_ranks,
        replica_slots=collection.replica_slots,
        table_digest=collection.keyspace.digest,
        trainer=_trainer_settings(collection),
        copies_memory_bytes=collection.copies_memory_bytes,
    )
    secret_file = secret_file or os.environ.get(SECRET_VARIABLE)
    secret = KeyFile(secret_file, "secret file") if secret_file else None
    agent = Agent(
        collection.engine.inbox,
        identity,
        address,
        secret=secret,
        tls=_tls_files(cert_file, key_file, ca_file),
        timeout_seconds=timeout_seconds,
        placement_lists=lambda: collection.engine.migrator.placement(),
        outbox=None if tap is None else tap.outbox,
        tables=collection.keyspace.tables,
    )
    connection = Connection(collection, agent, tap)
    agent.start()
    if tap is not None:
        tap.start()
    return connection


def _trainer_settings(collection: EmbeddingCollection) -> TrainerSettings:
    engine = collection.engine
    places = "".join(
        collection.pooling_at(table.name)[0] if number in engine.pooling_at.pooled else "-"
        for number, table in enumerate(collection.keyspace.tables)
    )
    pooling = places if engine.pooling_at.pooled else ""
    tables = collection.keyspace.tables
    only_read = "".join("r" if table.name in collection.keyspace.read_only else "-" for table in tables)
    unbounded = "".join("u" if table.name in engine.admit_after else "-" for table in tables)
    wire = engine.arm.arms[0].wire or None
    return TrainerSettings(
        collection.given_exchange, wire, pooling, only_read if "r" in only_read else "",
        unbounded if "u" in unbounded else "",
    )  # fmt: skip


def _used_arm(engine: RowEngine) -> UsedExchange:
    """Return what the rank reports of its arm."""
    if engine.step_tuner is not None:
        return engine.step_tuner.used()
    return UsedExchange(engine.arm.exchange, engine.arm.reason or "", str(engine.arm.in_use))


def _slow_memory_of(stores: Sequence[GroupStore]) -> Callable[[], SlowMemoryReport] | None:
    """Return what reports of the slow memory of stores, from now on; None if all rows are fast."""
    if all(store.tier is None for store in stores):
        return None
    from flexd.embedding.store.slow.tiered_storage import slow_memory_report  # loaded where a job has cold rows

    slow_memory_report(stores)
    return partial(slow_memory_report, stores)


def _use_counts_of(engine: RowEngine) -> Callable[[], tuple[IdsReport, ...]] | None:
    """Return what reports of unbounded ids, from now on; None if there are none."""
    if engine.ids is None:
        return None
    from flexd.embedding.ids.use_counts import UseCounts  # loaded where a job has unbounded ids

    return UseCounts(engine.ids)


def _tls_files(*given: str | Path | None) -> TlsFiles | None:
    paths = [path or os.environ.get(name) for path, name in zip(given, TLS_VARIABLES, strict=True)]
    if not any(paths):
        return None
    missing = [name for path, name in zip(paths, TLS_VARIABLES, strict=True) if not path]
    if missing:
        raise ConfigError(
            "TLS needs a certificate, its key and a CA", remedy=f"set {' and '.join(missing)}, or none of them"
        )
    certificate, key, authority = (Path(str(path)) for path in paths)
    files = TlsFiles(certificate, key, authority, named_by="flexd.connect")
    # A file that cannot be used fails here, not in the agent's thread.
    TlsContext(files, server_side=False)
    return files


def _agreed_attempt(groups: ChainGroups, device: torch.device) -> str:
    """Return a name for this launch that no other launch has, equal on all ranks: the one that rank 0 gives it.

    It travels over the training's own group, the only thing that all ranks of a launch share under every launcher:
    torchrun's run id and restart count repeat when a job is requeued, a port may be used again, and ranks that join an
    elastic job count restarts of their own.
    """
    name = os.urandom(7).hex()
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":  # torchrun's value at every launch without --rdzv-id
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"{run[:_MAX_RUN_ID_CHARACTERS]}-{restarts[:10]}-{name}"
    return groups.broadcast(name, device, "flexd.connect()")
