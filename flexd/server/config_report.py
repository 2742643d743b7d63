"""The running configuration, as the admin API tells it."""

from __future__ import annotations

from typing import Any

from flexd.server.model import Model


class ConfigReport(Model):
    """What the daemon runs with."""

    version: str
    """Of flexd: another version may know other keys."""
    config: dict[str, Any]
    """The effective configuration, defaults included; secrets are replaced."""
