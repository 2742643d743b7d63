"""The description of saved sketches: formats that are read, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flexd.core.errors import SketchError, StateVersionError
from flexd.core.keyspace import TableSpec
from flexd.sketch import saved_state
from flexd.sketch.saved_state import STATE_FORMAT
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

TABLES = tuple(TableSpec(name, 40, 4) for name in ("a", "b", "c"))
SETTINGS = SketchSettings(memory_bytes=100_000, half_life_seconds=60.0, max_hot_rows=10)


@pytest.fixture
def meta() -> dict[str, Any]:
    return json.loads(json.dumps(SketchSet.of(TABLES, SETTINGS).state()[0]))


def test_a_description_is_read_as_it_was_written(meta: dict[str, Any]) -> None:
    saved = saved_state.parse(meta)
    assert (saved.settings, tuple(table.spec for table in saved.tables)) == (SETTINGS, TABLES)
    assert [(table.index, table.accesses) for table in saved.tables] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("number", [None, True, "5", STATE_FORMAT - 1])
def test_an_unknown_or_too_old_format_is_refused(meta: dict[str, Any], number: object) -> None:
    with pytest.raises(SketchError, match="format"):
        saved_state.parse({**meta, "format": number})


def test_a_newer_format_is_refused_as_such(meta: dict[str, Any]) -> None:
    with pytest.raises(StateVersionError, match=f"format {STATE_FORMAT + 1} is of a newer flexd"):
        saved_state.parse({**meta, "format": STATE_FORMAT + 1})


@pytest.mark.parametrize("key", ["settings", "decay", "table_list", "sketches"])
def test_a_damaged_description_is_refused(meta: dict[str, Any], key: str) -> None:
    for value in (None, 3, [3]):
        with pytest.raises(SketchError):
            saved_state.parse({**meta, key: value})


def test_settings_of_another_version_are_read(meta: dict[str, Any]) -> None:
    known = {**meta["settings"], "of_a_later_version": 1}
    del known["late_after_seconds"]
    assert saved_state.settings_of(known) == SETTINGS
