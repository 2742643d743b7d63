"""The file of kernel measurements: round trip, versions and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flexd.core.errors import TopologyError
from flexd.topology.kernel_file import KernelMeasurements, TableSet, read_kernels, write_kernels


def measurements() -> KernelMeasurements:
    two = TableSet("float16", *(np.array(v, float) for v in ([9, 100], [8, 16], [30, 7], [10, 7], [0.5, 1.25], [5, 6])))
    one = TableSet("float32", *(np.array([v], float) for v in (1000, 4, 64, 2, 0, 40)))
    seconds = np.array([1e-3, 2.5e-6])
    return KernelMeasurements("fbgemm", "cpu", "a test", (two, one), seconds, 3 * seconds)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, wanted = tmp_path / "k.json", measurements()
    write_kernels(wanted, path)
    found = read_kernels(path)
    assert (found.kernels, found.device, found.source) == ("fbgemm", "cpu", "a test")
    assert [one.dtype for one in found.sets] == ["float16", "float32"]
    for name in ("rows", "dim", "ids", "bags", "skew", "distinct"):
        for mine, other in zip(found.sets, wanted.sets, strict=True):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    np.testing.assert_array_equal(found.look_up_seconds, wanted.look_up_seconds)
    np.testing.assert_array_equal(found.update_seconds, wanted.update_seconds)
    np.testing.assert_array_equal(found.sets[0].row_bytes, [16, 32])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "format 2, this flexd reads 1"),
        (lambda d: d.pop("sets"), "no kernel measurements"),
        (lambda d: d["sets"][1].pop("ids"), "set 1: no 'ids'"),
        (lambda d: d["sets"][0].update(dim=[8]), "set 0: dim of a set of tables has shape"),
        (lambda d: d["sets"][1].update(dtype="int8"), "set 1: tables of dtype 'int8'"),
        (lambda d: d["sets"][0].update(rows=[-1, 4]), "set 0: rows of a set of tables"),
        (lambda d: d["sets"][0].update(update_seconds=float("nan")), "update_seconds"),
    ],
)
def test_a_file_that_is_not_valid_is_named(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "k.json"
    write_kernels(measurements(), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(TopologyError, match=message):
        read_kernels(path)


def test_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"none\.json: cannot be read"):
        read_kernels(tmp_path / "none.json")
    with pytest.raises(TopologyError, match="cannot be written"):
        write_kernels(measurements(), tmp_path / "none" / "k.json")
