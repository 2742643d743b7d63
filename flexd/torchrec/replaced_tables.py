"""``ReplacedTables``: the tables of all TorchRec collections of a model in one flexd collection.

One collection has one optimizer, one connection to the daemon, one loop of ``flexd.prefetch`` and one exchange a step
for any number of modules. Each module keeps its place in the model and reads its own part of a look-up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexd.core.errors import EmbeddingError
from flexd.embedding.bag_collection import EmbeddingBagCollection
from flexd.embedding.embedding_table import UNBOUNDED, EmbeddingTable
from flexd.embedding.features import FeatureMap, Jagged
from flexd.embedding.step import RoutedInput, in_backward_pass
from flexd.torchrec.configs import embedding_names, features_of, initialise, tables_of
from flexd.torchrec.inputs import (
    as_keyed_jagged,
    check_inverse,
    jagged_by_key,
    jagged_tensor,
    keyed_tensor,
    weights_by_key,
)


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


class RowsOfModule(EmbeddingCollectionInterface):
    """The interface of TorchRec's ``EmbeddingCollection`` over a ``ReplacedModule``."""

    _module: ReplacedModule

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._module.configs)

    def need_indices(self) -> bool:
        return self._module.need_indices

    def embedding_dim(self) -> int:
        return self._module.tables[0].dim

    def embedding_names_by_table(self) -> list[list[str]]:
        outputs = iter(self._module.lookups)
        return [[next(outputs).output for _ in table.features] for table in self._module.tables]


class BagsOfModule(EmbeddingBagCollectionInterface):
    """The interface of TorchRec's ``EmbeddingBagCollection`` over a ``ReplacedModule``."""

    _module: ReplacedModule

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return list(self._module.configs)

    def is_weighted(self) -> bool:
        return self._module.is_weighted


class ReplacedEmbeddingCollection(_Replaced, RowsOfModule):
    """Stands for a ``torchrec.EmbeddingCollection``; see ``replace``."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return rows [n, dim] of each embedding name, as ``FlexEmbeddingCollection.forward``."""
        return cast(dict[str, JaggedTensor], self._output(features))


class ReplacedEmbeddingBagCollection(_Replaced, BagsOfModule):
    """Stands for a ``torchrec.EmbeddingBagCollection``; see ``replace``."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return float32 [batch, sum of dims], as ``FlexEmbeddingBagCollection.forward``."""
        return cast(KeyedTensor, self._output(features))


Output: TypeAlias = "dict[str, JaggedTensor] | KeyedTensor"


@dataclass(frozen=True)
class Lookup:
    """One feature of one table.

    Attributes:
        feature: key of the ``KeyedJaggedTensor``.
        output: embedding name in the module's result.
        name: name of the feature in the flexd collection, which no other module has.
    """

    feature: str
    output: str
    name: str


@dataclass(frozen=True)
class ReplacedModule:
    """A TorchRec module that was replaced.

    Attributes:
        path: name of the module in the model, as in ``named_modules``.
        configs: its tables, with the names of TorchRec.
        tables: the same tables, in the same order, with their names in the flexd collection.
        lookups: in the order of the module's result.
        need_indices, is_weighted: arguments of TorchRec's collections.
    """

    path: str
    pooled: bool
    configs: tuple[BaseEmbeddingConfig, ...]
    tables: tuple[EmbeddingTable, ...]
    lookups: tuple[Lookup, ...]
    need_indices: bool = False
    is_weighted: bool = False

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.tables)


def replaced_module(
    path: str,
    configs: Sequence[BaseEmbeddingConfig],
    taken: Mapping[str, str],
    *,
    pooled: bool,
    need_indices: bool = False,
    is_weighted: bool = False,
    loaded: bool = False,
) -> ReplacedModule:
    """Name the tables and features of a module so that they differ from those of other modules.

    A table or feature keeps its name; if another module has one of that name it is called ``path/name``.

    Args:
        taken: name -> path of the module that has it, of all modules before.
        loaded: the values of the tables are loaded, so that ``init_fn`` is not needed.

    Raises:
        EmbeddingError: a configuration is not supported, or weights are combined with MEAN.
    """
    by_mean = [config.name for config in configs if getattr(config, "pooling", None) == PoolingType.MEAN]
    if is_weighted and by_mean:
        raise EmbeddingError(
            f"{path or 'a collection'} is weighted and has tables pooled by MEAN: {', '.join(by_mean)}",
            remedy="pool by SUM, with weights that sum to 1 in each bag",
        )

    def unique(name: str) -> str:
        return f"{path}/{name}" if name in taken else name

    tables, lookups = [], []
    for config, table, outputs in zip(
        configs, tables_of(configs, runs_init_fn=not loaded), embedding_names(configs), strict=True
    ):
        tables.append(
            dataclasses.replace(table, name=unique(config.name), features=tuple(unique(name) for name in outputs))
        )
        lookups += [
            Lookup(feature, output, unique(output))
            for feature, output in zip(features_of(config), outputs, strict=True)
        ]
    return ReplacedModule(path, pooled, tuple(configs), tuple(tables), tuple(lookups), need_indices, is_weighted)


