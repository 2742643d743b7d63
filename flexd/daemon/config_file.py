"""The configuration file of a running daemon, its reload, tables that come from the ranks, and what is made from it for
the daemon's parts.

A daemon whose configuration lists no tables takes them from the ranks and writes them to ``state.sqlite``, so that it
starts again without ranks.
"""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexd.api.status import ConfigStatus, KeyChange, ReloadReport
from flexd.config.base import describe_faults
from flexd.config.model import Config, Merged, TableConfig, check_tables, load_config, merge
from flexd.config.sections import FileLogSourceConfig, FileSourceConfig, KafkaSourceConfig, TapSourceConfig
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.membership import ProposedTables
from flexd.control.daemon.pusher import ChunkLimits
from flexd.control.protocol.handshake import TlsContext, TlsFiles
from flexd.core.errors import ConfigError, FlexdError, SnapshotError
from flexd.core.keyspace import TableSpec, table_from_document
from flexd.core.secrets import KeyFile
from flexd.core.supervision import set_up_logging
from flexd.operations.decisions import NAME, StateDatabase
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.types import Decoder, OffsetsInWork, Source


def make_source(config: Config, work: OffsetsInWork | None = None) -> Source:
    """Return the stream source. Does not contact a broker yet.

    Args:
        work: records what the source reads.

    Raises:
        ConfigError: a client option file cannot be read.
        StreamError: the options are not usable together.
    """
    source = config.stream.source
    if isinstance(source, FileLogSourceConfig):
        from flexd.stream.file_log.log import FileLogSource

        return FileLogSource(source.path)
    if isinstance(source, KafkaSourceConfig):
        from flexd.stream.kafka.source import KafkaSource

        return KafkaSource(source, job=config.job, work=work)
    if isinstance(source, TapSourceConfig):
        from flexd.stream.tap_source import TapSource

        return TapSource()
    if isinstance(source, FileSourceConfig):
        from flexd.stream.file_source import FileSource

        mapping = config.stream.mapping
        return FileSource(source.path, is_base64=mapping is not None and mapping.format in ("avro", "protobuf"))
    from flexd.stream.synthetic import SyntheticSource

    return SyntheticSource([(table.name, table.rows) for table in config.tables], source)


def make_decoder(config: Config) -> Decoder | None:
    """Return the decoder of ``stream.mapping``; None without one.

    Raises:
        ConfigError: a file that it names cannot be used, or a package is not installed.
    """
    if config.stream.mapping is None:
        return None
    from flexd.stream.mapping import EventMapping

    return EventMapping(config.stream.mapping, config.stream.max_message_bytes)


def sketch_settings(config: Config) -> SketchSettings:
    sketch, source = config.sketch, config.stream.source
    return SketchSettings(
        memory_bytes=sketch.memory_bytes,
        half_life_seconds=sketch.half_life_seconds,
        max_future_seconds=sketch.max_future_seconds,
        max_hot_rows=sketch.max_hot_rows,
        coaccess_memory_bytes=sketch.coaccess_memory_bytes,
        share=source.share if isinstance(source, KafkaSourceConfig) else 1.0,
    )


def control_options(config: Config) -> ControlOptions:
    """Return the control channel's options.

    Raises:
        ConfigError: the secret file or a certificate file cannot be read, or does not hold what it should.
    """
    control = config.control
    secret_file, given, tls = control.secret_file, control.tls, None
    if given.cert_file is not None and given.key_file is not None and given.ca_file is not None:
        tls = TlsFiles(given.cert_file, given.key_file, given.ca_file)
        # An error before anything is started.
        TlsContext(tls, server_side=True)
    return ControlOptions(
        job=config.job,
        listen_host=control.listen_host,
        listen_port=control.listen_port,
        secret=None if secret_file is None else KeyFile(secret_file, "control.secret_file"),
        tls=tls,
        timeout_seconds=control.timeout_seconds,
        chunks=ChunkLimits(rows=control.chunk_rows, bytes=control.chunk_bytes),
    )


logger = logging.getLogger("flexd")

_DOCUMENT = "tables"


def save_tables(state: StateDatabase, proposed: ProposedTables) -> None:
    """Replace the tables of the state, durably. Raises SnapshotError: they cannot be written."""
    tables = [asdict(table) for table in proposed.tables]
    state.put(_DOCUMENT, json.dumps({"attempt": proposed.attempt, "tables": tables}))


