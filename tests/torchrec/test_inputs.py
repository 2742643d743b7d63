"""Inputs of TorchRec's types."""

import torch
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor

from flexd.embedding.prefetch.empty_batch import empty_batch
from flexd.torchrec.inputs import as_keyed_jagged, check_inverse, jagged_by_key, weights_by_key


def test_empty_batches_of_every_input_have_its_keys() -> None:
    """Also of batches whose sizes differ by key, and of an empty batch."""
    keys, values = ["a", "b"], torch.arange(4)
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(1)], layout=torch.jagged)
    plain = KeyedJaggedTensor(keys, values, lengths=torch.ones(4, dtype=torch.int32), weights=torch.rand(4))
    by_key = KeyedJaggedTensor(
        keys, values, lengths=torch.tensor([1, 1, 2]), stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(keys, torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )  # fmt: skip
    for given in (plain, by_key, TensorDict({"a": nested, "b": nested}, batch_size=[2])):
        for empty in (empty_batch(given), empty_batch(empty_batch(given))):
            assert type(empty) is type(given)
            kjt = as_keyed_jagged(empty, keys, 0)
            jagged = jagged_by_key(kjt)
            assert {name: (len(one.values), len(one.lengths)) for name, one in jagged.items()} == {
                "a": (0, 0),
                "b": (0, 0),
            }
            check_inverse(kjt, jagged, 0)
            if given is plain:
                assert {name: len(one) for name, one in weights_by_key(kjt).items()} == {"a": 0, "b": 0}
