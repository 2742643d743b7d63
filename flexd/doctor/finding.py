"""Findings of checks, and a runner under which a failing check does not hide the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from flexd.core.errors import FlexdError


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    """The check could not run, or does not apply here."""
    WARNING = "warning"
    """It works, but not well or not for long."""
    FAULT = "fault"
    """The daemon cannot work with this."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: name of the check: ``disk``, ``broker``, ...
        text: the finding.
        remedy: the action to take; empty if there is none.
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
    """Return the findings of one check; an error ends the check with a fault and the error's own remedy."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except FlexdError as error:
        findings.append(fault(check, error.message, error.remedy or "resolve the error above"))
    except OSError as error:
        findings.append(fault(check, f"{type(error).__name__}: {error}", "resolve the error above"))
    return findings
