"""``flexd.hash_ids``: text as unbounded ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexd.core.errors import MissingExtraError


def hash_ids(texts: Sequence[str]) -> torch.Tensor:
    """Return int64 [n] in host memory: xxh64 with seed 0 of text in UTF-8, ids of
    ``flexd.EmbeddingTable(ids="unbounded")``.

    ``stream.mapping.ids`` with ``hash: xxh64`` gives the same. No statement is run for a text. Numbers need no hash.

    Raises:
        MissingExtraError: xxhash is not installed.
    """
    try:
        from xxhash import xxh64_intdigest
    except ImportError as error:
        raise MissingExtraError(f"hash_ids needs xxhash ({error})", remedy="pip install xxhash") from error
    digests = map(xxh64_intdigest, map(str.encode, texts))
    return torch.from_numpy(np.fromiter(digests, np.uint64, len(texts)).view(np.int64))
