"""The running configuration, as the admin API tells it."""

from __future__ import annotations

from typing import Any

from flexd.api.base import FiniteOrNone, Model


class KeyChange(Model):
    """A key whose value in the file differs from what runs; secrets are replaced."""

    key: str
    """Its path."""
    before: Any = None
    """What runs, or ran until the reload."""
    after: Any = None
    """What the file says."""
    needs_restart: bool = False
    """Whether a reload leaves it as it is."""


class ReloadReport(Model):
    """What became of a changed file, or would become of it."""

    file: str
    """That was read again."""
    dry_run: bool = False
    """Whether nothing was taken from it: the rest is then what a reload would come to."""
    applied: tuple[str, ...] = ()
    """Key paths that differ from what ran, and are in effect now."""
    pending: tuple[str, ...] = ()
    """Key paths that differ from what runs, and need a restart."""
    changes: tuple[KeyChange, ...] = ()
    """Both, with their values."""


class ConfigStatus(Model):
    """The file that the daemon runs on."""

    file: str | None = None
    """Null for a daemon that was made without one."""
    read_unix_seconds: FiniteOrNone = None
    """When it was last read and taken."""
    pending: tuple[str, ...] = ()
    """Key paths in which it differs from what runs, until a restart."""
    rejected: int = 0
    """Reloads that were refused since the daemon started."""
    problem: str | None = None
    """Why the newest reload was refused, if it was."""


class ConfigReport(Model):
    """What the daemon runs with."""

    version: str
    """Of flexd: another version may know other keys."""
    config: dict[str, Any]
    """The effective configuration, defaults included; secrets are replaced."""
