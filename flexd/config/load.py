"""Load a ``Config`` from a YAML file and the environment, and split a changed one by what needs a restart.

Errors name key path, value and allowed values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexd.config.base import Section
from flexd.config.model import Config
from flexd.config.text import describe_faults, overlay_environment, read_yaml_mapping
from flexd.core.errors import ConfigError

HOT_KEYS: tuple[str, ...] = (
    "planner",
    "control.chunk_bytes",
    "control.throttle",
    "state.snapshot_interval_seconds",
    "state.keep_snapshots",
    "log.level",
    "log.format",
    "shutdown_seconds",
)
"""Key paths of keys or whole sections that apply at once. The others are read once at the start: addresses and files
are open, and counters have their size."""


@dataclass(frozen=True)
class Merged:
    """Result of ``merge``.

    Attributes:
        effective: the running configuration with the hot keys of the wanted one.
        applied: hot key paths that differ from the running configuration.
        pending: key paths that differ and need a restart.
    """

    effective: Config
    applied: tuple[str, ...]
    pending: tuple[str, ...]


def is_hot(path: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in HOT_KEYS)


def merge(running: Config, wanted: Config) -> Merged:
    """Merge the hot keys of ``wanted`` into ``running``.

    Raises:
        pydantic.ValidationError: the hot keys contradict the keys that stay.
    """
    changed: list[str] = []
    mixed = _mixed(running, wanted, "", changed)
    effective = Config.model_validate(mixed.model_dump())
    hot = tuple(path for path in changed if is_hot(path))
    return Merged(effective, hot, tuple(path for path in changed if not is_hot(path)))


def _mixed(running: Any, wanted: Any, path: str, changed: list[str]) -> Any:
    """Return ``running`` with the hot values of ``wanted``, and append the paths that differ to ``changed``."""
    if type(running) is not type(wanted) or not isinstance(running, Section):
        if running == wanted:
            return running
        changed.append(path)
        return wanted if is_hot(path) else running
    fields = type(running).model_fields
    return running.model_copy(
        update={
            name: _mixed(getattr(running, name), getattr(wanted, name), f"{path}.{name}" if path else name, changed)
            for name in fields
        }
    )


def load_config(path: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """Read a YAML file, apply ``FLEXD__A__B=value`` variables, and validate the result.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or a value is not allowed; the text lists every
            fault as ``key.path: what is allowed (got value)``.
    """
    data, variables = overlay_environment(read_yaml_mapping(path), environ)
    return parse_config(data, origin=str(path), variables=variables)


def parse_config(data: Mapping[str, Any], origin: str = "config", variables: Mapping[str, str] | None = None) -> Config:
    """Validate a parsed mapping; ``variables`` maps key paths to the environment variables that set them.

    Raises:
        ConfigError: as ``load_config``.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = describe_faults(error, Config, variables or {})
        raise ConfigError("\n".join(f"{origin}: {line}" for line in faults)) from None
