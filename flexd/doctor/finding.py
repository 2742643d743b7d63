"""What a check found, and how checks are run so that one that fails does not hide the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from flexd.core.errors import FlexdError


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    SKIPPED = "skipped"
    """Could not be looked at, or does not apply here."""
    WARNING = "warning"
    """Works, but not as well or not for long."""
    FAULT = "fault"
    """The daemon cannot do its work like this."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at: ``disk``, ``broker``, ...
        text: what was found. remedy: what the reader can do; empty if there is nothing to do.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def skipped(check: str, text: str) -> Finding:
    return Finding(check, Level.SKIPPED, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, text, remedy)


def fault(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.FAULT, text, remedy)


def run(check: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of one check; an error ends it as a fault with the error's own remedy."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except FlexdError as error:
        findings.append(fault(check, error.message, error.remedy or "see the message"))
    except OSError as error:
        findings.append(fault(check, f"{type(error).__name__}: {error}", "see the message"))
    return findings
