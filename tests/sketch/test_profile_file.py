"""Profile files: round trip, and refusal of files that are damaged or no profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch.profile import Profile, RowTouches
from flexd.sketch.profile_file import read_profile, write_profile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

FIELDS = ("hot_rows", "hot_share", "hot_lower", "hot_upper", "bin_share", "bin_rows")


@pytest.fixture
def profile() -> Profile:
    sketches = SketchSet(
        [TableSpec("a", 300, 4), TableSpec("b", 50, 4), TableSpec("none", 9, 4)], SketchSettings(2**20, 60.0, 1e9, 20)
    )
    for i in range(5):
        for table, rows in (("a", 300), ("b", 50)):
            sketches.ingest(table, np.random.default_rng(i).zipf(1.3, 500) % rows, 0, 1.7e9 + i)
    return sketches.profile(100.0, generation=7, lag_messages=3)


def test_a_file_restores_the_profile(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "p.npz")
    read = read_profile(tmp_path / "p.npz")
    for name in ("generation", "event_time_seconds", "half_life_seconds", "lag_messages", "samples"):
        assert getattr(read, name) == getattr(profile, name), name
    assert len(read.tables) == 3
    for mine, theirs in zip(read.tables, profile.tables, strict=True):
        for name in ("table", "rows", "weight", "accesses_per_step", "distinct_rows", "coverage"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def with_touches(profile: Profile) -> Profile:
    """Touches of the first table only, one of them unknown."""
    first, *others = profile.tables
    columns = np.random.default_rng(0).random((3, len(first.hot_rows)))
    columns[1, 2] = np.nan
    return replace(profile, tables=(replace(first, touches=RowTouches(2, 3, *columns)), *others))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("0/hot_share", np.zeros(3), "differ in length"),
        ("0/bin_rows", np.zeros(3), "differ in length"),
        ("0/hot_rows", np.zeros(20), "hot_rows"),
        ("0/hot_rows", np.full(20, 300), "out of range"),
        ("1/bin_share", None, "1/bin_share"),
        ("0/bin_share", np.full(3, np.nan), "not finite"),
        ("0/per_rank", np.zeros(3), "differ in length"),
        ("0/anywhere", np.full(20, 1.5), "anywhere"),
        ("format", 9, "format 9"),
        ("weight", -1.0, "table 'a'"),
        ("weight", float("nan"), "table 'a'"),
        ("nobody", 1, "nobody"),
    ],
)
def test_files_that_do_not_fit_are_refused(profile: Profile, tmp_path: Path, name: str, change, message: str) -> None:
    path = tmp_path / "p.npz"
    write_profile(with_touches(profile), path)
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    document = json.loads(str(arrays["json"]))
    if name == "format":
        document["format"] = change
    elif "/" not in name:
        document["tables"][0][name] = change
    elif change is None:
        del arrays[name]
    else:
        arrays[name] = change
    np.savez(path, **{**arrays, "json": np.array(json.dumps(document))})
    with pytest.raises(SketchError, match=message) as error:
        read_profile(path)
    assert str(path) in str(error.value)


def test_other_files_are_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    write_profile(profile, path)
    whole = path.read_bytes()
    for data in (b"", b"no profile", whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(data)
        with pytest.raises(SketchError):
            read_profile(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for other in (tmp_path / "array.npy", tmp_path / "missing.npz", tmp_path):
        with pytest.raises(SketchError):
            read_profile(other)
    with pytest.raises(SketchError, match="cannot be written"):
        write_profile(profile, tmp_path / "no" / "p.npz")
