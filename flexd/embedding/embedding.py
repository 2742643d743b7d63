"""``flexd.Embedding``: one table of a collection with the interface of ``nn.Embedding``."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flexd.core.errors import EmbeddingError
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import BOUNDED, UNBOUNDED, EmbeddingTable
from flexd.embedding.features import RefusedInput
from flexd.embedding.optimizer_handle import FusedOptimizer
from flexd.embedding.store.store import TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Embedding(nn.Module):
    """Looks like ``nn.Embedding``; the table is sharded over all ranks, and each step of its optimizer is collective.

    ::

        items = flexd.Embedding(100_000, 64, padding_idx=0, name="items", optimizer=flexd.DenseAdam(1e-3))
        rows = items(ids)  # ids of any shape; rows of shape ids.shape + (64,)

    Each call is one exchange (``EmbeddingCollection``); all calls since the last step push their gradients together.
    Made in this way it has a collection of its own, at ``collection``. Several embeddings share one collection, and so
    one optimizer, one connection and one push a step, if they are made by ``flexd.embed_all``, or of one collection::

        tables = flexd.EmbeddingCollection([flexd.EmbeddingTable("items", 100_000, 64), ...])
        items = flexd.Embedding.of(tables, "items", padding_idx=0)

    Initial values are those of ``EmbeddingTable``, uniform in [-1/sqrt(rows), 1/sqrt(rows)), and not the N(0, 1) of
    ``nn.Embedding``; ``load_rows`` sets others. The row of ``padding_idx`` begins with zeros. It is looked up like
    any other row, once per rank, and its look-ups have no gradient.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: numbers of a row.
        padding_idx: row whose look-ups have no gradient; negative: counted from the end.
        name: of the table, in checkpoints and in the daemon's configuration.
        device: of the table; default: torch's default device.
        dtype: of the table; default: torch's default dtype.
        ids, admit_after: as of ``EmbeddingTable``: ``ids="unbounded"`` takes any int64 numbers as ids.
        settings: keyword arguments of ``EmbeddingCollection``: ``optimizer``, ``copies_memory_bytes``, ``seed``, ...

    Raises:
        EmbeddingError: ``padding_idx`` is no row, or given with unbounded ids; or the dtype is not supported.
    """

    collection: EmbeddingCollection
    """The collection that has the table."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        name: str = "embedding",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ids: str = BOUNDED,
        admit_after: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__()
        table = EmbeddingTable(
            name, num_embeddings, embedding_dim, dtype=dtype_name(dtype), ids=ids, admit_after=admit_after
        )
        self._look_up_in(EmbeddingCollection([table], device=device, **settings), table, padding_idx)
        self.register_collection()
        if self.padding_idx is not None:
            self.collection.set_rows(name, self.padding_idx, torch.zeros(1, embedding_dim, device="cpu"))

    @classmethod
    def from_pretrained(
        cls,
        weight: torch.Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        *,
        name: str = "embedding",
        **settings: Any,
    ) -> Self:
        """Collective. Return an embedding with the rows of ``weight`` [rows, dim] of rank 0, as
        ``nn.Embedding.from_pretrained``; with ``freeze`` they are read only.

        Args:
            weight: of equal shape, dtype and device on all ranks; others than rank 0 need no values.
            settings: as of the constructor.

        Raises:
            EmbeddingError: ``weight`` is no matrix, or as of the constructor.
        """
        if weight.dim() != 2:
            raise EmbeddingError(f"weight of shape {tuple(weight.shape)}", remedy="give [rows, dim]")
        rows, dim = weight.shape
        table = EmbeddingTable(name, rows, dim, dtype=dtype_name(weight.dtype), trainable=not freeze)
        collection = EmbeddingCollection([table], **{"device": weight.device, **settings})
        made = cls.of(collection, name, padding_idx)
        made.register_collection()
        collection.load_rows(name, 0, weight.detach(), source=0)
        return made

    @classmethod
    def of(cls, collection: EmbeddingCollection, table: str, padding_idx: int | None = None) -> Self:
        """Return an embedding that reads a table of ``collection``. The collection does not become its submodule: make
        it one of the model. Rows keep their values, that of ``padding_idx`` too.

        Raises:
            EmbeddingError: the table is unknown, or ``padding_idx`` is none of its rows.
        """
        if table not in collection.keyspace.index:
            raise EmbeddingError(f"no table {table!r}", remedy=f"one of {', '.join(collection.keyspace.index)}")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._look_up_in(collection, collection.tables[collection.keyspace.index[table]], padding_idx)
        return made

    def _look_up_in(self, collection: EmbeddingCollection, table: EmbeddingTable, padding_idx: int | None) -> None:
        if padding_idx is not None:
            if table.ids == UNBOUNDED:
                raise EmbeddingError(
                    f"table {table.name!r}: padding_idx={padding_idx} of unbounded ids",
                    remedy="look up the ids that are no padding alone: embedding.collection takes jagged ones",
                )
            if not -table.rows <= padding_idx < table.rows:
                raise EmbeddingError(
                    f"table {table.name!r}: padding_idx={padding_idx} of {table.rows} rows", remedy="one of its rows"
                )
            padding_idx %= table.rows
        self.num_embeddings, self.embedding_dim, self.padding_idx = table.rows, table.dim, padding_idx
        self.name = table.name
        self._feature = table.feature_names[0]
        # Changes of rows before it, the table, and writes to the table.
        self._gathered: tuple[int, torch.Tensor, int] | None = None
        self.__dict__["collection"] = collection

    def register_collection(self) -> None:
        """Make the collection a submodule of this embedding, so that it is in the ``state_dict`` of the model."""
        self.add_module("collection", self.__dict__.pop("collection"))

    @property
    def optimizer(self) -> FusedOptimizer:
        """Optimizer of all rows of the collection."""
        return self.collection.optimizer

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Collective. Look up int64 or int32 ids of any shape; return rows of shape ids.shape + (embedding_dim,).

        Gradients wait for ``optimizer.step``. In ``eval()`` or under ``no_grad()`` there are none. In a compiled model
        this part is a graph break.

        Raises:
            EmbeddingError: on every rank, if on any rank an id is out of range, or ids are no dense tensor of integers.
        """
        rows = self._rows(self._dense(ids))
        if self.padding_idx is not None and rows.requires_grad:
            rows = torch.where((ids == self.padding_idx).view(-1, 1), rows.detach(), rows)
        return rows.view(*ids.shape, self.embedding_dim)

    @property
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def weight(self) -> torch.Tensor:
        """Collective. Return the whole table, [num_embeddings, embedding_dim], on every rank.

        In training with gradients it is a look-up of all rows, for a softmax over them: every rank receives the table
        and returns a gradient of its size, and each row is in the next push. As in torch, the row of ``padding_idx``
        has a gradient here. Otherwise it is a copy without gradients, gathered again only after rows have changed, and
        held until then. To evaluate without the whole table on a rank, look up blocks of rows:
        ``embedding(torch.arange(first, last))``.

        Raises:
            EmbeddingError: the copy that is held was written to, or unbounded ids have the rows that would be trained.
        """
        if self.training and torch.is_grad_enabled():
            if self.collection.tables[self.collection.keyspace.index[self.name]].ids == UNBOUNDED:
                raise EmbeddingError(
                    f"table {self.name!r}: its weight cannot be trained, because unbounded ids have its rows",
                    remedy="look up ids, or read the weight under torch.no_grad(), and which ids have its rows with "
                    f"collection.ids_of({self.name!r}, rows)",
                )
            return self._rows(torch.arange(self.num_embeddings, device=self.collection.device))
        changes = self.collection.engine.row_changes
        if self._gathered is None or self._gathered[0] != changes:
            self._gathered = None  # no second table while it is gathered
            with torch.inference_mode(mode=False), torch.no_grad():  # else writes to it are not counted
                table = self.collection.gather_table(self.name)
            self._gathered = changes, table, table._version
        _, table, version = self._gathered
        if table._version != version:  # this rank alone cannot gather it again
            raise EmbeddingError(
                f"table {self.name!r}: its weight was written to, which changes no row",
                remedy="set rows with load_rows; to change a copy, clone() it first",
            )
        return table

    def _dense(self, ids: object) -> torch.Tensor | RefusedInput:
        if isinstance(ids, torch.Tensor) and not ids.is_nested and ids.layout == torch.strided:
            return ids if ids.dim() else ids.reshape(1)
        kind = f"a tensor of layout {ids.layout}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        remedy = (
            f"look jagged ids up in its collection: embedding.collection({{{self._feature!r}: ids}}), or pad them and "
            "give padding_idx"
        )
        return RefusedInput(
            EmbeddingError(f"table {self.name!r}: {kind} instead of a dense tensor of ids", remedy=remedy)
        )

    def _rows(self, ids: torch.Tensor | RefusedInput) -> torch.Tensor:
        self.collection.train(self.training)  # embeddings of one collection may be in different modes
        looked_up = self.collection({self._feature: ids})[self._feature]
        rows: torch.Tensor = looked_up.values
        return rows

    def load_rows(self, first_row: int, values: torch.Tensor | None, *, source: int | None = None) -> None:
        """Collective. Set rows from ``first_row`` on to ``values`` [n, embedding_dim], equal on every rank or given by
        rank ``source``.

        See ``EmbeddingCollection.load_rows``.
        """
        self.collection.load_rows(self.name, first_row, values, source=source)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Collective. Freeze or unfreeze the table (``EmbeddingCollection.freeze``)."""
        (self.collection.unfreeze if requires_grad else self.collection.freeze)(self.name)
        return self

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, name={self.name!r}"


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a table's dtype; of torch's default dtype for None.

    Raises:
        EmbeddingError: tables cannot have the dtype.
    """
    dtype = dtype or torch.get_default_dtype()
    if dtype not in DTYPE_NAMES:
        raise EmbeddingError(f"a table of {dtype}", remedy=f"one of {', '.join(TORCH_DTYPES)}")
    return DTYPE_NAMES[dtype]


def embed_all(
    model: nn.Module,
    *,
    names: Collection[str] | None = None,
    unbounded: Mapping[str, int] = MappingProxyType({}),
    **settings: Any,
) -> EmbeddingCollection:
    """Collective. Replace ``nn.Embedding`` modules of a model by ``flexd.Embedding`` of one collection, in place.

    ::

        tables = flexd.embed_all(model, names=["item_embedding"], optimizer=flexd.DenseAdam(1e-3))
        optimizer = flexd.JoinedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), tables.optimizer)

    Rows begin with the values of the modules on rank 0, as with ``DistributedDataParallel``; those of modules whose
    weight does not require gradients are read only. Each table has the path of
    its module as name; the first of the new modules has the collection as submodule. Call it after ``model.to(device)``
    and before the model is wrapped and dense optimizers are made.

    Args:
        names: paths of the modules to replace; default: all ``nn.Embedding`` modules, also small ones (positions, say),
            which are better left in the dense part.
        unbounded: those of them whose tables take any int64 numbers as ids, with the look-ups after which an id gets a
            row of its own (``EmbeddingTable.admit_after``). Their values are not loaded.
        settings: keyword arguments of ``EmbeddingCollection``, except tables and device.

    Raises:
        EmbeddingError: there is no such module, or one cannot be replaced: it is in a wrapper of the model, shares its
            weight, or has ``max_norm`` or ``scale_grad_by_freq``, or ``padding_idx`` and unbounded ids. The model is
            unchanged then.
    """
    modules = _modules_of(model, names)
    known = {path for paths in modules.values() for path in paths}
    if unknown := unbounded.keys() - known:
        raise EmbeddingError(
            f"embed_all: unbounded names {', '.join(sorted(unknown))}", remedy=f"one of {', '.join(sorted(known))}"
        )
    for module, paths in modules.items():
        _check(model, module, paths)
        if module.padding_idx is not None and not unbounded.keys().isdisjoint(paths):
            raise EmbeddingError(
                f"embed_all: {paths[0]} has padding_idx and unbounded ids", remedy="leave one of the two out"
            )
    devices = {module.weight.device for module in modules}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise EmbeddingError(
            f"embed_all: modules on {', '.join(sorted(map(str, devices)))}", remedy="move the model to one device first"
        )
    tables = [
        EmbeddingTable(
            paths[0], module.num_embeddings, module.embedding_dim, dtype=dtype_name(module.weight.dtype),
            trainable=module.weight.requires_grad, **_ids_of(paths, unbounded),
        )
        for module, paths in modules.items()
    ]  # fmt: skip
    collection = EmbeddingCollection(tables, device=devices.pop(), **settings)
    for module, paths in modules.items():
        if unbounded.keys().isdisjoint(paths):
            collection.load_rows(paths[0], 0, module.weight.detach(), source=0)
        embedding = Embedding.of(collection, paths[0], module.padding_idx).train(module.training)
        if paths[0] == tables[0].name:
            embedding.register_collection()
        for path in paths:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, embedding)
    return collection


def _ids_of(paths: list[str], unbounded: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of a table that say what its ids are."""
    after = next((unbounded[path] for path in paths if path in unbounded), None)
    return {} if after is None else {"ids": UNBOUNDED, "admit_after": after}


