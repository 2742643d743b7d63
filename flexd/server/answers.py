"""Answers that are not of one verb: probes and errors."""

from __future__ import annotations

from flexd.server.model import Model


class ProbeResult(Model):
    """Answer of ``/healthz`` and ``/readyz``."""

    ok: bool
    """HTTP status 200 if true, 503 if not."""
    reasons: tuple[str, ...] = ()
    """Why not."""


class ErrorDetail(Model):
    """What was wrong and what to do about it."""

    type: str
    """Class of the error."""
    message: str
    """What was wrong, and where."""
    remedy: str = ""
    """What the reader can do."""


class ErrorBody(Model):
    """Body of every answer with a status of 400 or above, except those of the probes."""

    error: ErrorDetail
    """The error."""
