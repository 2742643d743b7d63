"""Checks that output files can be written before a command spends minutes on their content."""

from __future__ import annotations

import os
from pathlib import Path

from flexd.core.errors import ConfigError


def check_file(option: str, path: Path | None) -> None:
    """Raise ConfigError, which names the option, if the file cannot be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written", remedy="give a file in an existing, writable folder")


def check_folder(option: str, path: Path | None) -> None:
    """Raise ConfigError, which names the option, if the folder cannot be written or made."""
    if path is None:
        return
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written", remedy="give a folder that is, or can be made")
