"""Convert looked-up rows to ``JaggedTensor`` and ``KeyedTensor``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexd.embedding.jagged import Jagged


def jagged_tensor(ids: Jagged, rows: torch.Tensor, need_indices: bool) -> JaggedTensor:
    """Return rows [n, dim] of the ids of a feature in float32, with the ids as weights if ``need_indices``."""
    return JaggedTensor(values=rows.float(), lengths=ids.lengths, weights=ids.values if need_indices else None)


def keyed_tensor(kjt: KeyedJaggedTensor, pooled: Sequence[tuple[str, str, torch.Tensor]]) -> KeyedTensor:
    """Return float32 [batch, sum of dims].

    Args:
        pooled: (feature, embedding name, [samples of the feature, dim]), in the order of the result. The input's
            ``inverse_indices`` expand the samples to the batch.
    """
    parts = [part.float() for _, _, part in pooled]
    indices = kjt.inverse_indices_or_none()
    if indices is not None:
        place = {feature: row for row, feature in enumerate(indices[0])}
        parts = [p.index_select(0, indices[1][place[f]]) for p, (f, _, _) in zip(parts, pooled, strict=True)]
    return KeyedTensor(
        keys=[name for _, name, _ in pooled],
        length_per_key=[part.shape[1] for part in parts],
        values=torch.cat(parts, dim=1),
    )
