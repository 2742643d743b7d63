"""Text of the throttle and of its changes."""

from __future__ import annotations

from flexd.api.base import Model
from flexd.api.throttle import StepTimeReport, ThrottleStatus
from flexd.cli.blocks import Block, Facts, Table
from flexd.core import units


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
    return f"{'; '.join(changes)}." if changes else "The throttle is so already."


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
