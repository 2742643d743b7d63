"""Findings of checks, and a runner under which a failing check does not hide the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from flexd.core.errors import FlexdError
from flexd.core.model import DETAIL, Model, Show


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    """The check could not run, or does not apply here."""
    WARNING = "warning"
    """It works, but not well or not for long."""
    FAULT = "fault"
    """The daemon cannot work with this."""


class Finding(Model):
    """One line of the report.

    Attributes:
        check: name of the check: ``disk``, ``broker``, ...
        text: the finding.
        remedy: the action to take; empty if there is none.
    """

    level: Level
    check: str
    text: str
    remedy: Annotated[str, DETAIL] = ""


class DoctorReport(Model):
    """The findings, in the order in which faults should be repaired, and their number by level."""

    findings: tuple[Finding, ...]
    counts: dict[Level, int]
    messages: Annotated[tuple[str, ...], Show("remedies"), Field(exclude=True)]


def ok(check: str, text: str) -> Finding:
    return Finding(level=Level.OK, check=check, text=text)


def skipped(check: str, text: str) -> Finding:
    return Finding(level=Level.SKIPPED, check=check, text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(level=Level.WARNING, check=check, text=text, remedy=remedy)


def fault(check: str, text: str, remedy: str) -> Finding:
    return Finding(level=Level.FAULT, check=check, text=text, remedy=remedy)


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
