"""The tables of a job in the daemon's state: ``tables-of-ranks.json``, for a configuration that lists none.

A daemon that takes its tables from the ranks writes them there, so that it starts again without ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexd.config.load import load_config
from flexd.config.model import Config, TableConfig
from flexd.core.durable import replace_file
from flexd.core.errors import ConfigError, SnapshotError, StateVersionError
from flexd.core.keyspace import TableSpec, table_from_document

NAME = "tables-of-ranks.json"
FORMAT = 1


def save_tables(directory: Path, tables: Sequence[TableSpec], attempt: str) -> None:
    """Replace the file, durably.

    Args:
        attempt: of the ranks that have these tables.

    Raises:
        SnapshotError: it cannot be written.
    """
    document = {"format": FORMAT, "attempt": attempt, "tables": [asdict(table) for table in tables]}
    replace_file(directory / NAME, [json.dumps(document, indent=1).encode()])


def load_tables(directory: Path) -> tuple[TableSpec, ...]:
    """Return the tables of the file; none if there is no file.

    Raises:
        StateVersionError: a newer flexd wrote it.
        SnapshotError: it cannot be read.
    """
    path = directory / NAME
    try:
        document = _document(path)
        return () if document is None else tuple(table_from_document(entry) for entry in document["tables"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        raise SnapshotError(
            f"{path} cannot be read: {error}", remedy="remove it: the tables then come from the ranks again"
        ) from error


def check_version(path: Path) -> None:
    """Raise StateVersionError if a newer flexd wrote the file. Other faults are reported where it is read."""
    try:
        _document(path)
    except (OSError, ValueError, RecursionError):
        return


def with_tables(config: Config, tables: Sequence[TableSpec]) -> Config:
    """Return a configuration that lists these tables."""
    return config.model_copy(update={"tables": [TableConfig(**asdict(table)) for table in tables]})


def with_known_tables(config: Config) -> Config:
    """Return the configuration with the tables of the state if it lists none; unchanged if none are known.

    Raises:
        SnapshotError, StateVersionError: see ``load_tables``.
    """
    if config.tables or not config.state.dir.is_dir():
        return config
    tables = load_tables(config.state.dir)
    return with_tables(config, tables) if tables else config


def load_with_known_tables(path: Path) -> Config:
    """Read a configuration file as ``load_config``, with the tables of the state if it lists none."""
    return with_known_tables(load_config(path))


def _document(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    version = document.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise StateVersionError(
            f"{path} is of format {version}, this flexd reads format {FORMAT}", remedy="start the newer flexd"
        )
    return document
