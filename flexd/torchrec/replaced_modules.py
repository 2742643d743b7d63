"""The modules that ``flexd.torchrec.replace`` puts into a model, whose tables are in ``ReplacedTables``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexd.core.errors import EmbeddingError
from flexd.torchrec.replaced_tables import ReplacedModule, ReplacedTables


class _Replaced(nn.Module):
    """Holds the tables without being their parent: only the first module is, so that they are saved once."""

    def __init__(self, tables: ReplacedTables, module: ReplacedModule) -> None:
        super().__init__()
        self.__dict__["_all_tables"] = tables
        self._module = module

    @property
    def device(self) -> torch.device:
        tables: ReplacedTables = self.__dict__["_all_tables"]
        return tables.device

    def __getattr__(self, name: str) -> Any:
        if name in ("embedding_bags", "embeddings"):
            raise EmbeddingError(
                f"{self._module.path} was replaced: it has no {name}",
                remedy="read tables with gather_table(name) and write them with load_rows of what replace() returned",
            )
        return super().__getattr__(name)

    def _output(self, features: Any) -> Any:
        tables: ReplacedTables = self.__dict__["_all_tables"]
        return tables.look_up(self._module, features, training=self.training)


class ReplacedEmbeddingCollection(_Replaced, EmbeddingCollectionInterface):
    """Stands for a ``torchrec.EmbeddingCollection``; see ``replace``."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return rows [n, dim] of each embedding name, as ``FlexEmbeddingCollection.forward``."""
        return cast(dict[str, JaggedTensor], self._output(features))

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._module.configs)

    def need_indices(self) -> bool:
        return self._module.need_indices

    def embedding_dim(self) -> int:
        return self._module.tables[0].dim

    def embedding_names_by_table(self) -> list[list[str]]:
        outputs = iter(self._module.lookups)
        return [[next(outputs).output for _ in table.features] for table in self._module.tables]


class ReplacedEmbeddingBagCollection(_Replaced, EmbeddingBagCollectionInterface):
    """Stands for a ``torchrec.EmbeddingBagCollection``; see ``replace``."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return float32 [batch, sum of dims], as ``FlexEmbeddingBagCollection.forward``."""
        return cast(KeyedTensor, self._output(features))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._module.configs)

    def is_weighted(self) -> bool:
        return self._module.is_weighted
