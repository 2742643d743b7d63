"""The tables in the state of a follower whose configuration lists none."""

from __future__ import annotations

import logging

from flexd.config import tables_file
from flexd.config.checks import check_config
from flexd.config.model import Config
from flexd.core.errors import ConfigError, FlexdError, StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.daemon.state_files import NEWER

logger = logging.getLogger("flexd")


def with_tables_of_state(config: Config) -> Config:
    """Return the configuration with the tables of the state; unchanged if there are none that can be used.

    The leader has them too, so a file that cannot be used does not stop a follower.
    """
    directory = config.state.dir
    try:
        known = with_tables(config, tables_file.load_tables(directory))
        check_config(known, "the configuration, with the tables of the state")
    except StateVersionError as error:
        path = directory / tables_file.NAME
        logger.warning("%s: it is kept as %s%s", error, path.name, NEWER)
        path.replace(path.with_name(f"{path.name}{NEWER}"))
    except FlexdError as error:
        logger.warning("%s: the leader's tables are requested", error)
    else:
        return known
    return config


def with_tables(config: Config, tables: tuple[TableSpec, ...]) -> Config:
    """Return a configuration that lists these tables.

    Raises:
        ConfigError: a value is not allowed.
    """
    try:
        return tables_file.with_tables(config, tables)
    except ValueError as error:
        raise ConfigError(f"the tables of the leader: {error}") from error


def save(config: Config) -> None:
    """Write the tables to the state, durably. Raises SnapshotError if that fails."""
    tables_file.save_tables(config.state.dir, config.keyspace().tables, "")
