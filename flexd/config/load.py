"""Load a ``Config`` from a YAML file and the environment; errors name key path, value and allowed values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexd.config.model import Config
from flexd.config.text import describe_faults, overlay_environment, read_yaml_mapping
from flexd.core.errors import ConfigError


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
