"""``flexd.join_collections``: several collections with one engine, one connection and one ``flexd.prefetch``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace
from flexd.embedding.collection import EmbeddingCollection, EmbeddingTable
from flexd.embedding.features import FeatureMap
from flexd.embedding.jagged import Jagged
from flexd.embedding.prefetch.announced_input import may_be_input
from flexd.embedding.routed_input import RoutedInput
from flexd.embedding.row_optimizers import RowOptimizer
from flexd.embedding.serving.export import table_blocks
from flexd.embedding.shared_look_up import SharedLookUp

_EQUAL = ("layout", "average_gradients", "exchange", "comm_dtype", "replica_sums")
"""Arguments of the constructors that all collections must have alike."""


def join_collections(*collections: EmbeddingCollection) -> JoinedCollections:
    """Collective. Put the tables of several collections into one engine, and return the collection of all.

    ::

        items = flexd.EmbeddingCollection([...], optimizer=flexd.SGD(lr=0.1))
        ads = flexd.EmbeddingBagCollection([...], optimizer=flexd.Adagrad(lr=0.02))
        tables = flexd.join_collections(items, ads)
        connection = flexd.connect(tables, job="ranker")
        for batch in flexd.prefetch(loader, tables, features=lambda batch: (batch.history, batch.ads)):
            loss = model(items(batch.history), ads(batch.ads))
            loss.backward()
            tables.optimizer.step()

    Each collection looks up its own features as before, in an exchange of its own, or, with ``flexd.prefetch`` or
    ``tables((history, ads))``, in one for all. Values, optimizers and learning rates are those that each collection
    had. From now on they share one optimizer (``items.optimizer is tables.optimizer``, with a parameter group for each
    optimizer and rate), one push a step, one connection, one tap and one checkpoint, and ``close`` of one is that of
    all. Join them before training, and before schedulers and ``flexd.JoinedOptimizer`` are made. The joined tables are
    a submodule of the first collection, so that a model's ``state_dict`` has them once.

    Args:
        collections: of any kinds (``flexd.Embedding.collection`` and ``flexd.torchrec`` too), equal and in the same
            order on every rank. Replica slots and ``fast_memory_bytes`` add up.

    Raises:
        EmbeddingError: two collections have a table of one name, different settings, optimizers of one kind that
            differ in more than ``lr``, or steps, taps or connections of their own; nothing is changed.
    """
    _check(collections)
    seed = collections[0].given_arguments["seed"]
    own_values = [member.engine.row_changes > 0 or member.given_arguments["seed"] != seed for member in collections]
    for member, own in zip(collections, own_values, strict=True):
        if not own:  # its memory is free before the joined tables need it
            member.engine.close(orderly=True)
    joined = JoinedCollections(collections)
    for member, own in zip(collections, own_values, strict=True):
        if own:
            for table in member.tables:
                for first_row, rows in table_blocks(member, table.name):
                    joined.load_rows(table.name, first_row, rows.to(joined.device), source=0)
            member.engine.close(orderly=True)
    joined.share_tables()
    return joined


class JoinedCollections(EmbeddingCollection):
    """The tables of several collections; see ``join_collections``.

    Attributes:
        members: the collections, in the order in which ``forward`` and ``flexd.prefetch`` take their inputs. Each is in
            the mode (``train()``, ``eval()``) of its own.
    """

    pools = True  # where a member does
    members: tuple[EmbeddingCollection, ...]
    _names: list[dict[str, str]]

    def __init__(self, members: Sequence[EmbeddingCollection]) -> None:
        self.__dict__["members"] = tuple(members)
        first = members[0].given_arguments
        self.__dict__["_names"] = names = _feature_names(members)
        arguments = {name: first[name] for name in _EQUAL}
        directories = [
            Path(given) for each in members if (given := each.given_arguments["slow_memory_dir"]) is not None
        ]
        fast = [member.given_arguments["fast_memory_bytes"] for member in members]
        super().__init__(
            [
                _with_own_optimizer(table, member, first["optimizer"], of_member)
                for member, of_member in zip(members, names, strict=True)
                for table in member.tables
            ],
            **arguments,
            optimizer=first["optimizer"],
            replica_slots=_added_slots([(member.keyspace, member.replica_slots) for member in members]),
            max_migration_bytes_per_step=max(m.given_arguments["max_migration_bytes_per_step"] for m in members),
            fast_memory_bytes=None if fast[0] is None else sum(fast),
            # The files of the members are in use until their values are copied.
            slow_memory_dir=directories[0] / "joined" if directories else None,
            seed=first["seed"],
            device=members[0].device,
        )
        self._shared: SharedLookUp | None = None

    def _pooled_tables(self) -> frozenset[int]:
        pooled = [each.pools and hasattr(table, "answer") for each in self.members for table in each.tables]
        return frozenset(at for at, pools in enumerate(pooled) if pools)

    def share_tables(self) -> None:
        """Local. Let the members read these tables."""
        first_table = 0
        for number, member in enumerate(self.members):
            tables = range(first_table, first_table + len(member.tables))
            features = [
                member.tables[at - first_table].feature_names if at in tables else () for at in range(len(self.tables))
            ]
            first_table = tables.stop
            for name in (
                "engine", "optimizer", "traffic", "layout", "rank", "_groups", "keyspace", "replica_slots"
            ):  # fmt: skip
                setattr(member, name, getattr(self, name))
            member._features = FeatureMap(
                self.keyspace, features, self.rank, self.device, self.engine.answers, self.engine.stores[0].homes
            )
            member.tables = self.tables
            member.__dict__["_anchor"] = self.__dict__["_anchor"]
            member.__dict__["_joined"] = self
            if number == 0:
                member.add_module("joined", self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what each member returns for its input, from one look-up for all.

        Args:
            inputs: one for each of ``members``; no features: ``{}``.

        Raises:
            EmbeddingError: on every rank, see ``EmbeddingCollection.forward``.
        """
        self._begin(inputs, self.members[0].training)
        if isinstance(inputs, tuple | list):
            return [member(given) for member, given in zip(self.members, inputs, strict=True)]
        raise AssertionError("the look-up refuses other inputs")

    def part_of(self, member: EmbeddingCollection, given: Any, *, usable: bool) -> RoutedInput | None:
        """Implement ``JoinedTables.part_of``."""
        number = next(at for at, each in enumerate(self.members) if each is member)
        mode = (torch.is_grad_enabled(), member.training, self.steps)
        shared, announced = self._shared, self.engine.hooks.announced
        if not usable:
            return None
        if shared is None or not shared.serves(number, given, mode):
            if not isinstance(announced, tuple | list) or len(announced) != len(self.members):
                return None
            if not may_be_input(given, announced[number], by_value=self.engine.hooks.by_value):
                return None
            shared = self._begin((*announced[:number], given, *announced[number + 1 :]), member.training)
        part = shared.share_of(number)
        if shared.all_taken:
            self._shared = None
        return part

    def observer_of(self, member: EmbeddingCollection) -> Callable[[Mapping[str, Jagged]], None] | None:
        """Implement ``JoinedTables.observer_of``."""
        observe = self.after_lookup
        if observe is None:
            return None
        names = self._names[next(at for at, each in enumerate(self.members) if each is member)]
        return lambda features: observe({names[name]: jagged for name, jagged in features.items()})

    def as_features(self, given: Any) -> dict[str, Jagged]:
        """Convert a tuple with the input of each member to ids by feature."""
        if not isinstance(given, tuple | list) or len(given) != len(self.members):
            what = f"{len(given)} inputs" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
            raise EmbeddingError(
                f"rank {self.rank}: {what} for {len(self.members)} joined collections",
                remedy="pass a tuple with one input for each of them, in the order of join_collections; {} for none",
            )
        return {
            names[name]: jagged
            for member, names, of_member in zip(self.members, self._names, given, strict=True)
            for name, jagged in member.as_features(of_member).items()
        }

    def factors_of(self, given: Any) -> Mapping[str, torch.Tensor]:
        return {
            names[name]: factors
            for member, names, of_member in zip(self.members, self._names, given, strict=True)
            for name, factors in member.factors_of(of_member).items()
        }

    def _begin(self, inputs: Any, training: bool) -> SharedLookUp:
        """Collective. Locate the rows of all members."""
        self._shared = None
        self.training = training
        mode = (torch.is_grad_enabled(), training, self.steps)
        routed = self._route(inputs)
        self._shared = SharedLookUp(self, self._features, self._names, tuple(inputs), mode, routed)
        if routed.ahead is not None:  # with their rows the ranks learn whether these are those of the inputs
            self._shared.rows()
        return self._shared


