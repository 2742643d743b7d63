"""The tables of a job in its state, for a configuration that lists none.

A daemon that takes its tables from the ranks writes them to ``state.sqlite``, so that it starts again without ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flexd.config.load import load_config
from flexd.config.model import Config, TableConfig
from flexd.control.daemon.membership import ProposedTables
from flexd.core.errors import ConfigError, SnapshotError
from flexd.core.keyspace import TableSpec, table_from_document
from flexd.operations.state_database import NAME, StateDatabase

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
