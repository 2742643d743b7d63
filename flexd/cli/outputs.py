"""Whether what a command will write can be written, asked before it spends minutes on what goes in."""

from __future__ import annotations

import os
from pathlib import Path

from flexd.core.errors import ConfigError


def check_file(option: str, path: Path | None) -> None:
    """Raises ConfigError, which names the option."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written", remedy="give a file in an existing, writable folder")


def check_folder(option: str, path: Path | None) -> None:
    """As ``check_file``, for a folder that will be made if there is none."""
    if path is None:
        return
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written", remedy="give a folder that is, or can be made")