def _check(collections: Sequence[EmbeddingCollection]) -> None:
    if not collections or len({id(each) for each in collections}) != len(collections):
        raise EmbeddingError(
            f"join_collections of {len(collections)} collections", remedy="give at least one, and each one once"
        )
    owner: dict[str, int] = {}
    kinds: dict[str, RowOptimizer] = {}
    first = collections[0]
    for number, each in enumerate(collections):
        where = f"join_collections: collection {number} ({', '.join(table.name for table in each.tables[:3])})"
        if each.__dict__["_joined"] is not None or isinstance(each, JoinedCollections):
            raise EmbeddingError(f"{where} was joined before", remedy="join all of them in one call")
        if not each.has_tables:
            raise EmbeddingError(f"{where} is on meta", remedy="call to_empty(device=...) of the model before")
        if each.steps or each.engine.passes or each.after_lookup is not None or each.engine.after_step is not None:
            raise EmbeddingError(
                f"{where} has trained {each.steps} steps, or has a tap or connection",
                remedy="join collections first; a checkpoint of each can be loaded into the joined one",
            )
        for table in each.tables:
            if table.name in owner:
                raise EmbeddingError(
                    f"{where}: collection {owner[table.name]} has a table {table.name!r} too",
                    remedy="give every table its own name",
                )
            owner[table.name] = number
            rule = table.optimizer or each.given_arguments["optimizer"]
            known = kinds.setdefault(rule.name, rule)
            if type(rule) is not type(known) or dataclasses.replace(rule, lr=known.lr) != known:  # type: ignore[type-var]
                raise EmbeddingError(
                    f"{where}: {rule!r}, an earlier table has {known!r}",
                    remedy="tables with one kind of optimizer may differ in lr alone; make the other settings equal",
                )
        for name in _EQUAL:
            mine, others = first.given_arguments[name], each.given_arguments[name]
            if mine != others:
                raise EmbeddingError(f"{where}: {name}={others!r}, collection 0 has {mine!r}", remedy="make them equal")
        if (first.given_arguments["fast_memory_bytes"] is None) != (each.given_arguments["fast_memory_bytes"] is None):
            raise EmbeddingError(
                f"{where}: fast_memory_bytes={each.given_arguments['fast_memory_bytes']}, collection 0 has "
                f"{first.given_arguments['fast_memory_bytes']}",
                remedy="give all of them fast_memory_bytes, or none",
            )
        if each.device != first.device:
            raise EmbeddingError(
                f"{where} is on {each.device}, collection 0 on {first.device}", remedy="use one device"
            )


