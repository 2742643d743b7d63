"""``flexd.EmbeddingCollection``: un-pooled look-ups in tables that are sharded over all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import RankLayout
from flexd.core.sharding_types import OWNER, REQUESTER, PooledTables
from flexd.core.step_phases import StepPhase
from flexd.embedding.devices import allocated_device, memory_bytes
from flexd.embedding.embedding_table import UNBOUNDED, EmbeddingTable
from flexd.embedding.engine import RowEngine
from flexd.embedding.exchange.calls import PhaseMeter, in_phase
from flexd.embedding.exchange.collectives import Traffic
from flexd.embedding.exchange.process_groups import (
    ChainGroups,
    Setting,
    check_same_settings,
    layout_from_environment,
    rows_of_tables,
    seed_of_tables,
)
from flexd.embedding.exchange.route import FeatureKeys, LookedUpRows, Route
from flexd.embedding.features import FeatureMap, Jagged, as_jagged
from flexd.embedding.optimizer_handle import FusedOptimizer
from flexd.embedding.pending_passes import make_room
from flexd.embedding.row_optimizers import SGD, RowOptimizer
from flexd.embedding.step import AnchorParameter, ForwardPass, LookupFunction, RoutedInput, clip_grad_norm_
from flexd.embedding.store.store import TORCH_DTYPES
from flexd.embedding.table_access import TableAccess

if TYPE_CHECKING:
    from flexd.embedding.ids.unbounded_ids import UnboundedIds
    from flexd.embedding.prefetch.announced_input import InputValues
    from flexd.embedding.store.slow.tiered_storage import TieredStorage
    from flexd.embedding.table_rules import TableRules
    from flexd.embedding.tuning import Tuning

# Of a rank's memory, for copies.
_COPIES_SHARE = 0.01

JaggedLike = Jagged | torch.Tensor
"""Ids of one feature: ``Jagged``, a nested tensor of layout ``torch.jagged``, or a dense tensor."""


class EmbeddingCollection(TableAccess):
    """Un-pooled look-ups in tables sharded over all ranks, with hot rows replicated according to the daemon's plan.

    ``forward``, ``optimizer.step`` and ``load_state_dict`` are collective: every rank calls them equally often and in
    the same order, also with empty input. If a rank dies, hangs or calls more or less often, the others raise
    ``CollectiveError`` within the process group's timeout (or gloo ends the process with "collective mismatch").
    Gradients that are not finite are applied to their rows, as in torch.

    Chunks of row migrations are applied at the start of a forward pass that no unstepped backward pass depends on.
    Without a daemon (``flexd.connect``) no row has replicas and the module is a two-hop row-wise sharded embedding.

    Args:
        tables: equal on all ranks, in the same order as in the daemon's configuration.
        optimizer: optimizer of all rows; ``self.optimizer.step()`` steps it.
        layout: nodes x local ranks; default from torchrun's ``LOCAL_WORLD_SIZE`` (one node without it).
        copies_memory_bytes: memory of each rank for copies of other ranks' rows, with optimizer state where they are
            trained: plans use no more. Default: 1 % of the device's memory (on a CPU of the rank's part of the host's,
            or of what its container may use).
            Each dim-group, and the read-only tables in it by themselves, has room for as much, or for all its rows, so
            that a plan may use the memory where a byte saves most time.
        replica_slots: replica slots of each rank, one number per dim-group, instead of as many as
            ``copies_memory_bytes`` holds.
        average_gradients: divide gradients by the world size, as ``DistributedDataParallel`` does.
        exchange: "auto" (the one of these whose steps take less time, measured from time to time, see ``tuning``; it
            changes between two steps and without any effect on the result), "chain" (two hops: node owner, then home)
            or "direct" (every rank requests from every home).
        comm_dtype: "float32", "float16" or "bfloat16", the dtype in which rows and gradients are sent; default (None)
            each table's own. Of a list the fastest is chosen as with exchanges, beginning with the first. Gradients are
            added in float32 or wider, and rows are rounded at every read, so that training does not depend on the
            placement. The daemon is told of the first.
        max_migration_bytes_per_step: cap on copied rows at one step (a larger chunk is applied alone).
        fast_memory_bytes: of home rows that a rank keeps in fast memory, with optimizer state; the others are in slow
            memory, and come in when a step needs them. Default: all rows are fast. It does not change the result.
        slow_memory_dir: directory of a rank's file of cold rows, on a disk of its own machine; default: host memory.
        rules: sharding types and pooling places that ``flexd shard --for flexd`` planned, instead of those of
            ``tables``.
        full_state_dict: ``state_dict()``, then collective, has whole tables with their optimizer state on rank 0, in
            host memory, and nothing of them on other ranks: for frameworks that write rank 0's and load it on all. At
            most 16 GiB. Any number of ranks can load it, with or without this.
        seed: seed of the initial values; the same seed gives the same tables on any number of ranks.
        device: of the tables; default ``torch.get_default_device()``. In a model that is constructed on ``meta`` give
            it: the tables of a rank are made at once, with their initial values.

    Raises:
        TopologyError: layout and process group or ``rules`` disagree, or ranks have different tables or settings.
        EmbeddingError: two tables read the same feature, memory or slots for copies are malformed, a table is pooled
            at the owner, ``rules`` are not of these tables, the device is ``meta``, or whole tables are too large for
            ``full_state_dict``.
    """

    pools: ClassVar[bool] = False
    """True if look-ups return one vector per bag, so that tables can be pooled at the owner."""

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        *,
        optimizer: RowOptimizer | None = None,
        layout: RankLayout | None = None,
        copies_memory_bytes: int | None = None,
        replica_slots: Sequence[int] | None = None,
        average_gradients: bool = True,
        exchange: str = "auto",
        comm_dtype: str | Sequence[str | None] | None = None,
        max_migration_bytes_per_step: int = 2**20,
        fast_memory_bytes: int | None = None,
        slow_memory_dir: str | os.PathLike[str] | None = None,
        rules: TableRules | str | Path | None = None,
        full_state_dict: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.device = allocated_device(device)
        if self.device.type == "meta":
            raise EmbeddingError(
                "tables on meta have no values", remedy="give the collection the device of its tables: device=..."
            )
        row_optimizer = optimizer or SGD()
        planned = None if rules is None else _rules_of(rules)
        self.tables = tuple(tables if planned is None else planned.apply(tables))
        optimizers = [table.optimizer or row_optimizer for table in tables]
        self.keyspace = KeySpace(
            [
                TableSpec(t.name, t.rows, t.dim, t.dtype, of_table.name, t.sharding)
                for t, of_table in zip(self.tables, optimizers, strict=True)
            ],
            [table.name for table in self.tables if not table.trainable],
        )
        tiered_storage = _tiered_storage(fast_memory_bytes, slow_memory_dir, optimizers)
        self.given_exchange = exchange
        self._outputs = {
            name: TORCH_DTYPES[table.output_dtype]
            for table in self.tables
            if table.output_dtype is not None
            for name in table.feature_names
        }
        self.full_state_dict = full_state_dict
        if full_state_dict:
            from flexd.embedding.checkpoint.full_state import check_full_size

            check_full_size(self.keyspace)
        self._seed = seed
        self._initial = {at for at, table in enumerate(self.tables) if not table.trainable}
        self.after_lookup: Callable[[LookedUpRows], None] | None = None
        """Called with the rows of every forward pass for training, after its look-up; must not raise."""
        # The innermost of such contexts holds: no other tensor is made on the caller's default device.
        with torch.device("cpu"):
            settings = exchange, comm_dtype, average_gradients, max_migration_bytes_per_step, full_state_dict
            self.traffic = Traffic()
            self.traffic.phases = PhaseMeter(self.device)
            self._groups = ChainGroups(layout or layout_from_environment(), self.traffic, self.device)
            self.layout = self._groups.layout
            self.rank = self._groups.rank
            if planned is not None:
                planned.check_layout(self.layout)
            self.copies_memory_bytes = self._copies_memory(copies_memory_bytes, replica_slots)
            """None: as much as the slots take."""
            self.replica_slots = self._slots(replica_slots)
            """Of each dim-group, as if no table were read only."""
            with self.traffic.uncounted():
                compared = [
                    rows_of_tables([(table.name, table.rows) for table in self.tables]),
                    Setting("tables", self.keyspace.digest),
                    seed_of_tables(self._seed),
                    Setting("settings", (settings, row_optimizer, self.tables)),
                ]
                check_same_settings(self._groups.world, compared, self.device)
            at_owner = [table for table in self.tables if getattr(table, "pooling_at", "requester") == "owner"]
            if at_owner and not self.pools:  # known to be so on every rank
                raise EmbeddingError(
                    "tables that are pooled at the owner in a collection without pooling: "
                    + ", ".join(table.name for table in at_owner[:5]),
                    remedy="make them flexd.EmbeddingTable, or the collection a flexd.EmbeddingBagCollection",
                )
            self.engine = RowEngine(
                self.keyspace,
                self._groups,
                self.traffic,
                replica_slots=self.replica_slots,
                exchange=exchange,
                gradient_scale=1.0 / self.layout.world_size if average_gradients else 1.0,
                max_migration_bytes_per_step=max_migration_bytes_per_step,
                device=self.device,
                comm_dtype=comm_dtype,
                tiered_storage=tiered_storage,
                keep_keys=any(table.lr is not None or table.optimizer is not None for table in self.tables),
                pooling_at=PooledTables(
                    frozenset(
                        at for at, table in enumerate(self.tables) if self.pools and hasattr(table, "pooling_at")
                    ),
                    frozenset(self.keyspace.index[table.name] for table in at_owner),
                ),
            )
            self.engine.ids = self._unbounded_ids()
            self._features = self._feature_map()
            self.table_of_feature = self._features.table_of
            """Index in ``tables`` of the table that each feature reads."""
            # Autograd calls backward because of the anchor, and schedulers use its parameter group. It is hidden from
            # named_parameters(), because DDP and dense optimizers must not use it.
            self.__dict__["_anchor"] = AnchorParameter.of(
                self.device, self.engine.gradients, self.engine.drop_gradients
            )
            self.optimizer = FusedOptimizer(self.__dict__["_anchor"], row_optimizer, self.engine, self.tables)
            self._fill_initial_values()

    def _feature_map(self) -> FeatureMap:
        names = [table.feature_names for table in self.tables]
        homes, ids = self.engine.stores[0].homes, self.engine.ids
        return FeatureMap(
            self.keyspace, names, self.rank, self.device, self.engine.pooling_at, homes,
            None if ids is None else ids.numbers,
        )  # fmt: skip

    def _unbounded_ids(self) -> UnboundedIds | None:
        found = [(at, table) for at, table in enumerate(self.tables) if table.ids == UNBOUNDED]
        if not found:
            return None
        from flexd.embedding.ids.id_sets import UnboundedTable  # loaded where a job has unbounded ids
        from flexd.embedding.ids.unbounded_ids import UnboundedIds

        tables = [
            UnboundedTable(table.name, at, table.rows, int(self.keyspace.first_key[at]), table.admit_after)
            for at, table in found
        ]
        return UnboundedIds(self.engine, tables, lambda: self.optimizer.initial_states)

    def pooling_at(self, table: str) -> str:
        """Return "requester" or "owner": how look-ups of a table are answered.

        Raises:
            KeyError: there is no such table.
        """
        return OWNER if self.keyspace.index[table] in self.engine.pooling_at.at_owner else REQUESTER

    @property
    def placement_version(self) -> int:
        """Version of the placement after the last applied chunk."""
        return self.engine.inbox.applied_version

    @property
    def exchange(self) -> str:
        """The exchange in use: "chain" or "direct"."""
        return self.engine.arm.exchange

    def tuning(self) -> Tuning:
        """Return the settings in use, and on rank 0 what was measured of the others. Not collective."""
        from flexd.embedding.tuning import Tuning

        tuner, arm = self.engine.step_tuner, self.engine.arm
        return Tuning(str(arm.in_use), str(arm.reason or "")) if tuner is None else tuner.tuning()

    @property
    def phases(self) -> PhaseMeter:
        """Time of the steps by phase."""
        return self.traffic.phases

    @property
    def steps(self) -> int:
        """Number of optimizer steps that pushed gradients; of look-ups for training if all tables are read only."""
        return self.engine.steps

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Mapping[str, JaggedLike]) -> dict[str, Jagged]:
        """Look up every given feature: ids [n] -> rows [n, dim] in the table's dtype, with the lengths of the input.

        A feature of the collection that is missing on this rank counts as empty; the result has the given features.
        In a compiled model this part is a graph break.

        Raises:
            EmbeddingError: on every rank, if on any rank an id is out of range, of a wrong dtype, or of an unknown
                feature. No row was looked up; the step may be repeated with other input.
        """
        routed = self._route(features)
        rows = self._rows(routed)  # may replace the features
        return self._as_output(self._features.split(routed.features, rows))

    def _as_output(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return values, or Jagged of them, by feature in the dtypes that tables ask for."""
        for name in self._outputs.keys() & found.keys():
            value, dtype = found[name], self._outputs[name]
            found[name] = (
                Jagged.checked(value.values.to(dtype), value.lengths) if isinstance(value, Jagged) else value.to(dtype)
            )
        return found

    def as_features(self, given: Any) -> dict[str, Jagged]:
        """Convert the input of ``forward`` to ids by feature. Local; adapters for other input types override it.

        Raises:
            EmbeddingError: the input is of another type.
        """
        if not isinstance(given, Mapping):
            raise EmbeddingError(
                f"rank {self.rank}: a {type(given).__name__} instead of features by name",
                remedy='pass {"feature": Jagged(values, lengths), ...}',
            )
        if {type(value) for value in given.values()} <= {Jagged}:
            return dict(given)
        return {name: as_jagged(value, name) for name, value in given.items()}

    @in_phase(StepPhase.IDS)
    def _route(self, given: Any, keys: Callable[[Mapping[str, Jagged]], FeatureKeys] | None = None) -> RoutedInput:
        """Collective. Convert and check the input, and locate its rows: a fault on one rank is an error on all.

        Args:
            keys: returns the checked keys of the features, by more than the input announced to ``prefetch``; with it,
                what was located before is not used.
        """
        if self._trains():
            make_room(self.engine)
        located = self.engine.claim(given, usable=keys is None, trains=self._trains())
        if located is None:
            return self._locate(given, keys)
        self._check_agreed(located.forward_pass.route, None, None)
        return located

    @in_phase(StepPhase.IDS)
    def _locate(self, given: Any, keys: Callable[[Mapping[str, Jagged]], FeatureKeys] | None) -> RoutedInput:
        """Collective. As ``_route``, for an input that was not located before."""
        self.engine.prepare()
        features: dict[str, Jagged] = {}
        found = self._features.no_features()
        error: Exception | None = None
        try:
            for each in self.engine.joined:
                each.check_given(given)
            features = self.as_features(given)
            found = self._keys_of(given, features) if keys is None else keys(features)
        except Exception as fault:  # any error: a rank that raised alone would leave the others waiting
            error = fault
        faulty_rank, trains = 0 if error is None else self.rank + 1, self._trains()
        forward_pass = self.engine.find(found, faulty_rank, trains=trains)
        self._check_agreed(forward_pass.route, error, features)
        return RoutedInput(features, found.order, forward_pass)

    def _check_agreed(self, route: Route, error: Exception | None, features: Mapping[str, Jagged] | None) -> None:
        agreement = route.agreement
        agreement.check_calls(self.keyspace.tables)
        if agreement.settings_differ:
            raise EmbeddingError(
                f"ranks updated their rows with different settings; rank {self.rank}: {self.engine.settings}",
                remedy="use equal settings, clipping and schedules on every rank, and start again from the last "
                "checkpoint: copies of a row have become unequal",
            )
        if route.agreement.fault:
            if route.agreement.fault == self.rank + 1 and error is None and features is not None:
                self._features.raise_fault(features)
            raise error or EmbeddingError(
                f"rank {route.agreement.fault - 1} has input that cannot be looked up",
                remedy=f"see the error of rank {route.agreement.fault - 1}",
            )

    def read(self, given: Any) -> InputValues:
        """Local. Return what of the input of a forward pass its look-up needs.

        Raises:
            EmbeddingError: the input cannot be looked up.
        """
        from flexd.embedding.prefetch.announced_input import InputValues

        return InputValues(self.as_features(given), self.weighted_features(given))

    def empty_input(self) -> Any:
        """Local. Return an input of ``forward`` without samples."""
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return {name: Jagged(none, none) for name in self.table_of_feature}

    def keys_of(self, values: InputValues) -> FeatureKeys:
        """Local. Return the keys of an input.

        Raises:
            EmbeddingError: the input cannot be looked up.
        """
        return self._features.keys(values.features, values.weighted)

    def _keys_of(self, given: Any, features: Mapping[str, Jagged]) -> FeatureKeys:
        return self._features.keys(features, self.weighted_features(given))

    def weighted_features(self, given: Any) -> frozenset[str]:
        """Local. Return the features that have a factor for each id in the input of ``forward`` itself."""
        del given
        return frozenset()

    def _rows(self, routed: RoutedInput, *, expand: bool = True) -> Sequence[torch.Tensor]:
        """Collective. Return the rows as ``RowEngine.fetch``; their gradients wait for ``optimizer.step``."""
        rows = self._fetch(routed.forward_pass, expand=expand)
        check = None if routed.changed is None else routed.changed()
        if check is not None:
            self.engine.drop_pass(routed.forward_pass)
            routed.replace_by(self._locate(routed.given, partial(self._checked_again, routed.given, check)))
            rows = self._fetch(routed.forward_pass, expand=expand)
        if self._trains() and not self.engine.trains:
            self.engine.count_read()
        looked_up, routed.forward_pass.looked_up = routed.forward_pass.looked_up, None
        if self.after_lookup is not None and looked_up is not None and self._trains():
            with self.engine.guard.publishing():  # the other ranks may be in the next exchange already
                self.after_lookup(looked_up)
        return rows

    def _checked_again(self, given: Any, check: Callable[[], None], features: Mapping[str, Jagged]) -> FeatureKeys:
        check()
        return self._keys_of(given, features)

    def _fetch(self, forward_pass: ForwardPass, *, expand: bool) -> Sequence[torch.Tensor]:
        if not self._trains() or not self.engine.trains:
            return self.engine.fetch(forward_pass, expand=expand)
        self.engine.open_pass(forward_pass)
        rows: tuple[torch.Tensor, ...] = LookupFunction.apply(  # type: ignore[no-untyped-call]
            self.__dict__["_anchor"], self.engine, forward_pass, expand
        )
        return rows

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.training

    def _copies_memory(self, given: int | None, slots: Sequence[int] | None) -> int | None:
        if given is not None and given < 0:
            raise EmbeddingError(f"copies_memory_bytes: {given}", remedy="a number of bytes, or None for the default")
        if given is None and slots is None:
            return int(_COPIES_SHARE * memory_bytes(self.device, self.layout.local_ranks))
        return given

    def _slots(self, given: Sequence[int] | None) -> tuple[int, ...]:
        groups = self.keyspace.whole.groups
        if given is None:
            memory = self.copies_memory_bytes or 0
            specs = [(group, self.keyspace.tables[group.tables[0]]) for group in groups]
            # With state, so that there is room for the same copies when a table is unfrozen.
            return tuple(min(group.rows, memory // (spec.row_bytes + spec.state_bytes)) for group, spec in specs)
        if len(given) != len(groups) or min(given) < 0:
            raise EmbeddingError(
                f"replica_slots: {list(given)} for {len(groups)} dim-groups", remedy="one number of slots per dim-group"
            )
        return tuple(map(int, given))

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        also: Iterable[torch.Tensor] = (),
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Collective. Clip the gradients of all rows and of ``also`` like ``torch.nn.utils.clip_grad_norm_``.

        Returns float64 [], their total norm. A row's gradient is summed over all passes and ranks (averaged with
        ``average_gradients``) and counts once for any number of copies. Call it after the last backward pass of a
        step, before ``optimizer.step`` or ``zero_grad``, on every rank. It costs one all-reduce of one number.

        Args:
            also: dense parameters, with gradients that are equal on all ranks (after DDP) or DTensors (FSDP2).

        Raises:
            EmbeddingError: the norm is not finite and ``error_if_nonfinite`` is set, or ``norm_type`` is not above 0.
        """
        summed = self.engine.gradients()
        total = clip_grad_norm_(
            [summed] if summed else [], max_norm, norm_type, also, error_if_nonfinite=error_if_nonfinite
        )
        return torch.tensor(total, dtype=torch.float64, device=self.device)

    def close(self) -> None:
        """Collective. End the prefetch pipeline and give the process groups back; the last collection of a job
        destroys them.

        Deferred gradients and passes without a step are dropped, and every later look-up, step or read of the tables is
        refused. Close the connection of ``flexd.connect`` before. A collection that is never closed keeps its groups
        for later ones until the process ends.

        Raises:
            CollectiveError: another rank did not close it within the timeout of the process group.
        """
        self.engine.close(orderly=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Close the collection. After an error on this rank, ranks that wait for it in a collective raise
        ``CollectiveError`` with its text; nothing is waited for, and the process groups are kept."""
        if isinstance(error, Exception):
            self.engine.groups.notices.publish(self.rank, error)
        self.engine.close(orderly=error_type is None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EmbeddingError(
            "a collection is one rank's part of distributed tables and cannot be copied or pickled",
            remedy="save state_dict() and load it into a collection constructed on every rank",
        )


# Loaded where a job has them, as what reads tables as wholes.
def _rules_of(rules: TableRules | str | Path) -> TableRules:
    from flexd.embedding.table_rules import TableRules

    return TableRules.read(rules)


def _tiered_storage(
    fast_memory_bytes: int | None, directory: str | os.PathLike[str] | None, optimizers: Sequence[RowOptimizer]
) -> TieredStorage | None:
    if fast_memory_bytes is None and directory is None:
        return None
    from flexd.embedding.store.slow.tiered_storage import TieredStorage

    return TieredStorage.of(fast_memory_bytes, directory, optimizers)
