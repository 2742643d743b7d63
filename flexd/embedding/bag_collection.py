"""``flexd.EmbeddingBagCollection``: pooled look-ups with the rows, exchange and tiers of ``EmbeddingCollection``.

An ``EmbeddingTable`` among the tables is looked up un-pooled, in the same exchange. A table is pooled at
the requester or at the owner of its rows:

- *rows* are pooled on the requesting rank, from the distinct rows of the exchange and without expanding them. So a row
  crosses the network once per node and step for any number of bags, or not at all if it has copies.
- *sums* are made at the homes of the rows (``exchange/bag_exchange.py``): one vector for each bag and node of homes
  crosses the network, however many ids the bag has. Copies of rows are kept, and not used.

Migrations, prefetch pipeline, clipping and optimizers are those of un-pooled rows in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from flexd.core.errors import EmbeddingError
from flexd.core.sharding_types import DATA_PARALLEL, OWNER, REQUESTER
from flexd.embedding.collection import EmbeddingCollection, JaggedLike
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.exchange.bag_exchange import joined_offsets
from flexd.embedding.exchange.route import FeatureKeys
from flexd.embedding.features import Jagged
from flexd.embedding.step import RoutedInput

POOLINGS = ("sum", "mean")
UNPOOLED = "none"
POOLING_PLACES = (REQUESTER, OWNER)


@dataclass(frozen=True)
class EmbeddingBagTable(EmbeddingTable):
    """A table with look-ups that are pooled over each sample.

    Attributes:
        pooling: "sum" or "mean"; a bag without ids is zero in both.
        pooling_at: "requester" (each distinct row is sent once, and pooled where it is requested) or "owner" (added up
            at the homes: fewer bytes for bags of many ids, see docs/training.md; not those with a weight for each id).
            The result is the same. Plans list no rows of a table that is pooled at the owner.

    Raises:
        EmbeddingError: the pooling or its place is unknown.
    """

    pooling: str = "sum"
    pooling_at: str = "requester"

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, value, known in (
            ("pooling", self.pooling, POOLINGS),
            ("pooling_at", self.pooling_at, POOLING_PLACES),
        ):
            if value not in known:
                raise EmbeddingError(f"table {self.name!r}: {what} {value!r}", remedy=f"one of {', '.join(known)}")
        if self.pooling_at == "owner" and self.sharding == DATA_PARALLEL:
            raise EmbeddingError(
                f"table {self.name!r}: sharding={DATA_PARALLEL!r} and pooling_at='owner', which makes no use of copies",
                remedy="leave one of the two out",
            )


def _with_pooling(tables: Sequence[EmbeddingTable], pooling_at: Mapping[str, str]) -> list[EmbeddingTable]:
    pooled = {table.name for table in tables if isinstance(table, EmbeddingBagTable)}
    if unknown := sorted(set(pooling_at) - pooled):
        raise EmbeddingError(
            f"pooling_at: {', '.join(unknown)}",
            remedy=f"tables of the type EmbeddingBagTable: {', '.join(sorted(pooled)) or 'there are none'}",
        )
    return [
        replace(table, pooling_at=pooling_at[table.name])
        if isinstance(table, EmbeddingBagTable) and table.name in pooling_at
        else table
        for table in tables
    ]


class EmbeddingBagCollection(EmbeddingCollection):
    """An ``EmbeddingCollection`` that pools features of some tables to one vector per sample, like ``nn.EmbeddingBag``.

    Rows are exchanged as in ``EmbeddingCollection``: each distinct row once per rank and once per node. ``connect``,
    ``Tap``, checkpoints and optimizers work in the same way.

    Args:
        tables: ``EmbeddingBagTable``, and ``EmbeddingTable`` for features that are not pooled.
        pooling_at: "requester" or "owner" by name of a table, instead of ``EmbeddingBagTable.pooling_at``;
            ``pooling_at`` returns what it is now.
        arguments: keyword arguments of ``EmbeddingCollection``.

    Raises:
        TopologyError, EmbeddingError: see ``EmbeddingCollection``; ``pooling_at`` names what is no
        ``EmbeddingBagTable``.
    """

    pools = True

    def __init__(
        self, tables: Sequence[EmbeddingTable], *, pooling_at: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        super().__init__(_with_pooling(tables, pooling_at or {}), **arguments)
        self._pooling = {
            feature: getattr(table, "pooling", UNPOOLED) for table in self.tables for feature in table.feature_names
        }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, features: Mapping[str, JaggedLike], weights: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Pool ids [n] of each feature to [batch, dim] sums or means over each sample, in the table's dtype.

        Features of an ``EmbeddingTable`` are ``Jagged`` rows, as ``EmbeddingCollection`` returns them.

        Args:
            weights: a factor for each id, floating point [n], of features pooled by sum (``per_sample_weights`` of
                ``nn.EmbeddingBag``), with gradients. Features without weights have factor 1. Pass weights on every
                rank or on none (they may be empty); ``flexd.prefetch`` does not look up a batch with weights ahead.

        Raises:
            EmbeddingError: on every rank, if on any rank the ids cannot be looked up (see ``EmbeddingCollection``),
                lengths do not sum to the number of ids, or weights do not fit the ids or are for a mean.
        """
        if weights is None:
            routed = self._route(features)
        else:  # also if empty on this rank: all ranks must agree on whether a batch is looked up ahead
            routed = self._route(features, lambda given: self._checked_keys(given, weights))
        return self._pool(routed, self._rows(routed, expand=False), weights or {})

    def _checked_keys(self, given: Mapping[str, Jagged], weights: Mapping[str, torch.Tensor]) -> FeatureKeys:
        self._check_weights(given, weights)
        return self._features.keys(given, weights)

    def _pool(
        self, routed: RoutedInput, rows: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Pool with one kernel for all features of a dim-group with equal pooling, and expand those with none."""
        groups = len(self.keyspace.groups)
        of_rows, of_bags = rows[:groups], rows[groups:]
        calls: list[tuple[list[str], str, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        """Features, pooling, places of their rows, the rows, and the factor of each id."""
        with self.engine.guard.publishing():
            pooled: dict[str, Any] = self._pooled_at_owner(routed, of_bags) if of_bags else {}
            for names, distinct, indices in zip(
                self._features.by_group(routed.order), of_rows, routed.places, strict=True
            ):
                sizes = [routed.features[name].values.numel() for name in names]
                # Requests may follow: of bags of any rank that are added up here, of rows that unbounded ids share.
                own = indices if len(indices) == sum(sizes) else indices[: sum(sizes)]
                index_of = dict(zip(names, own.split_with_sizes(sizes), strict=True))
                kinds: dict[tuple[str, bool], list[str]] = {}
                for name in names:
                    kinds.setdefault((self._pooling[name], name in weights), []).append(name)
                for (pooling, weighted), alike in kinds.items():
                    chosen = own if alike == names else torch.cat([index_of[name] for name in alike])
                    if pooling == UNPOOLED:
                        parts = distinct.index_select(0, chosen).split_with_sizes([len(index_of[n]) for n in alike])
                        lengths = [routed.features[name].lengths for name in alike]
                        pooled |= zip(alike, map(Jagged.checked, parts, lengths), strict=True)
                    else:
                        factors = torch.cat([weights[n].to(distinct.dtype) for n in alike]) if weighted else None
                        calls.append((alike, pooling, chosen, distinct, factors))
            of_calls = [[routed.features[name].lengths for name in names] for names, *_ in calls]
            offsets = joined_offsets(of_calls, [len(chosen) for _, _, chosen, *_ in calls])
            for (names, pooling, chosen, distinct, factors), lengths, ends in zip(
                calls, of_calls, offsets, strict=True
            ):
                bags = functional.embedding_bag(
                    chosen, distinct, ends, mode=pooling, include_last_offset=True, per_sample_weights=factors
                )
                pooled |= zip(names, bags.split_with_sizes([len(part) for part in lengths]), strict=True)
        return self._as_output({name: pooled[name] for name in routed.features})

    def _pooled_at_owner(self, routed: RoutedInput, sums: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Split [bags, dim] sums of each dim-group by feature, and divide those that are pooled by mean."""
        pooled: dict[str, torch.Tensor] = {}
        for names, of_group in zip(self._features.summed_by_group(routed.features, routed.order), sums, strict=True):
            sizes = [routed.features[name].lengths.shape[0] for name in names]
            for name, total in zip(names, of_group.split_with_sizes(sizes), strict=False):
                if self._pooling[name] == "mean":
                    total = total / routed.features[name].lengths.clamp(min=1).to(total.dtype).unsqueeze(1)
                pooled[name] = total
        return pooled

    def _check_weights(self, given: Mapping[str, Jagged], weights: Mapping[str, torch.Tensor]) -> None:
        for name, factors in weights.items():
            where = f"rank {self.rank}, weights of feature {name!r}"
            if name not in given:
                raise EmbeddingError(f"{where}: the feature is not in the batch", remedy="give its ids too")
            if self._pooling.get(name) != "sum":
                raise EmbeddingError(
                    f"{where}: it is pooled by {self._pooling.get(name)}",
                    remedy="pool by sum, with weights that sum to 1 in each bag",
                )
            ids = given[name].values
            if factors.shape != ids.shape or not factors.is_floating_point() or factors.device != ids.device:
                raise EmbeddingError(
                    f"{where}: shape {tuple(factors.shape)}, {factors.dtype} on {factors.device}, for ids of shape "
                    f"{tuple(ids.shape)} on {ids.device}",
                    remedy="one floating point factor for each id, on the device of the ids",
                )
