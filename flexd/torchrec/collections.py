"""``FlexEmbeddingCollection`` and ``FlexEmbeddingBagCollection``: look-ups with TorchRec's types and configurations."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from flexd.core.errors import EmbeddingError
from flexd.torchrec.replaced_tables import BagsOfModule, ReplacedModule, ReplacedTables, RowsOfModule, replaced_module


class _OneModule(ReplacedTables):
    """The tables of one module, which is this one."""

    def __init__(self, module: ReplacedModule, device: torch.device | str | None, arguments: dict[str, Any]) -> None:
        self._module = module
        super().__init__([module], device=device, **arguments)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Any) -> Any:
        """Return rows [n, dim] or vectors [batch, sum of dims], float32, by embedding name.

        Raises:
            EmbeddingError: the ids cannot be looked up, or a key is missing, on any rank.
        """
        return super().forward(features)[self._module.path]


class FlexEmbeddingCollection(_OneModule, RowsOfModule):
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
        **arguments: Any,
    ) -> None:
        dims = sorted({config.embedding_dim for config in tables})
        if len(dims) != 1:
            raise EmbeddingError(
                f"tables of dims {dims} in one collection",
                remedy="one embedding_dim, as in TorchRec; flexd.EmbeddingCollection takes several",
            )
        module = replaced_module("", tables, {}, pooled=False, need_indices=need_indices)
        super().__init__(module, device, arguments)


class FlexEmbeddingBagCollection(_OneModule, BagsOfModule):
    """Replaces a sharded ``torchrec.EmbeddingBagCollection``; see ``FlexEmbeddingCollection``.

    Args:
        tables: tables of any dims, pooled by SUM or MEAN.
        is_weighted: the input's weights are factors of the rows; all tables must pool by SUM (see ``nn.EmbeddingBag``).
        device: argument of TorchRec's collection.
        arguments: the keyword arguments of ``flexd.EmbeddingBagCollection``, ``pooling_at`` among them.

    Raises:
        EmbeddingError: a configuration is not supported, or weights are combined with MEAN.
        TopologyError: see ``flexd.EmbeddingCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(replaced_module("", tables, {}, pooled=True, is_weighted=is_weighted), device, arguments)
