"""Let ``flexd.prefetch(deal=True)`` ship batches of TorchRec's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from flexd.core.errors import EmbeddingError
from flexd.embedding.affinity.sample_parts import BatchType, Part, register_batch_type
from flexd.embedding.jagged import Jagged
from flexd.torchrec.inputs import jagged_by_key, weights_by_key

_WEIGHTS = "weights of "


def _parts_of_kjt(kjt: KeyedJaggedTensor) -> dict[str, Part]:
    if kjt.inverse_indices_or_none() is not None or len(set(kjt.stride_per_key())) > 1:
        raise EmbeddingError(
            "samples of a KeyedJaggedTensor with inverse_indices or batch sizes by key cannot be dealt",
            remedy="give one length for each key and sample, or leave deal out",
        )
    ids = jagged_by_key(kjt)
    parts: dict[str, Part] = dict(ids)
    if kjt.weights_or_none() is not None:
        parts |= {f"{_WEIGHTS}{key}": Jagged(each, ids[key].lengths) for key, each in weights_by_key(kjt).items()}
    return parts


def _kjt_of(kjt: KeyedJaggedTensor, parts: Sequence[Part]) -> KeyedJaggedTensor:
    keys = kjt.keys()
    jagged = [part for part in parts if isinstance(part, Jagged)]
    ids, weights = jagged[: len(keys)], jagged[len(keys) :]
    return KeyedJaggedTensor.from_lengths_sync(
        keys,
        torch.cat([one.values for one in ids]) if ids else kjt.values(),
        torch.cat([one.lengths for one in ids]) if ids else kjt.lengths(),
        torch.cat([one.values for one in weights]) if weights else None,
    )


def _parts_of_jagged(jagged: JaggedTensor) -> dict[str, Part]:
    parts: dict[str, Part] = {"values": Jagged(jagged.values(), jagged.lengths())}
    if jagged.weights_or_none() is not None:
        parts["weights"] = Jagged(jagged.weights(), jagged.lengths())
    return parts


def _jagged_of(_: JaggedTensor, parts: Sequence[Any]) -> JaggedTensor:
    weights = parts[1].values if len(parts) > 1 else None
    return JaggedTensor(parts[0].values, lengths=parts[0].lengths, weights=weights)


def _keyed_of(keyed: KeyedTensor, parts: Sequence[Any]) -> KeyedTensor:
    return KeyedTensor(keyed.keys(), keyed.length_per_key(), parts[0], key_dim=1)


def register() -> None:
    """Register the types."""
    register_batch_type(KeyedJaggedTensor, BatchType(_parts_of_kjt, _kjt_of))
    register_batch_type(JaggedTensor, BatchType(_parts_of_jagged, _jagged_of))
    register_batch_type(KeyedTensor, BatchType(lambda keyed: {"values": keyed.values()}, _keyed_of))
