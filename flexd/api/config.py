"""The running configuration and its file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model
from flexd.api.families import counters

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class KeyChange(Model):
    """A key whose value in the file differs from what runs; secrets are replaced."""

    key: str
    """Path of the key."""
    before: Any = None
    """The running value, or the one before the reload."""
    after: Any = None
    """The value in the file."""
    needs_restart: bool = False
    """True if a reload does not apply it."""


class ReloadReport(Model):
    """The result of reading the configuration file again, or the preview of one."""

    file: str
    """The file that was read."""
    dry_run: bool = False
    """True for a preview, which changes nothing."""
    applied: tuple[str, ...] = ()
    """Key paths that differ from what ran, and are in effect now."""
    pending: tuple[str, ...] = ()
    """Key paths that differ from what runs, and need a restart."""
    changes: tuple[KeyChange, ...] = ()
    """Both, with their values."""


class ConfigStatus(Model):
    """The file that the daemon runs on."""

    file: str | None = None
    """Path of the file; null for a daemon without one."""
    read_unix_seconds: FiniteOrNone = None
    """When it was last read and applied."""
    pending: tuple[str, ...] = ()
    """Key paths in which it differs from what runs, until a restart."""
    reloads: dict[str, int] = Field(default_factory=dict)
    """Reloads since the daemon started, by outcome: ``applied``, ``unchanged``, ``rejected``."""
    problem: str | None = None
    """Reason why the newest reload was rejected; null if it was not."""

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric families of the configuration."""
        yield counters("flexd_config_reloads", "Reloads by outcome.", "outcome", self.reloads)


class ConfigReport(Model):
    """The effective configuration."""

    version: str
    """Version of flexd: another version may know other keys."""
    config: dict[str, Any]
    """The effective configuration, defaults included; secrets are replaced."""
