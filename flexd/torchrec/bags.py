"""``FlexEmbeddingBagCollection``: pooled look-ups with TorchRec's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from flexd.core.errors import EmbeddingError
from flexd.embedding.bag_collection import EmbeddingBagCollection
from flexd.embedding.jagged import Jagged
from flexd.torchrec.configs import embedding_names, features_of, initialise, tables_of
from flexd.torchrec.inputs import as_keyed_jagged, check_inverse, jagged_by_key, weights_by_key
from flexd.torchrec.outputs import keyed_tensor


class FlexEmbeddingBagCollection(EmbeddingBagCollection, EmbeddingBagCollectionInterface):
    """Replaces a sharded ``torchrec.EmbeddingBagCollection``; see ``FlexEmbeddingCollection``.

    Args:
        tables: tables of any dims, pooled by SUM or MEAN.
        is_weighted: the input's weights are factors of the rows; all tables must pool by SUM (see ``nn.EmbeddingBag``).
        device: argument of TorchRec's collection.
        arguments: the keyword arguments of ``flexd.EmbeddingBagCollection``, ``answers`` among them.

    Raises:
        EmbeddingError: a configuration is not supported, or weights are combined with MEAN.
        TopologyError: see ``flexd.EmbeddingCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        by_mean = [config.name for config in tables if config.pooling == PoolingType.MEAN]
        if is_weighted and by_mean:
            raise EmbeddingError(
                f"is_weighted with tables pooled by MEAN: {', '.join(by_mean)}",
                remedy="pool by SUM, with weights that sum to 1 in each bag",
            )
        self._configs = list(tables)  # before the constructor, which makes the initial values
        super().__init__(tables_of(tables), device=device, seed=seed, **arguments)
        self._is_weighted = is_weighted
        self._names = [
            (feature, name)
            for config, names in zip(tables, embedding_names(tables), strict=True)
            for feature, name in zip(features_of(config), names, strict=True)
        ]

    def _fill_initial_values(self) -> None:
        super()._fill_initial_values()
        initialise(self, self._configs, self._seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return float32 [batch, sum of dims], by embedding name.

        Batch sizes may differ by key if the input has ``inverse_indices`` to expand them.

        Raises:
            EmbeddingError: on every rank, if the input of any rank lacks a feature or required weights, has a row out
                of range, or has different batch sizes without valid ``inverse_indices``.
        """
        routed = self._route(features)
        kjt = as_keyed_jagged(features, [], self.rank)
        pooled = self._pool(routed, self._rows(routed, expand=False), self._weights(kjt))
        return keyed_tensor(kjt, [(feature, name, pooled[name]) for feature, name in self._names])

    def as_features(self, given: Any) -> dict[str, Jagged]:
        kjt = as_keyed_jagged(given, [feature for feature, _ in self._names], self.rank)
        by_key = jagged_by_key(kjt)
        features = {name: by_key[feature] for feature, name in self._names}
        self._check_weights(features, self._weights(kjt))
        check_inverse(kjt, {feature: by_key[feature] for feature, _ in self._names}, self.rank)
        return features

    def factors_of(self, given: Any) -> Mapping[str, torch.Tensor]:
        return self._weights(as_keyed_jagged(given, [], self.rank))

    def _weights(self, kjt: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        if not self._is_weighted:
            return {}
        by_key = weights_by_key(kjt)
        return {name: by_key[feature] for feature, name in self._names}

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted
