"""Homes of rows by node, balanced in rows and load, moved only where that pays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_ROUNDS = 8
"""Over the weights: rows that leave a node for their bytes may bring another above its number of rows."""


def choose_homes(
    touches: Float32Array,
    current: Int64Array,
    *,
    min_gain: float | Float32Array,
    row_slack: float,
    load_slack: float,
    row_bytes: Float32Array | None = None,
) -> Int64Array:
    """Return int64 [rows]: the node of each row's home: the one that touches it most, within the limits.

    A row moves if its touches by the new node are ``min_gain`` more than those by its node of now. A node that then has
    too many rows, too many of their bytes, or too much load (touches by any node of its rows), gives up those that lose
    least, a row to its next best node with room.

    Args:
        touches: float32 [rows, nodes], expected touches a batch of each row by each node.
        current: int64 [rows], nodes of the homes now.
        min_gain: touches a batch that a move must win; float32 [rows] or one number.
        row_slack, load_slack: how far above the mean a node's rows (and their bytes) and load may be, as shares of the
            mean; no limit is below what the node has now.
        row_bytes: float32 [rows], of a row with its optimizer state, where they differ.
    """
    rows, nodes = touches.shape
    each = np.arange(rows)
    best = touches.argmax(axis=1)
    pays = touches[each, best] - touches[each, current] > min_gain
    home = np.where(pays, best, current)
    load, ones = touches.sum(axis=1, dtype=np.float64), np.ones(rows)
    weights = [(ones, row_slack), (load, load_slack), (ones, row_slack)]
    if row_bytes is not None:
        weights.append((row_bytes.astype(np.float64), row_slack))
    limits = [
        np.maximum((1 + slack) * weight.sum() / nodes, np.bincount(current, weights=weight, minlength=nodes))
        for weight, slack in weights
    ]
    for _ in range(_ROUNDS):
        for (weight, _slack), limit in zip(weights, limits, strict=True):
            level(touches, home, weight, limit)
        if all(_is_level(home, weight, limit) for (weight, _slack), limit in zip(weights, limits, strict=True)):
            break
    return home


def _is_level(home: Int64Array, weight: Float64Array, limit: Float64Array) -> bool:
    """Return whether no node is above its limit by more than the heaviest row."""
    held = np.bincount(home, weights=weight, minlength=len(limit))
    return bool((held <= limit + weight.max(initial=0.0)).all())


def level(gains: Float32Array, home: Int64Array, weight: Float64Array, limit: Float64Array) -> None:
    """Move rows of nodes above their limit to nodes with room, those first that lose least by weight; changes ``home``.

    Args:
        gains: float32 [rows, nodes], of having a row in a node.
        weight: float64 [rows].
        limit: float64 [nodes], sum of weights. Where rows are too heavy to fit anywhere, a node stays above it.
    """
    nodes = gains.shape[1]
    for _ in range(2 * nodes):
        held = np.bincount(home, weights=weight, minlength=nodes)
        room = limit - held
        over = np.flatnonzero(room < 0)
        if not len(over):
            return
        for node in over:
            mine = np.flatnonzero(home == node)
            elsewhere = np.where(room > 0, gains[mine], -np.inf)
            elsewhere[:, node] = -np.inf
            target = elsewhere.argmax(axis=1)
            lost = gains[mine, node] - elsewhere[np.arange(len(mine)), target]
            if not np.isfinite(lost).any():
                return
            order = np.argsort(lost / np.maximum(weight[mine], 1e-30), kind="stable")
            order = order[np.isfinite(lost[order]) & (weight[mine[order]] > 0)]
            before = np.cumsum(weight[mine[order]]) - weight[mine[order]]
            leaving = order[before < -room[node]]
            for to in np.unique(target[leaving]):
                going = leaving[target[leaving] == to]
                fits = going[np.cumsum(weight[mine[going]]) <= room[to]]
                home[mine[fits]] = to
                room[to] -= weight[mine[fits]].sum()
                room[node] += weight[mine[fits]].sum()
