"""The description of saved sketches: settings, clock, the list of tables, and how each was counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from flexd.core.errors import SketchError, StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.sketch.budget import Kind, TableChoice
from flexd.sketch.types import SketchSettings

STATE_FORMAT = 5
COACCESS = "coaccess"
"""Only in states with a sample of rows that occur together."""


@dataclass(frozen=True)
class SavedTable:
    """One table of saved sketches.

    Attributes:
        index: of the table in its list; arrays are named ``index/...``.
        spec, choice: the table, and how it was counted.
        meta: argument of ``TableSketch.load``.
    """

    index: int
    spec: TableSpec
    choice: TableChoice
    meta: dict[str, Any]

    @property
    def accesses(self) -> int:
        """Accesses counted, undecayed."""
        return int(self.meta["samples"])


@dataclass(frozen=True)
class SavedState:
    """Saved sketches without their arrays.

    Attributes:
        settings: with which they were counted.
        decay: state of the event-time clock.
        tables: in the order of their list.
        coaccess: of the sample of rows that occur together; None in states without one.
    """

    settings: SketchSettings
    decay: dict[str, Any]
    tables: tuple[SavedTable, ...]
    coaccess: dict[str, Any] | None = None


def describe(
    specs: Sequence[TableSpec], choices: Sequence[TableChoice], settings: SketchSettings, decay: Mapping[str, Any],
    sketches: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the description of sketches as JSON-able values."""
    return {
        "format": STATE_FORMAT,
        "settings": dataclasses.asdict(settings),
        "decay": dict(decay),
        "table_list": [dataclasses.asdict(spec) for spec in specs],
        "sketches": [
            {**sketch, "choice": {name: getattr(choice, name) for name in _CHOICE}}
            for choice, sketch in zip(choices, sketches, strict=True)
        ],
    }


def parse(meta: Mapping[str, Any]) -> SavedState:
    """Return the description of saved sketches.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it is of an older format, or damaged.
    """
    check_format(meta)
    try:
        return SavedState(
            settings_of(meta["settings"]),
            dict(meta["decay"]),
            tuple(
                SavedTable(index, TableSpec(**spec), _choice(str(spec["name"]), sketch), dict(sketch))
                for index, (spec, sketch) in enumerate(zip(meta["table_list"], meta["sketches"], strict=True))
            ),
            dict(meta[COACCESS]) if COACCESS in meta else None,
        )
    except SketchError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SketchError(f"sketch state is damaged: {error!r}", remedy="use an earlier snapshot") from error


def check_format(meta: Mapping[str, Any]) -> None:
    """Raises: StateVersionError: a newer format. SketchError: no format, or an older one."""
    number = meta.get("format")
    if not isinstance(number, int) or isinstance(number, bool):
        raise SketchError(f"sketch state of format {str(number)[:40]!r}", remedy="use an earlier snapshot")
    if number > STATE_FORMAT:
        raise StateVersionError(
            f"sketch state of format {number} is of a newer flexd; this one reads {STATE_FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )
    if number < STATE_FORMAT:
        raise SketchError(
            f"sketch state of format {number}, this flexd reads {STATE_FORMAT}", remedy="start without it"
        )


def settings_of(saved: Mapping[str, Any]) -> SketchSettings:
    """Return saved settings: unknown ones are ignored, missing ones have their defaults."""
    known = {field.name for field in dataclasses.fields(SketchSettings)}
    return SketchSettings(**{name: value for name, value in saved.items() if name in known})


_CHOICE = ("kind", "log2_width", "hot_rows", "sampled_accesses", "counter_bits")


def _choice(table: str, sketch: Mapping[str, Any]) -> TableChoice:
    saved = sketch["choice"]
    kind = saved["kind"]
    if kind not in get_args(Kind) or kind != sketch["kind"]:
        raise SketchError(f"table {table!r}: counters of kind {str(kind)[:40]!r}", remedy="use an earlier snapshot")
    width, hot, sampled, bits = (int(saved[name]) for name in _CHOICE[1:])
    return TableChoice(table, kind, 0, 0.0, 0.0, width, hot, sampled, bits)
