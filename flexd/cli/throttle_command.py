"""``throttle``: shows and changes how fast rows may migrate."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flexd.api import routes
from flexd.api.base import Model
from flexd.api.throttle import StepTimeReport, ThrottleStatus
from flexd.cli.blocks import Block, Facts, Table
from flexd.cli.interactive import DryRunOption, YesOption, confirm, must_ask
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.view import OutputFormat, emit
from flexd.core import units

BytesOption = Annotated[int | None, typer.Option(min=0, max=2**50, metavar="N", help="0 lifts the limit.")]


def throttle(
    bytes_per_step: BytesOption = None,
    bytes_per_second: BytesOption = None,
    adaptive: Annotated[Literal["on", "off"] | None, typer.Option(help="Slow down when steps become slower.")] = None,
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show or change the limits on the speed of migrations.

    A change takes effect at the next chunk, survives restarts of the daemon, and ends when control.throttle changes in
    the configuration. Bytes are row values and optimizer state on each rank, per step boundary and per second.

    Example: flexd throttle

    Example: flexd throttle --bytes-per-step 262144 --adaptive on --yes
    """
    client = connect(url, socket)
    adapts = None if adaptive is None else adaptive == "on"
    if dry_run:
        change = ThrottleChange.between(client.send(routes.THROTTLE), bytes_per_step, bytes_per_second, adapts)
        emit(change, throttle_change_blocks(change), output)
        return
    if bytes_per_step is None and bytes_per_second is None and adapts is None:
        answer = client.send(routes.THROTTLE)
    else:
        if must_ask(yes):
            change = ThrottleChange.between(client.send(routes.THROTTLE), bytes_per_step, bytes_per_second, adapts)
            confirm(f"{throttle_sentence(change)} Change?", yes)
        answer = client.send(
            routes.SET_THROTTLE,
            bytes_per_step=bytes_per_step,
            bytes_per_second=bytes_per_second,
            adaptive=adapts,
            reason=reason,
            who=who(),
        )
    emit(answer, throttle_blocks(answer), output)


class ThrottleSettings(Model):
    """The settings that can be changed."""

    bytes_per_step: int | None = None
    """Null: no limit but the ranks' own."""
    bytes_per_second: int | None = None
    """Null: no limit."""
    adaptive: bool = False
    """True if step times slow migrations down further."""


class ThrottleChange(Model):
    """The effect of setting the throttle."""

    before: ThrottleSettings
    """The settings now."""
    after: ThrottleSettings
    """The settings after the change."""

    @staticmethod
    def between(
        now: ThrottleStatus, bytes_per_step: int | None, bytes_per_second: int | None, adaptive: bool | None
    ) -> ThrottleChange:
        """Return the change; None keeps a setting, 0 lifts a limit."""
        before = ThrottleSettings(**now.model_dump(include=set(ThrottleSettings.model_fields)))
        limits = {"bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second}
        asked: dict[str, object] = {name: limit or None for name, limit in limits.items() if limit is not None}
        if adaptive is not None:
            asked["adaptive"] = adaptive
        return ThrottleChange(before=before, after=before.model_copy(update=asked))


def throttle_change_blocks(change: ThrottleChange) -> list[Block]:
    pairs = zip(_settings(change.before), _settings(change.after), strict=True)
    rows = tuple((name, before, after) for (name, before), (_, after) in pairs)
    return [Table("throttle", ("limit", "before", "after"), rows)]


def throttle_sentence(change: ThrottleChange) -> str:
    """Return the change as one sentence."""
    pairs = zip(_settings(change.before), _settings(change.after), strict=True)
    changes = [f"{name}: {before} -> {after}" for (name, before), (_, after) in pairs if before != after]
    return f"{'; '.join(changes)}." if changes else "The throttle has these limits already."


def throttle_blocks(throttle: ThrottleStatus) -> list[Block]:
    facts = _settings(throttle)
    if throttle.adaptive:
        facts.append(("now", f"{throttle.state}, {_limit(throttle.effective_bytes_per_step, 'no limit')} a step"))
        facts.append(("why", throttle.why or units.UNKNOWN))
    if throttle.waits_for:
        facts.append(("chunk waits for", throttle.waits_for.replace("_", " ")))
    facts.append(("steps without", _times(throttle.baseline)))
    facts.append(("steps with", _times(throttle.recent)))
    facts.append(("let go", units.size(throttle.released_bytes)))
    waited = [
        f"{name.replace('_', ' ')} {units.seconds(seconds)}"
        for name, seconds in throttle.waiting_seconds.items()
        if seconds
    ]
    facts.append(("waited", ", ".join(waited) or "never"))
    if any(throttle.decisions.values()):
        facts.append(("decisions", ", ".join(f"{name} {units.count(n)}" for name, n in throttle.decisions.items())))
    return [Facts("throttle", tuple(facts))]


def _settings(throttle: ThrottleStatus | ThrottleSettings) -> list[tuple[str, str]]:
    return [
        ("a step", _limit(throttle.bytes_per_step, "as much as the ranks apply")),
        ("a second", _limit(throttle.bytes_per_second, "no limit")),
        ("adaptive", "on" if throttle.adaptive else "off"),
    ]


def _limit(limit: int | None, without: str) -> str:
    return without if limit is None else units.size(limit)


def _times(times: StepTimeReport | None) -> str:
    if times is None:
        return units.UNKNOWN
    return f"p50 {units.seconds(times.p50_seconds)}, p90 {units.seconds(times.p90_seconds)}"
