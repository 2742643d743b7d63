"""Jagged features: their input and output, their ids as one tensor of addresses, and rows back to features."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace
from flexd.core.sharding_types import NO_POOLED, PooledTables
from flexd.embedding import devices
from flexd.embedding.exchange.route import BagIds, FeatureKeys, UnresolvedIds
from flexd.embedding.store.store import DeviceHomes


@dataclass(frozen=True)
class Jagged:
    """``values`` [n] row ids (input) or [n, dim] rows (output), and int64 ``lengths`` [batch] that sum to n.

    Raises:
        EmbeddingError: lengths are not a 1-d integer tensor, or ``values`` is a scalar.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() < 1:
            raise EmbeddingError("jagged values are a scalar", remedy="pass a tensor of shape [n]")
        if self.lengths.dim() != 1 or self.lengths.is_floating_point():
            raise EmbeddingError(
                f"jagged lengths have shape {tuple(self.lengths.shape)} and dtype {self.lengths.dtype}",
                remedy="pass one integer length per sample",
            )

    @staticmethod
    def checked(values: torch.Tensor, lengths: torch.Tensor) -> Jagged:
        """Make one of tensors that are known to fit: a look-up makes one for each of thousands of features."""
        jagged = object.__new__(Jagged)
        jagged.__dict__["values"], jagged.__dict__["lengths"] = values, lengths
        return jagged

    @staticmethod
    def from_offsets(values: torch.Tensor, offsets: torch.Tensor) -> Jagged:
        """Convert from integer ``offsets`` [batch + 1], ascending from 0 to n."""
        return Jagged(values, offsets[1:] - offsets[:-1])

    @staticmethod
    def from_nested(nested: torch.Tensor) -> Jagged:
        """Convert a nested tensor [batch, jagged] or [batch, jagged, dim] of layout ``torch.jagged``.

        Raises:
            EmbeddingError: the tensor is not nested with that layout, or its second dimension is not the jagged one.
        """
        if not nested.is_nested or nested.layout != torch.jagged or nested.dim() < 2:
            raise EmbeddingError(
                f"a tensor of layout {nested.layout} and {nested.dim()} dimensions is not jagged",
                remedy="make it with torch.nested.nested_tensor([...], layout=torch.jagged), or pass Jagged",
            )
        if isinstance(nested.size(1), int):
            raise EmbeddingError(
                f"the nested tensor {tuple(nested.shape)} is jagged in another dimension than the second",
                remedy="one sample a row: [batch, jagged] or [batch, jagged, dim]",
            )
        # A view made by torch.nested.narrow has holes between its samples.
        packed = nested if nested.is_contiguous() else nested.contiguous()
        return Jagged.from_offsets(packed.values(), packed.offsets())  # type: ignore[attr-defined]

    def to_nested(self) -> torch.Tensor:
        """Return a view as a nested tensor [batch, jagged, ...] of layout ``torch.jagged``, with gradients."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    @property
    def offsets(self) -> torch.Tensor:
        """int64 [batch + 1]."""
        return torch.nn.functional.pad(self.lengths.to(torch.int64).cumsum(0), (1, 0))

    def to_padded(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output rows as [batch, length, dim], zero-padded or truncated, and a bool [batch, length] mask."""
        lengths = self.lengths.to(torch.int64)
        starts = self.offsets[:-1]
        at = torch.arange(length, device=lengths.device)
        mask = at < lengths.unsqueeze(1)
        index = torch.where(mask, starts.unsqueeze(1) + at, 0)
        if self.values.shape[0] == 0:
            return self.values.new_zeros((*index.shape, *self.values.shape[1:])), mask
        shape = (*mask.shape, *([1] * (self.values.dim() - 1)))
        return self.values[index].masked_fill(~mask.view(shape), 0), mask


@dataclass(frozen=True)
class RefusedInput:
    """In place of ids that a module refuses before its look-up: so that the look-up refuses them, on every rank.

    Attributes:
        error: what the look-up raises on this rank.
    """

    error: EmbeddingError


