"""Convert ``KeyedJaggedTensor`` to features by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch.fx import Proxy
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from flexd.core.errors import EmbeddingError
from flexd.embedding.features import Jagged
from flexd.embedding.prefetch.empty_batch import empty_batch


@empty_batch.register
def _empty_keyed_jagged(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights, indices, keys = batch.weights_or_none(), batch.inverse_indices_or_none(), batch.keys()
    return KeyedJaggedTensor(
        keys,
        batch.values()[:0].clone(),
        None if weights is None else weights[:0].clone(),
        batch.lengths()[:0].clone(),
        stride_per_key_per_rank=[[0] for _ in keys] if batch.variable_stride_per_key() else None,
        inverse_indices=None if indices is None else (indices[0], indices[1][:, :0].clone()),
    )


@empty_batch.register
def _empty_jagged(batch: JaggedTensor) -> JaggedTensor:
    weights = batch.weights_or_none()
    return JaggedTensor(
        batch.values()[:0].clone(),
        weights=None if weights is None else weights[:0].clone(),
        lengths=batch.lengths()[:0].clone(),
    )


@empty_batch.register
def _empty_tensors(batch: TensorDict) -> TensorDict:
    return TensorDict({name: empty_batch(value) for name, value in batch.items()}, batch_size=[0])


def as_keyed_jagged(given: Any, features: Sequence[str], rank: int) -> KeyedJaggedTensor:
    """Return a ``KeyedJaggedTensor`` unchanged, or convert a ``TensorDict`` of nested tensors with TorchRec.

    Raises:
        EmbeddingError: ``given`` is of another type, or a feature is missing; or ``torch.fx`` traces the model.
    """
    if isinstance(given, Proxy):
        raise EmbeddingError(
            f"rank {rank}: torch.fx traces the model, and flexd's tables cannot be traced",
            remedy="train it with flexd.prefetch: TorchRec's pipelines, such as TrainPipelineSparseDist, trace models",
        )
    given = maybe_td_to_kjt(given)
    if not isinstance(given, KeyedJaggedTensor):
        raise EmbeddingError(
            f"rank {rank}: a {type(given).__name__} instead of a KeyedJaggedTensor",
            remedy="torchrec.KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)",
        )
    missing = sorted(set(features) - set(given.keys()))
    if missing:
        raise EmbeddingError(
            f"rank {rank}: the KeyedJaggedTensor has no {', '.join(missing)}",
            remedy="every feature of every table must be a key on every rank; its lengths may be 0",
        )
    return given


def jagged_by_key(kjt: KeyedJaggedTensor) -> dict[str, Jagged]:
    """Return ids and lengths of each key, also if batch sizes differ by key (``stride_per_key_per_rank``).

    Raises:
        EmbeddingError: lengths and values do not fit each other.
    """
    counts, strides = kjt.length_per_key(), kjt.stride_per_key()
    if sum(counts) != kjt.values().numel() or sum(strides) != kjt.lengths().numel():
        raise EmbeddingError(
            f"a KeyedJaggedTensor of {kjt.values().numel()} values and {kjt.lengths().numel()} lengths, which "
            f"states {sum(counts)} and {sum(strides)}",
            remedy="lengths of each key sum to its values",
        )
    values, lengths = torch.split(kjt.values(), counts), torch.split(kjt.lengths(), strides)
    return {key: Jagged(v, n) for key, v, n in zip(kjt.keys(), values, lengths, strict=True)}


def weights_by_key(kjt: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """Return the factor of each id, by key.

    Raises:
        EmbeddingError: there are no weights, or not one for each id.
    """
    weights = kjt.weights_or_none()
    if weights is None or weights.shape != kjt.values().shape:
        raise EmbeddingError(
            "a KeyedJaggedTensor without a weight for each value, for a weighted collection",
            remedy="give weights=, or construct with is_weighted=False",
        )
    return dict(zip(kjt.keys(), torch.split(weights, kjt.length_per_key()), strict=True))


def check_inverse(kjt: KeyedJaggedTensor, given: Mapping[str, Jagged], rank: int) -> None:
    """Check ``inverse_indices``, which map each sample of the batch to a sample of each key.

    Args:
        given: ids of the keys that tables read.

    Raises:
        EmbeddingError: batch sizes differ by key without ``inverse_indices``, or these do not fit the samples.
    """
    sizes = {feature: ids.lengths.numel() for feature, ids in given.items()}
    indices = kjt.inverse_indices_or_none()
    if indices is None:
        if len(set(sizes.values())) > 1:
            raise EmbeddingError(
                f"rank {rank}: batch sizes differ by feature ({sizes}) and there are no inverse_indices",
                remedy="give the KeyedJaggedTensor inverse_indices, or one batch size",
            )
        return
    place = {feature: row for row, feature in enumerate(indices[0])}
    for feature, size in sizes.items():
        index = indices[1][place[feature]] if feature in place else None
        if index is None or (index.numel() and (int(index.min()) < 0 or int(index.max()) >= size)):
            raise EmbeddingError(
                f"rank {rank}, feature {feature!r}: inverse_indices are missing or outside its {size} samples",
                remedy="one row of indices for each key, of samples that the key has",
            )


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
