"""Node maps: saved, read, and looked up."""

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


@pytest.mark.parametrize(
    "arrays",
    [
        None,
        {"ids": np.arange(3)},
        {"format": np.array("flexd node map 1"), "ids": np.array(["a"]), "nodes_of": np.zeros(1), "nodes": np.array(2)},
        {
            "format": np.array("flexd node map 1"),
            "ids": np.arange(2),
            "nodes_of": np.zeros(2),
            "nodes": np.array(np.inf),
        },
    ],
    ids=["missing", "arrays", "names", "endless"],
)
def test_another_file_is_named(tmp_path: Path, arrays: dict[str, np.ndarray] | None) -> None:
    """Other and damaged archives are those of ``read_arrays``, which traces read too."""
    if arrays is not None:
        np.savez(tmp_path / "nodes.npz", **arrays)
    with pytest.raises(ConfigError, match=r"nodes\.npz is no node map"):
        NodeMap.load(tmp_path / "nodes.npz")


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