def _modules_of(model: nn.Module, names: Collection[str] | None) -> dict[nn.Embedding, list[str]]:
    if isinstance(model, DistributedDataParallel):
        raise EmbeddingError(
            "embed_all: the model is in DistributedDataParallel, which has its parameters already",
            remedy="call embed_all before wrapping the model",
        )
    every = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    unknown = [name for name in names or () if not isinstance(every.get(name), nn.Embedding)]
    # A subclass may look rows up in another way, so it must be named.
    chosen = [path for path, module in every.items() if type(module) is nn.Embedding] if names is None else list(names)
    if unknown or not chosen:
        known = ", ".join(path for path, module in every.items() if isinstance(module, nn.Embedding))
        raise EmbeddingError(
            f"embed_all: no nn.Embedding at {', '.join(unknown)}" if unknown else "embed_all: no nn.Embedding",
            remedy=f"one of {known}" if known else "make flexd.Embedding modules in the model",
        )
    modules: dict[nn.Embedding, list[str]] = {}
    for path in chosen:
        module = every[path]
        assert isinstance(module, nn.Embedding)  # noqa: S101
        modules[module] = [other for other, found in every.items() if found is module]
    return modules


def _check(model: nn.Module, module: nn.Embedding, paths: list[str]) -> None:
    where = f"embed_all: {paths[0]}"
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise EmbeddingError(f"{where} has max_norm or scale_grad_by_freq", remedy="not supported: leave them out")
    own = {f"{path}.weight" for path in paths}
    shared = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is module.weight and name not in own
    ]
    if shared:
        raise EmbeddingError(
            f"{where} shares its weight with {', '.join(shared)}",
            remedy="read the embedding's .weight in the forward pass instead",
        )