def _feature_names(members: Sequence[EmbeddingCollection]) -> list[dict[str, str]]:
    """Return for each member: name of a feature -> its name among all, which no other member has."""
    taken: set[str] = set()
    names = []
    for number, member in enumerate(members):
        of_member = {
            name: f"{number}/{name}" if name in taken else name
            for table in member.tables
            for name in table.feature_names
        }
        taken |= set(of_member.values())
        names.append(of_member)
    return names


def _with_own_optimizer(
    table: EmbeddingTable, member: EmbeddingCollection, first: Any, names: Mapping[str, str]
) -> EmbeddingTable:
    own = member.given_arguments["optimizer"]
    rule = table.optimizer or (None if own == first else own)
    features = tuple(names[name] for name in table.feature_names)
    return dataclasses.replace(table, features=features, optimizer=rule)


def _added_slots(of_members: Sequence[tuple[KeySpace, Sequence[int]]]) -> list[int]:
    """Return the sums, over the dim-groups of members, for the joined dim-groups in the order of their first table."""
    slots: dict[tuple[int, str, str], int] = {}
    for keyspace, counts in of_members:
        for table in keyspace.tables:
            slots.setdefault((table.dim, table.dtype, table.optimizer), 0)
        for group, count in zip(keyspace.groups, counts, strict=True):
            slots[group.dim, group.dtype, group.optimizer] += count
    return list(slots.values())
