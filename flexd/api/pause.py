"""The pause of planning and pushing."""

from __future__ import annotations

from flexd.api.base import CommandRequest, Model, Reason


class PauseRequest(CommandRequest):
    """Body of ``POST /v1/pause``."""

    reason: Reason = "asked for by hand"
    """Shown in the status until ``resume``; recorded."""


class PauseState(Model):
    """Whether planning and pushing are held."""

    paused: bool
    """Whether they are held now."""
    reason: str | None = None
    """What the pause was asked for."""
    changed: bool = True
    """False if it was so already."""
