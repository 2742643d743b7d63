"""Node maps: saved, read, and looked up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import ConfigError
from flexd.core.node_map import NodeMap


@given(known=st.dictionaries(st.integers(-50, 2**40), st.integers(0, 6)), wanted=st.lists(st.integers(-60, 60)))
@settings(max_examples=50, deadline=None)
def test_users_are_in_the_nodes_of_the_map_and_others_by_their_id(known: dict[int, int], wanted: list[int]) -> None:
    ids = np.array(sorted(known), dtype=np.int64)
    node_map = NodeMap(ids, np.array([known[one] for one in ids.tolist()], dtype=np.int64), 7)
    assert node_map.node_of(wanted).tolist() == [known.get(one, one % 7) for one in wanted]


@pytest.mark.parametrize("kind", ["missing", "text", "arrays", "empty", "damaged", "names", "endless"])
def test_another_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nodes.npz"
    if kind == "text":
        path.write_text("nodes")
    if kind == "empty":
        path.touch()
    if kind == "arrays":
        np.savez(path, ids=np.arange(3))
    if kind in ("names", "endless"):
        ids, nodes = (np.array(["a", "b"]), 2) if kind == "names" else (np.arange(2), np.inf)
        np.savez(path, format=np.array("flexd node map 1"), ids=ids, nodes_of=np.zeros(2), nodes=np.array(nodes))
    if kind == "damaged":
        NodeMap(np.arange(1000), np.arange(1000) % 4, 4).save(path)
        whole = path.read_bytes()
        # Behind the header of the largest member's compressed bytes.
        at = whole.index(b"ids.npy") + 60
        path.write_bytes(whole[:at] + bytes(200) + whole[at + 200 :])
    with pytest.raises(ConfigError, match=r"nodes\.npz is no node map"):
        NodeMap.load(path)


@pytest.mark.parametrize(("ids", "nodes_of"), [([1, 1], [0, 0]), ([1, 2], [0]), ([1], [2]), ([1], [-1])])
def test_maps_that_do_not_fit_are_refused(ids: list[int], nodes_of: list[int]) -> None:
    with pytest.raises(ConfigError, match="a node map of"):
        NodeMap(np.array(ids), np.array(nodes_of), 2)


def map_of(node: int) -> NodeMap:
    return NodeMap(np.array([3, 9]), np.array([node, node]), 4)


def test_a_map_that_cannot_be_written_leaves_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nodes.npz"
    map_of(1).save(path)
    half = np.savez_compressed

    def full(file: object, **arrays: object) -> None:
        half(file, ids=arrays["ids"])
        raise OSError(28, "no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(ConfigError, match="cannot be written: no space left"):
        map_of(2).save(path)
    assert NodeMap.load(path).nodes_of.tolist() == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["nodes.npz"]
