"""The description of saved sketches: every format that this flexd reads, brought to the newest one.

Format 4 (first written before 2026-11-22) has a digest of the table list and no names; format 5 has the list, and how
each table was counted. A newer flexd raises ``STATE_FORMAT`` and adds the step from the format before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from flexd.core.errors import SketchError, StateVersionError
from flexd.core.home_rules import SPREAD
from flexd.core.keyspace import TableSpec, digest_of
from flexd.sketch import budget
from flexd.sketch.budget import Kind, TableChoice
from flexd.sketch.types import SketchSettings

STATE_FORMAT = 5
OLDEST_FORMAT = 4
COACCESS = "coaccess"
"""Optional: a flexd that does not know it reads the rest."""

_SEARCHED_TABLES = 5_000_000
"""Tables hashed at most to find the table list of a state that has only its digest: a few seconds."""


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
        coaccess: of the sample of rows that occur together; None in states without one, and in those written before
            there was one.
    """

    settings: SketchSettings
    decay: dict[str, Any]
    tables: tuple[SavedTable, ...]
    coaccess: dict[str, Any] | None = None


def describe(
    specs: Sequence[TableSpec], choices: Sequence[TableChoice], settings: SketchSettings, decay: Mapping[str, Any],
    sketches: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the description of sketches in the newest format, as JSON-able values."""
    return {
        "format": STATE_FORMAT,
        "tables": digest_of(specs),
        "settings": dataclasses.asdict(settings),
        "decay": dict(decay),
        "table_list": [_spec_fields(spec) for spec in specs],
        "sketches": [
            {**sketch, "choice": {name: getattr(choice, name) for name in _CHOICE}}
            for choice, sketch in zip(choices, sketches, strict=True)
        ],
    }


def _spec_fields(spec: TableSpec) -> dict[str, Any]:
    """Return the fields of a table, as releases without home rules know them where it is spread."""
    fields = dataclasses.asdict(spec)
    if spec.homes == SPREAD:
        del fields["homes"]
    return fields


def parse(meta: Mapping[str, Any], tables: Sequence[TableSpec]) -> SavedState:
    """Return the description of saved sketches of any format that this flexd reads.

    Args:
        tables: the configured tables, among which those of a state of format 4 are searched.

    Raises:
        StateVersionError: the state is of a newer flexd.
        SketchError: it is older than ``OLDEST_FORMAT``, damaged, or its table list cannot be found.
    """
    check_format(meta)
    try:
        current = dict(meta)
        for number in range(int(meta["format"]), STATE_FORMAT):
            current = _STEPS[number](current, tables)
        return SavedState(
            settings_of(current["settings"]),
            dict(current["decay"]),
            tuple(
                SavedTable(index, TableSpec(**spec), _choice(str(spec["name"]), sketch), dict(sketch))
                for index, (spec, sketch) in enumerate(zip(current["table_list"], current["sketches"], strict=True))
            ),
            dict(current[COACCESS]) if COACCESS in current else None,
        )
    except SketchError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SketchError(f"sketch state is damaged: {error!r}", remedy="use an earlier snapshot") from error


def check_format(meta: Mapping[str, Any]) -> None:
    """Raises: StateVersionError: a newer format. SketchError: no format, or one that is too old."""
    number = meta.get("format")
    if not isinstance(number, int) or isinstance(number, bool):
        raise SketchError(f"sketch state of format {str(number)[:40]!r}", remedy="use an earlier snapshot")
    if number > STATE_FORMAT:
        raise StateVersionError(
            f"sketch state of format {number} is of a newer flexd; this one reads {OLDEST_FORMAT} to {STATE_FORMAT}",
            remedy="run the flexd that wrote it, or a newer one",
        )
    if number < OLDEST_FORMAT:
        raise SketchError(
            f"sketch state of format {number}; this flexd reads {OLDEST_FORMAT} to {STATE_FORMAT}",
            remedy="start an older flexd once, which brings it to its own format",
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


def _with_table_list(meta: dict[str, Any], tables: Sequence[TableSpec]) -> dict[str, Any]:
    """Format 4 to 5: find the table list by its digest, and repeat the choice of the counters."""
    saved = _find_tables(str(meta["tables"]), len(meta["sketches"]), tables)
    settings = settings_of(meta["settings"])
    choices = budget.choose(
        saved, settings.memory_bytes, settings.max_hot_rows, logarithmic=settings.logarithmic
    )  # fmt: skip
    return describe(saved, choices, settings, meta["decay"], meta["sketches"])


_STEPS: dict[int, Callable[[dict[str, Any], Sequence[TableSpec]], dict[str, Any]]] = {4: _with_table_list}
"""From each older format to the next."""


def _find_tables(digest: str, count: int, tables: Sequence[TableSpec]) -> Sequence[TableSpec]:
    """Return the ``count`` tables of that digest: the given ones, or those without the ones that were added."""
    if digest_of(tables) == digest:
        return tables
    candidates: Iterable[tuple[TableSpec, ...]] = ()
    if count < len(tables) and math.comb(len(tables), count) * len(tables) <= _SEARCHED_TABLES:
        candidates = itertools.combinations(tables, count)
    elif count == len(tables) and math.factorial(min(count, 12)) * count <= _SEARCHED_TABLES:
        candidates = itertools.permutations(tables)
    for candidate in candidates:
        if digest_of(candidate) == digest:
            return candidate
    raise SketchError(
        f"the state is of format 4, which does not name its {count} tables, and they are not among the configured ones",
        remedy="start this flexd once with the configuration that wrote it, then change the tables",
    )