def as_jagged(given: object, name: str) -> Jagged:
    """Convert a ``Jagged``, a nested tensor of layout ``torch.jagged``, or a dense tensor [batch, ...] with equally
    many values per sample.

    Args:
        name: name of the feature, for error texts.

    Raises:
        EmbeddingError: ``given`` is of another type, or was refused before.
    """
    if isinstance(given, Jagged):
        return given
    if isinstance(given, RefusedInput):
        raise given.error
    if isinstance(given, torch.Tensor) and given.is_nested:
        return Jagged.from_nested(given)
    if isinstance(given, torch.Tensor) and given.layout == torch.strided and given.dim() > 0:
        each = torch.full((given.shape[0],), math.prod(given.shape[1:]), dtype=torch.int64, device=given.device)
        return Jagged.checked(given.reshape(-1), each)
    raise EmbeddingError(
        f"feature {name!r}: a {type(given).__name__} instead of a Jagged",
        remedy="pass Jagged(values, lengths), a nested tensor of layout torch.jagged, or a dense tensor [batch, ...]; "
        "flexd.Jagged.from_offsets(values, offsets) converts offsets",
    )


_ID_DTYPES = {torch.int64, torch.int32}
# Orders of features of which what is known stays, with bounds on the device.
_KEPT_ORDERS = 64


@dataclass(frozen=True)
class _Order:
    """The features of a batch, before their ids are known.

    Attributes:
        order: the features, those whose rows are fetched before the others, dim-group by dim-group.
        bounds: int64 [2, features] first key and last row of the table of each; two numbers if all read one table.
        groups: the features of each dim-group whose rows are fetched.
        ends: place in ``order`` at which each dim-group begins, and the number of those features.
        summed, summed_ends: the same of those that are pooled at the owner.
        unbounded: int64 [features] number of the table of unbounded ids of each, -1 of one of another
            table; None: there is none of such tables.
    """

    order: list[str]
    bounds: torch.Tensor | tuple[int, int]
    groups: list[list[str]]
    ends: list[int]
    summed: list[list[str]]
    summed_ends: list[int]
    unbounded: torch.Tensor | None