@dataclass(frozen=True)
class _ModuleInput:
    module: ReplacedModule
    given: Any


@dataclass
class _SharedLookup:
    """A look-up for all modules, of which some have not taken their part.

    Attributes:
        given: the input, the same object for each module.
        mode: whether gradients are recorded, the mode of training, and the number of steps.
    """

    given: Any
    mode: tuple[bool, bool, int]
    outputs: dict[str, Output]


class ReplacedTables(EmbeddingBagCollection):
    """The tables that ``flexd.torchrec.replace`` returns, for ``flexd.connect``, ``flexd.prefetch``, ``flexd.Tap`` and
    checkpoints. Step its ``optimizer``.

    Args:
        modules: that use the tables.
        one_lookup: look up the rows of all modules when the first is called; they are called with the same object.
        loaded: names of tables whose initial values the caller loads.
        arguments: keyword arguments of ``flexd.EmbeddingBagCollection``.
    """

    def __init__(
        self,
        modules: Sequence[ReplacedModule],
        *,
        one_lookup: bool = True,
        loaded: frozenset[str] = frozenset(),
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        # Before the constructor, which makes the initial values.
        self.replaced = tuple(modules)
        """The TorchRec modules that were replaced, in the order of the model."""
        self._loaded = loaded
        super().__init__([table for module in modules for table in module.tables], seed=seed, **arguments)
        self._one_lookup = one_lookup
        self._shared: _SharedLookup | None = None
        self._in_state_dict = True

    def _fill_initial_values(self) -> None:
        super()._fill_initial_values()
        configs = [config for module in self.replaced for config in module.configs]
        initialise(self, configs, self._seed, skipped=self._loaded)
        self._loaded = frozenset()

    def forward(self, features: Any) -> dict[str, Output]:
        """Return the result of every replaced module for one ``KeyedJaggedTensor``, by path.

        Raises:
            EmbeddingError: see ``FlexEmbeddingCollection.forward``.
        """
        return self._look_up(self.replaced, features, features)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look_up(self, module: ReplacedModule, given: Any, *, training: bool) -> Output:
        """Return the result of one module, from the look-up that all modules share if there is one.

        Raises:
            EmbeddingError: with ``one_lookup`` a module was called with another object than the one before it, or
                not at all; or see ``FlexEmbeddingCollection.forward``.
        """
        self.training = training
        if len(self.replaced) == 1:
            return self._look_up([module], given, given)[module.path]
        if not self._one_lookup:
            return self._look_up([module], _ModuleInput(module, given), given)[module.path]
        mode, shared = (torch.is_grad_enabled(), training, self.steps), self._shared
        if shared is None or shared.given is not given or shared.mode != mode or module.path not in shared.outputs:
            if in_backward_pass():
                raise EmbeddingError(
                    f"rank {self.rank}: {module.path} is called again by a backward pass (activation checkpointing), "
                    "after the rows that modules share were looked up",
                    remedy="checkpoint what follows the collection, not the collection, or "
                    "replace(model, one_lookup=False)",
                )
            self.drop_lookup()
            if shared is not None and shared.mode == (True, True, self.steps):
                raise EmbeddingError(
                    f"rank {self.rank}: {module.path} is called with another input while {', '.join(shared.outputs)} "
                    "did not use the rows that were looked up for it",
                    remedy="call every replaced module once with the same KeyedJaggedTensor object in each pass, or "
                    "replace(model, one_lookup=False)",
                )
            outputs = self._look_up(self.replaced, given, given)
            # A look-up is a step where nothing is trained.
            shared = _SharedLookup(given, (*mode[:2], self.steps), outputs)
        output = shared.outputs.pop(module.path)
        self._shared = shared if shared.outputs else None
        return output

    def _look_up(self, modules: Sequence[ReplacedModule], routing: Any, given: Any) -> dict[str, Output]:
        routed = self._route(routing)
        rows = self._rows(routed, expand=False)
        kjt = as_keyed_jagged(given, [], self.rank)
        found = self._pool(routed, rows, self._weights(modules, kjt))
        with self.engine.guard.publishing():
            return {module.path: self._output(module, kjt, routed, found) for module in modules}

    def _output(self, module: ReplacedModule, kjt: Any, routed: RoutedInput, found: Mapping[str, Any]) -> Output:
        if module.pooled:
            return keyed_tensor(kjt, [(one.feature, one.output, found[one.name]) for one in module.lookups])
        return {
            one.output: jagged_tensor(routed.features[one.name], found[one.name].values, module.need_indices)
            for one in module.lookups
        }

    def as_features(self, given: Any) -> dict[str, Jagged]:
        """Convert a ``KeyedJaggedTensor`` to ids by feature, of one module or of all."""
        modules = self.replaced
        if isinstance(given, _ModuleInput):
            modules, given = (given.module,), given.given
        kjt = as_keyed_jagged(given, [one.feature for module in modules for one in module.lookups], self.rank)
        by_key = jagged_by_key(kjt)
        features = {one.name: by_key[one.feature] for module in modules for one in module.lookups}
        self._check_weights(features, self._weights(modules, kjt))
        for module in modules:
            if module.pooled:
                check_inverse(kjt, {one.feature: by_key[one.feature] for one in module.lookups}, self.rank)
        return features

    def empty_input(self) -> Any:
        keys = dict.fromkeys(one.feature for module in self.replaced for one in module.lookups)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return KeyedJaggedTensor(list(keys), none, lengths=none, weights=none.float())

    def weighted_features(self, given: Any) -> frozenset[str]:
        modules = (given.module,) if isinstance(given, _ModuleInput) else self.replaced
        return frozenset(one.name for module in modules if module.is_weighted for one in module.lookups)

    def _weights(self, modules: Sequence[ReplacedModule], kjt: Any) -> dict[str, torch.Tensor]:
        weighted = [module for module in modules if module.is_weighted]
        if not weighted:
            return {}
        by_key = weights_by_key(kjt)
        return {one.name: by_key[one.feature] for module in weighted for one in module.lookups}

    def _feature_map(self) -> FeatureMap:
        self._shared = None  # of other dim-groups
        return super()._feature_map()

    def drop_lookup(self) -> None:
        """Forget rows that were looked up and not taken: the tables are about to be replaced."""
        self._shared = None

    @contextmanager
    def left_out_of_state_dict(self) -> Iterator[None]:
        """Leave the tables out of the model's ``state_dict`` and ``load_state_dict``, which saves them otherwise."""
        self._in_state_dict = False
        try:
            yield
        finally:
            self._in_state_dict = True

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self._in_state_dict:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.drop_lookup()
        if self._in_state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args)


