"""``FlexEmbeddingCollection`` and its pooled twin against TorchRec's own modules: outputs, training, names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import torchrec
from torchrec import EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from flexd.core.errors import FlexdError
from flexd.core.placement import RankLayout
from flexd.torchrec import FlexEmbeddingCollection
from tests.support.torchrec_jobs import batch, configs, make


def plain_of(collection: Any, pooled: bool) -> Any:
    """Return TorchRec's module with the present rows of the collection."""
    module = (torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection)(tables=configs(pooled))
    tables = module.embedding_bags if pooled else module.embeddings
    with torch.no_grad():
        for name, table in tables.items():
            table.weight.copy_(collection.gather_table(name))
    return module


ONE = RankLayout(1, 1)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 6])
def test_outputs_equal_those_of_torchrec(pooled: bool, samples: int) -> None:
    ours = make(pooled, ONE)
    plain = plain_of(ours, pooled)
    kjt = batch(0, 0, samples=samples)
    if samples == 0:  # TorchRec cannot split an empty batch
        empty = ours(kjt)
        assert (empty.values().shape[0] if pooled else sum(j.values().numel() for j in empty.values())) == 0
        return
    got, expected = ours(kjt), plain(kjt)
    if pooled:
        assert isinstance(got, torchrec.KeyedTensor)
        assert got.keys() == expected.keys() == ["history", "target@item", "shop", "target@shop"]
        assert got.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(got.values(), expected.values())
        return
    assert list(got) == list(expected) == ["history", "target@item", "shop", "target@shop"]
    for name, jagged in expected.items():
        assert isinstance(got[name], torchrec.JaggedTensor)
        assert torch.equal(got[name].values(), jagged.values())
        assert torch.equal(got[name].lengths(), jagged.lengths())
        assert torch.equal(got[name].offsets(), jagged.offsets())
        assert got[name].weights_or_none() is None


def test_collections_implement_the_interfaces_of_torchrec() -> None:
    sequences, bags = make(False, ONE), make(True, ONE)
    assert isinstance(sequences, EmbeddingCollectionInterface)
    assert isinstance(bags, EmbeddingBagCollectionInterface)
    plain = torchrec.EmbeddingCollection(tables=configs(False))
    assert sequences.embedding_dim() == plain.embedding_dim() == 8
    assert sequences.embedding_names_by_table() == plain.embedding_names_by_table()
    assert [config.name for config in sequences.embedding_configs()] == ["item", "shop"]
    assert (sequences.need_indices(), bags.is_weighted()) == (False, False)
    assert sequences.device == plain.device
    unnamed = EmbeddingConfig(name="t", num_embeddings=3, embedding_dim=2)
    assert FlexEmbeddingCollection([unnamed]).embedding_names_by_table() == [["t"]]
    assert unnamed.feature_names == [], "a configuration is not changed"


def test_without_torchrec_the_import_error_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchrec" or "flexd.torchrec" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ImportError, match=r"pip install 'flexd\[torchrec\]'") as caught:
        importlib.import_module("flexd.torchrec")
    assert isinstance(caught.value, FlexdError)