class FeatureMap:
    """Maps features to tables and checks their ids.

    Args:
        features: the feature names of each table, in the order of ``keyspace.tables``.
        pooling_at: of the tables.
        homes: map of keys to addresses; None: addresses are keys.
        unbounded: of tables of unbounded ids, by their index in ``keyspace.tables``: their number in ``IdSets.tables``.

    Raises:
        EmbeddingError: two tables read the same feature.
    """

    def __init__(
        self,
        keyspace: KeySpace,
        features: Sequence[Sequence[str]],
        rank: int,
        device: torch.device,
        pooling_at: PooledTables = NO_POOLED,
        homes: DeviceHomes | None = None,
        unbounded: Mapping[int, int] | None = None,
    ) -> None:
        self._keyspace = keyspace
        self._unbounded = unbounded or {}
        self._homes = homes
        self._rank = rank
        self._device = device
        self._group_of = {table: g for g, group in enumerate(keyspace.groups) for table in group.tables}
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._orders: dict[tuple[tuple[str, ...], frozenset[str]], _Order] = {}
        self.table_of: dict[str, int] = {}
        for table, names in enumerate(features):
            for name in names:
                if name in self.table_of:
                    owners = (keyspace.tables[self.table_of[name]].name, keyspace.tables[table].name)
                    raise EmbeddingError(
                        f"feature {name!r} is read by tables {owners[0]!r} and {owners[1]!r}",
                        remedy="give each feature one table",
                    )
                self.table_of[name] = table
        self._summed = frozenset(name for name, table in self.table_of.items() if table in pooling_at.at_owner)

    def keys(self, features: Mapping[str, Jagged], weighted: Collection[str] = ()) -> FeatureKeys:
        """Convert ids to keys, and check them without waiting for the device: any faulty number makes ``faulty`` true.

        Args:
            weighted: features that have a factor for each id, which are pooled at the requester.

        Raises:
            EmbeddingError: unknown feature, or ids of a wrong dtype, shape or device.
        """
        known = self._known(tuple(features), self._summed.difference(weighted))
        if not known.order:
            return self.no_features()
        ordered = [features[name] for name in known.order]
        values = [one.values for one in ordered]
        ids = self._joined_ids(features, values)
        sizes = _sizes(values)
        on_device = devices.uploaded(sizes, self._device)
        unresolved: UnresolvedIds | None = None
        if known.unbounded is not None:
            numbers_of = known.unbounded.repeat_interleave(on_device, output_size=ids.shape[0])
            ours = numbers_of >= 0
            of_tables = [0] * len(self._unbounded)
            for name in filter(self._is_unbounded, known.order):
                of_tables[self._unbounded[self.table_of[name]]] += len(features[name].values)
            places = torch.nonzero_static(ours, size=sum(of_tables)).view(-1)
            unresolved = UnresolvedIds(
                ids.index_select(0, places), numbers_of.index_select(0, places), places, of_tables
            )
            ids = ids.masked_fill(ours, 0)
        if isinstance(known.bounds, torch.Tensor):
            firsts, rows = known.bounds.repeat_interleave(on_device, dim=1, output_size=ids.shape[0])
            inside = ids.clamp(self._zero, rows)
            keys = inside + firsts
        else:
            first, last_row = known.bounds
            inside = ids.clamp(0, last_row)
            keys = inside + first
        if self._homes is not None:
            keys = self._homes.addresses(keys)
        faults = [inside != ids, *self._length_faults(ordered, on_device)]
        ends = [0, *accumulate(sizes)]
        numbers, of_bags = (
            [ends[end] - ends[first] for first, end in pairwise(places)] for places in (known.ends, known.summed_ends)
        )
        found = FeatureKeys(
            known.order[: known.ends[-1]], keys, torch.cat(faults).any(), numbers, unresolved=unresolved
        )
        if not sum(map(len, known.summed)):
            return found
        rows = ends[known.ends[-1]]
        return replace(found, keys=keys[:rows], bags=self._bag_ids(keys[rows:], known, of_bags, features))

    def _joined_ids(self, features: Mapping[str, Jagged], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return int64 [n], all ids. There may be thousands of features: what joining them shows is not looked up at
        each of them.

        Raises:
            EmbeddingError: ids of a wrong dtype, shape or device.
        """
        dtypes = {ids.dtype for ids in values}
        fault: RuntimeError | None = None
        if dtypes <= _ID_DTYPES:
            try:
                ids = _joined(values, dtypes)
                if ids.ndim == 1 and ids.device == self._device:
                    return ids
            except RuntimeError as error:  # of several devices or shapes, which are named below
                fault = error
        for name, jagged in features.items():
            ids, where = jagged.values, f"rank {self._rank}, feature {name!r}"
            if ids.dtype not in _ID_DTYPES or ids.dim() != 1:
                raise EmbeddingError(
                    f"{where}: ids of dtype {ids.dtype} and shape {tuple(ids.shape)}",
                    remedy="pass int64 or int32 ids of shape [n]",
                )
            if ids.device != self._device:
                raise EmbeddingError(
                    f"{where}: ids on {ids.device}, the tables are on {self._device}",
                    remedy=f"move the batch to {self._device}",
                )
        raise fault or AssertionError("ids that cannot be joined")

    def summed_by_group(self, names: Iterable[str], order: Sequence[str]) -> list[list[str]]:
        """Return the features of a batch that were pooled at the owner, by dim-group in the order of
        ``FeatureKeys.bags``.

        Args:
            names: all features of the batch, in their order.
            order: those whose rows were fetched.
        """
        every = tuple(names)
        return self._known(every, frozenset(every).difference(order)).summed

    def _bag_ids(
        self,
        keys: torch.Tensor,
        known: _Order,
        numbers: list[int],
        features: Mapping[str, Jagged],
    ) -> BagIds:
        """Return the ids of features that are pooled at the owner, whose lengths may be faulty."""
        names = [name for of_group in known.summed for name in of_group]
        lengths = _joined([features[name].lengths for name in names])
        bags = [sum(features[name].lengths.shape[0] for name in of_group) for of_group in known.summed]
        places = torch.arange(keys.shape[0], device=keys.device)
        return BagIds(keys, torch.searchsorted(lengths.cumsum(0), places, right=True), numbers, bags)

    def _known(self, names: tuple[str, ...], summed: frozenset[str] = frozenset()) -> _Order:
        """Return what is known of features in the order of a batch.

        Raises:
            EmbeddingError: unknown feature.
        """
        known = self._orders.get((names, summed))
        if known is None:
            for name in names:
                if name not in self.table_of:
                    raise EmbeddingError(
                        f"rank {self._rank}: no table reads feature {name!r}",
                        remedy=f"one of {', '.join(sorted(self.table_of))}",
                    )
            order = sorted(names, key=lambda name: (name in summed, self._group_of[self.table_of[name]]))
            tables = [self.table_of[name] for name in order]
            firsts = [int(self._keyspace.first_key[table]) for table in tables]
            last_rows = [self._keyspace.tables[table].rows - 1 for table in tables]
            # Until they have rows of their own, ids are those of the shared row.
            firsts = [
                first + last * (table in self._unbounded)
                for first, last, table in zip(firsts, last_rows, tables, strict=True)
            ]
            unbounded: torch.Tensor | None = None
            if not self._unbounded.keys().isdisjoint(tables):
                unbounded = torch.tensor([self._unbounded.get(t, -1) for t in tables], device=self._device)
            bounds: torch.Tensor | tuple[int, int]
            if len(set(tables)) == 1:
                bounds = firsts[0], last_rows[0]
            else:
                bounds = torch.tensor([firsts, last_rows], dtype=torch.int64, device=self._device)
            groups = self.by_group([name for name in order if name not in summed])
            of_bags = self.by_group([name for name in order if name in summed])
            ends = [0, *accumulate(map(len, groups))]
            summed_ends = list(accumulate(map(len, of_bags), initial=ends[-1]))
            known = _Order(order, bounds, groups, ends, of_bags, summed_ends, unbounded)
            if len(self._orders) >= _KEPT_ORDERS:
                self._orders.clear()
            self._orders[names, summed] = known
        return known

    def _length_faults(self, features: Sequence[Jagged], ids: torch.Tensor) -> list[torch.Tensor]:
        """Return bool tensors, true where a length is negative, and where the lengths of a feature do not sum to its
        ids.

        Args:
            ids: int64 [features], numbers of ids.
        """
        of_features = [one.lengths for one in features]
        counts = _sizes(of_features)
        lengths = _joined(of_features)
        faults = [lengths < 0]
        if len(set(counts)) == 1:
            sums = lengths.view(len(features), -1).sum(dim=1)
        else:
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            places = devices.uploaded([0, *accumulate(counts)], self._device)
            sums = ends.index_select(0, places).diff()
        faults.append(sums != ids)
        return faults

    def _is_unbounded(self, name: str) -> bool:
        return self.table_of[name] in self._unbounded

    def raise_fault(self, features: Mapping[str, Jagged]) -> None:
        """Read the numbers of features whose keys were ``faulty``. Waits for the device.

        Raises:
            EmbeddingError: names the first feature with an id out of range, or lengths that do not fit its ids.
        """
        for name, jagged in features.items():
            spec = self._keyspace.tables[self.table_of[name]]
            where, ids, lengths = f"rank {self._rank}, feature {name!r}", jagged.values, jagged.lengths
            if ids.numel() and not self._is_unbounded(name):
                lowest, highest = (int(bound) for bound in torch.aminmax(ids))
                if lowest < 0 or highest >= spec.rows:
                    raise EmbeddingError(
                        f"{where}: row {lowest if lowest < 0 else highest} of table {spec.name!r} is outside "
                        f"0..{spec.rows - 1}",
                        remedy="check the id mapping of the data loader, or enlarge the table",
                    )
            lowest, total = (int(lengths.min()), int(lengths.sum())) if lengths.numel() else (0, 0)
            if lowest < 0 or total != ids.shape[0]:
                raise EmbeddingError(
                    f"{where}: lengths from {lowest} on sum to {total}, for {ids.shape[0]} ids",
                    remedy="lengths are not negative and sum to the number of ids",
                )

    def no_features(self) -> FeatureKeys:
        """Return the keys of an input without features."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return FeatureKeys([], none, None, [0] * len(self._keyspace.groups))

    def split(self, features: Mapping[str, Jagged], rows: Sequence[torch.Tensor]) -> dict[str, Jagged]:
        """Split [n, dim] rows of each dim-group into rows by feature, with the lengths of the input."""
        out: dict[str, Jagged] = {}
        for names, part in zip(self._known(tuple(features)).groups, rows, strict=False):  # sums of bags may follow
            if names:
                given = [features[name] for name in names]
                sizes = _sizes([one.values for one in given])
                ids = sum(sizes)
                pieces = (part if part.shape[0] == ids else part[:ids]).split_with_sizes(sizes)
                out |= zip(names, map(Jagged.checked, pieces, [one.lengths for one in given]), strict=True)
        return out

    def by_group(self, order: Sequence[str]) -> list[list[str]]:
        """Return the features of each dim-group, in the given order."""
        names: list[list[str]] = [[] for _ in self._keyspace.groups]
        for name in order:
            names[self._group_of[self.table_of[name]]].append(name)
        return names


def _sizes(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of elements of each tensor: of one dimension, so that it takes half the time of its shape."""
    return list(map(torch.Tensor.numel, parts))


def _joined(parts: Sequence[torch.Tensor], dtypes: Collection[torch.dtype] | None = None) -> torch.Tensor:
    """Concatenate integer tensors as int64, with one kernel if they have one dtype.

    Args:
        dtypes: theirs; None: not known.
    """
    if len({part.dtype for part in parts} if dtypes is None else dtypes) > 1:
        parts = [part.to(torch.int64) for part in parts]
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(torch.int64)
