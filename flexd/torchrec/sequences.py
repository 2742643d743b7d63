"""``FlexEmbeddingCollection``: un-pooled look-ups with TorchRec's types."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.jagged import Jagged
from flexd.torchrec.configs import embedding_names, features_of, initialise, tables_of
from flexd.torchrec.inputs import as_keyed_jagged, jagged_by_key
from flexd.torchrec.outputs import jagged_tensor


class FlexEmbeddingCollection(EmbeddingCollection, EmbeddingCollectionInterface):
    """Replaces a sharded ``torchrec.EmbeddingCollection``, without ``DistributedModelParallel``.

    The training loop differs in one line: gradients wait for ``optimizer.step()``, where TorchRec's fused optimizers
    update inside ``backward()``. ``average_gradients`` is TorchRec's ``set_gradient_division``. Outputs are float32 for
    every data type of a table, as in TorchRec. ``state_dict`` has flexd's keys.

    Args:
        tables: tables of one ``embedding_dim``. Several tables may read a feature (then its outputs are named
            "feature@table"). ``init_fn`` is supported: see ``flexd.torchrec.configs``.
        device, need_indices: arguments of TorchRec's collection.
        arguments: the keyword arguments of ``flexd.EmbeddingCollection``.

    Raises:
        EmbeddingError: tables have several dims, or a configuration is not supported.
        TopologyError: see ``flexd.EmbeddingCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        dims = sorted({config.embedding_dim for config in tables})
        if len(dims) != 1:
            raise EmbeddingError(
                f"tables of dims {dims} in one collection",
                remedy="one embedding_dim, as in TorchRec; flexd.EmbeddingCollection takes several",
            )
        self._configs = list(tables)  # before the constructor, which makes the initial values
        super().__init__(tables_of(tables), device=device, seed=seed, **arguments)
        self._need_indices = need_indices

    def _fill_initial_values(self) -> None:
        super()._fill_initial_values()
        initialise(self, self._configs, self._seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return rows [n, dim] of each embedding name, with lengths, and with ids as weights if ``need_indices``.

        Keys that no table reads and weights of the input are ignored, as in TorchRec.

        Raises:
            EmbeddingError: on every rank, if the input of any rank lacks a feature or has a row out of range.
        """
        routed = self._route(features)
        rows = self._rows(routed)  # may replace the features
        looked_up = self._features.split(routed.features, rows)
        return {
            name: jagged_tensor(ids, looked_up[name].values, self._need_indices)
            for name, ids in routed.features.items()
        }

    def as_features(self, given: Any) -> dict[str, Jagged]:
        by_key = jagged_by_key(as_keyed_jagged(given, [f for c in self._configs for f in features_of(c)], self.rank))
        return {
            name: by_key[feature]
            for config, names in zip(self._configs, embedding_names(self._configs), strict=True)
            for feature, name in zip(features_of(config), names, strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        return self.tables[0].dim

    def embedding_names_by_table(self) -> list[list[str]]:
        return embedding_names(self._configs)