class _TablesOfModule(ReplacedTables):
    """The tables of one module, which is this one."""

    def __init__(
        self,
        module: ReplacedModule,
        device: torch.device | str | None,
        unbounded: Mapping[str, int] | None,
        arguments: dict[str, Any],
    ) -> None:
        unbounded, known = unbounded or {}, {table.name for table in module.tables}
        if unknown := unbounded.keys() - known:
            raise EmbeddingError(
                f"unbounded names {', '.join(sorted(unknown))}", remedy=f"one of {', '.join(sorted(known))}"
            )
        tables = tuple(
            dataclasses.replace(table, ids=UNBOUNDED, admit_after=unbounded[table.name])
            if table.name in unbounded else table for table in module.tables
        )  # fmt: skip
        module = self._module = dataclasses.replace(module, tables=tables)
        super().__init__([module], device=device, **arguments)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Any) -> Any:
        """Return rows [n, dim] or vectors [batch, sum of dims], float32, by embedding name.

        Raises:
            EmbeddingError: the ids cannot be looked up, or a key is missing, on any rank.
        """
        return super().forward(features)[self._module.path]


class FlexEmbeddingCollection(_TablesOfModule, RowsOfModule):
    """Replaces a sharded ``torchrec.EmbeddingCollection``, without ``DistributedModelParallel``.

    The training loop differs in one line: gradients wait for ``optimizer.step()``, where TorchRec's fused optimizers
    update inside ``backward()``. ``average_gradients`` is TorchRec's ``set_gradient_division``. Outputs are float32 for
    every data type of a table, as in TorchRec. ``state_dict`` has flexd's keys.

    Args:
        tables: tables of one ``embedding_dim``. Several tables may read a feature (then its outputs are named
            "feature@table"). ``init_fn`` is supported: see ``flexd.torchrec.configs``.
        device, need_indices: arguments of TorchRec's collection.
        unbounded: names of tables of unbounded ids, with their ``admit_after`` (``flexd.EmbeddingTable``).
        arguments: the keyword arguments of ``flexd.EmbeddingCollection``.

    Raises:
        EmbeddingError: tables have several dims, a configuration is not supported, or there is no such table.
        TopologyError: see ``flexd.EmbeddingCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        unbounded: Mapping[str, int] | None = None,
        **arguments: Any,
    ) -> None:
        dims = sorted({config.embedding_dim for config in tables})
        if len(dims) != 1:
            raise EmbeddingError(
                f"tables of dims {dims} in one collection",
                remedy="one embedding_dim, as in TorchRec; flexd.EmbeddingCollection takes several",
            )
        module = replaced_module("", tables, {}, pooled=False, need_indices=need_indices)
        super().__init__(module, device, unbounded, arguments)


class FlexEmbeddingBagCollection(_TablesOfModule, BagsOfModule):
    """Replaces a sharded ``torchrec.EmbeddingBagCollection``; see ``FlexEmbeddingCollection``.

    Args:
        tables: tables of any dims, pooled by SUM or MEAN.
        is_weighted: the input's weights are factors of the rows; all tables must pool by SUM (see ``nn.EmbeddingBag``).
        device: argument of TorchRec's collection.
        unbounded: as of ``FlexEmbeddingCollection``.
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
        unbounded: Mapping[str, int] | None = None,
        **arguments: Any,
    ) -> None:
        module = replaced_module("", tables, {}, pooled=True, is_weighted=is_weighted)
        super().__init__(module, device, unbounded, arguments)
