"""Convert named jagged features to one tensor of keys, and rows back to features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.keyspace import KeySpace
from flexd.embedding.jagged import Jagged


class FeatureMap:
    """Maps features to tables and checks their ids.

    Args:
        features: the feature names of each table, in the order of ``keyspace.tables``.

    Raises:
        EmbeddingError: two tables read the same feature.
    """

    def __init__(self, keyspace: KeySpace, features: Sequence[Sequence[str]], rank: int, device: torch.device) -> None:
        self._keyspace = keyspace
        self._rank = rank
        self._device = device
        self._group_of = {table: g for g, group in enumerate(keyspace.groups) for table in group.tables}
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

    def keys(self, features: Mapping[str, Jagged]) -> tuple[list[str], torch.Tensor]:
        """Return the feature names ordered by dim-group, and their ids concatenated as int64 keys.

        Raises:
            EmbeddingError: unknown feature, or ids of a wrong dtype, shape, device or range.
        """
        for name in features:
            if name not in self.table_of:
                raise EmbeddingError(
                    f"rank {self._rank}: no table reads feature {name!r}",
                    remedy=f"one of {', '.join(sorted(self.table_of))}",
                )
        order = sorted(features, key=lambda name: self._group_of[self.table_of[name]])
        parts = [self._feature_keys(name, features[name].values) for name in order]
        return order, torch.cat(parts) if parts else self.no_keys()

    def no_keys(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._device)

    def split(
        self, features: Mapping[str, Jagged], order: Sequence[str], rows: Sequence[torch.Tensor]
    ) -> dict[str, Jagged]:
        """Split [n, dim] rows of each dim-group into rows by feature, with the lengths of the input."""
        out: dict[str, Jagged] = {}
        for names, part in zip(self.by_group(order), rows, strict=True):
            if names:
                pieces = torch.split(part, [features[name].values.numel() for name in names])
                out |= {n: Jagged(piece, features[n].lengths) for n, piece in zip(names, pieces, strict=True)}
        return out

    def by_group(self, order: Sequence[str]) -> list[list[str]]:
        """Return the features of each dim-group, in the given order."""
        names: list[list[str]] = [[] for _ in self._keyspace.groups]
        for name in order:
            names[self._group_of[self.table_of[name]]].append(name)
        return names

    def _feature_keys(self, feature: str, ids: torch.Tensor) -> torch.Tensor:
        table = self.table_of[feature]
        spec = self._keyspace.tables[table]
        where = f"rank {self._rank}, feature {feature!r}"
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise EmbeddingError(
                f"{where}: ids of dtype {ids.dtype} and shape {tuple(ids.shape)}",
                remedy="pass int64 or int32 ids of shape [n]",
            )
        if ids.device != self._device:
            raise EmbeddingError(
                f"{where}: ids on {ids.device}, the tables are on {self._device}",
                remedy=f"move the batch to {self._device}",
            )
        if ids.numel():
            lowest, highest = (int(bound) for bound in torch.aminmax(ids))
            if lowest < 0 or highest >= spec.rows:
                raise EmbeddingError(
                    f"{where}: row {lowest if lowest < 0 else highest} of table {spec.name!r} is outside "
                    f"0..{spec.rows - 1}",
                    remedy="check the id mapping of the data loader, or enlarge the table",
                )
        return ids.to(torch.int64) + int(self._keyspace.first_key[table])