def load_tables(state: StateDatabase) -> tuple[TableSpec, ...]:
    """Return the tables of the state; none if it has none.

    Raises:
        StateVersionError: a newer flexd wrote it.
        SnapshotError: it cannot be read.
    """
    document = state.document(_DOCUMENT)
    try:
        return () if document is None else tuple(map(table_from_document, json.loads(document)["tables"]))
    except (ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        raise SnapshotError(
            f"the tables of the ranks in {NAME} cannot be read: {error}",
            remedy="list the tables in the configuration, or move the file away: the ranks say them again",
        ) from error


def with_tables(config: Config, tables: Sequence[TableSpec]) -> Config:
    """Return a configuration that lists these tables."""
    return config.model_copy(update={"tables": [TableConfig(**asdict(table)) for table in tables]})


def with_known_tables(config: Config) -> Config:
    """Return the configuration with the tables of the state if it lists none; unchanged if none are known.

    Raises:
        SnapshotError, StateVersionError: see ``load_tables``.
    """
    if config.tables:
        return config
    state = StateDatabase(config.state.dir / NAME, read_only=True)
    try:
        tables = load_tables(state)
    finally:
        state.close()
    return with_tables(config, tables) if tables else config


def load_with_known_tables(path: Path) -> Config:
    """Read a configuration file as ``load_config``, with the tables of the state if it lists none."""
    return with_known_tables(load_config(path))


class ConfigFile:
    """Reloads the configuration, one reload at a time. Thread-safe.

    Args:
        config: the configuration that the daemon starts with.
        path: the file; None if the daemon was created without one and cannot reload.
        environ: variables laid over the file, as at the start.

    Attributes:
        config: the configuration in effect.
        tables_of_ranks: the tables in effect if the file lists none; None if it does, or none are known.
    """

    def __init__(self, config: Config, path: Path | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.config = config
        self.tables_of_ranks: Sequence[TableSpec] | None = None
        self._path = path
        self._environ = environ
        self._lock = threading.Lock()
        self._pending: tuple[str, ...] = ()
        self._problem = ""
        self._outcomes: Counter[str] = Counter()
        self._read_unix_seconds = time.time()

    def use_tables(self, tables: Sequence[TableSpec], begin: Callable[[Config], None]) -> None:
        """Call ``begin`` with the configuration in effect and these tables of the ranks, which are in effect from then
        on unless it raises. No reload happens meanwhile.

        Args:
            tables: none: those of the file.
        """
        with self._lock:
            config = with_tables(self.config, tables) if tables else self.config
            begin(config)
            self.config, self.tables_of_ranks = config, tables or None

    def reload(self, apply: Callable[[Config], None]) -> ReloadReport:
        """Read the file again and apply its hot keys. On an error nothing changes.

        Args:
            apply: applies new settings; raises FlexdError before it changes anything.

        Raises:
            ConfigError: there is no file, it cannot be read, or a value is not allowed (with its key path).
        """
        with self._lock:
            try:
                path, wanted, merged = self._read()
                if merged.applied:
                    apply(merged.effective)
            except FlexdError as error:
                self._outcomes["rejected"] += 1
                self._problem = str(error)
                logger.error("config reload: rejected, the old one stays: %s", error)
                raise
            report = _report(path, self.config, wanted, merged)
            if any(key.startswith("log.") for key in merged.applied):
                set_up_logging(self.config.job, merged.effective.log.level, merged.effective.log.format)
            self.config, self._pending = merged.effective, merged.pending
            self._read_unix_seconds, self._problem = time.time(), ""
            self._outcomes["applied" if report.applied else "unchanged"] += 1
            logger.info(
                "config reload: applied %s; pending a restart: %s", ", ".join(report.applied) or "nothing",
                ", ".join(report.pending) or "nothing",
            )  # fmt: skip
            return report

    def preview(self, check: Callable[[Config], None]) -> ReloadReport:
        """Return the report that ``reload`` would give now. Applies and counts nothing.

        Args:
            check: raises FlexdError if the settings cannot be applied.

        Raises:
            ConfigError: as in ``reload``.
        """
        with self._lock:
            path, wanted, merged = self._read()
            if merged.applied:
                check(merged.effective)
            return _report(path, self.config, wanted, merged, dry_run=True)

    def _read(self) -> tuple[Path, Config, Merged]:
        """Return the path, the file's configuration, and its merge with the running one."""
        if self._path is None:
            raise ConfigError("this daemon was not started from a file", remedy="start it with flexd run -c FILE")
        wanted = load_config(self._path, self._environ)
        if not wanted.tables and self.tables_of_ranks is not None:
            wanted = with_tables(wanted, self.tables_of_ranks)
        try:
            merged = merge(self.config, wanted)
        except ValidationError as error:
            faults = "\n".join(f"{self._path}: {line}" for line in describe_faults(error, Config, {}))
            raise ConfigError(faults, remedy="these keys contradict others that need a restart") from None
        check_tables(merged.effective, str(self._path))
        return self._path, wanted, merged

    def status(self) -> ConfigStatus:
        return ConfigStatus(
            file=None if self._path is None else str(self._path),
            read_unix_seconds=self._read_unix_seconds,
            pending=self._pending,
            reloads={name: self._outcomes[name] for name in ("applied", "unchanged", "rejected")},
            problem=self._problem or None,
        )


def _report(path: Path, running: Config, wanted: Config, merged: Merged, *, dry_run: bool = False) -> ReloadReport:
    before, after = running.document(), wanted.document()
    changes = tuple(
        KeyChange(key=key, before=_at(before, key), after=_at(after, key), needs_restart=key in merged.pending)
        for key in (*merged.applied, *merged.pending)
    )
    return ReloadReport(
        file=str(path), dry_run=dry_run, applied=merged.applied, pending=merged.pending, changes=changes
    )  # fmt: skip


def _at(document: Any, key: str) -> Any:
    """Return the value at a key path; None if a section of another kind lacks the key."""
    for name in key.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document
