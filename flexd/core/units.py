"""Format figures for people. Bytes are in powers of 1000, like the bandwidths they are divided by."""

import datetime

UNKNOWN = "-"


def count(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}"


def plural(number: int, what: str) -> str:
    """``1 table``, ``2 tables``."""
    return f"{count(number)} {what}" + ("" if number == 1 else "s")


def size(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """Format a short time, such as that of one step or one plan."""
    if value is None:
        return UNKNOWN
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    if value == 0:
        return "0 s"
    return f"{value / 1e-9:.3g} ns" if abs(value) >= 1e-10 else f"{value / 1e-12:.3g} ps"


def age(value: float | None) -> str:
    """Format a long time in two units."""
    if value is None:
        return UNKNOWN
    whole = round(value)
    if whole < 60:
        return f"{value:.3g} s"
    for name, unit, lower_name, lower in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // lower} {lower_name}"
    return f"{whole} s"


def share(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2%}" if value < 0.9995 or value == 1 else f"{value:.4%}"


def when(unix_seconds: float | None) -> str:
    if unix_seconds is None:
        return UNKNOWN
    return datetime.datetime.fromtimestamp(unix_seconds).astimezone().isoformat(sep=" ", timespec="seconds")
