"""A first division of samples among nodes: recursive bisection by probabilistic fanout.

Social Hash Partitioner (Kabiljo et al., PVLDB 10(11), 2017): a row that ``c`` samples of a side use counts
``1 - (1 - p)**c`` there. Every sample's gain of changing sides follows from counts by row; the samples of the two sides
with the largest gains are exchanged in pairs, so the sides stay equal. With ``p`` one over the number of batches this
is the expected number of touches in a batch; a larger ``p`` counts rows that many samples share for less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_ROUNDS = 20
_SETTLED = 0.002
"""Share of the samples that changes sides in a round below which it ends."""


def bisect(
    matrix: csr_matrix, nodes: int, probability: float, seed: int = 0, weight: Float32Array | None = None
) -> Int64Array:
    """Return int64 [samples]: nodes of the samples, in equal numbers, such that few rows are used in several.

    Args:
        matrix: float32 [samples, rows], a one for each row of a sample.
        probability: of one use of a row to count, 0 to 1.
        weight: float32 [rows], what a row costs where it is used; None: all alike.
    """
    to = np.zeros(matrix.shape[0], dtype=np.int64)
    # A row of one sample costs the same wherever that is trained.
    shared = np.flatnonzero(np.bincount(matrix.indices, minlength=matrix.shape[1]) > 1)
    if len(shared) < matrix.shape[1]:
        matrix = matrix[:, shared]
        weight = None if weight is None else weight[shared]
    _divide(matrix, weight, np.arange(matrix.shape[0]), 0, nodes, probability, np.random.default_rng(seed), to)
    return to


def _divide(
    matrix: csr_matrix, weight: Float32Array | None, samples: Int64Array, first: int, nodes: int, probability: float,
    rng: np.random.Generator, to: Int64Array,
) -> None:  # fmt: skip
    if nodes == 1 or not len(samples):
        to[samples] = first
        return
    right = nodes // 2
    side = _bisect(matrix[samples], weight, right / nodes, probability, rng)
    _divide(matrix, weight, samples[~side], first, nodes - right, probability, rng, to)
    _divide(matrix, weight, samples[side], first + nodes - right, right, probability, rng, to)


def _bisect(
    matrix: csr_matrix, weight: Float32Array | None, share: float, probability: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    count = matrix.shape[0]
    side = np.zeros(count, dtype=np.bool_)
    side[rng.permutation(count)[: round(share * count)]] = True
    stays = np.float32(max(1e-6, 1 - probability))
    transposed = matrix.T
    uses = transposed @ np.ones(count, dtype=np.float32)
    for _ in range(_ROUNDS):
        on_right = transposed @ side.astype(np.float32)
        # What leaving one side wins, and arriving on the other costs; of the sample's own use there is one less.
        left_log, right_log = stays ** (uses - on_right), stays**on_right
        gains = np.stack([left_log / stays - right_log, right_log / stays - left_log], axis=1)
        if weight is not None:
            gains *= weight[:, None]
        gain_left, gain_right = (matrix @ gains.astype(np.float32)).T
        gain = np.where(side, gain_right, gain_left)
        order_left = np.flatnonzero(~side)
        order_left = order_left[np.argsort(-gain[order_left], kind="stable")]
        order_right = np.flatnonzero(side)
        order_right = order_right[np.argsort(-gain[order_right], kind="stable")]
        pairs = min(len(order_left), len(order_right))
        wins = int(np.count_nonzero(gain[order_left[:pairs]] + gain[order_right[:pairs]] > 0))
        # Gains hold for one change at a time: half are changed at once, so that neighbours do not pass one another.
        chosen = rng.random(wins) < 0.5
        side[order_left[:wins][chosen]], side[order_right[:wins][chosen]] = True, False
        if np.count_nonzero(chosen) <= _SETTLED * count:
            break
    return side
