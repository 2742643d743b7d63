"""Batches whose ids are announced to ``flexd.prefetch`` and then changed, in every way that a trainer can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from flexd.embedding.features import Jagged

Features = dict[str, Jagged]
ROWS = {"history": 61, "target": 61, "shop": 17}


def _copied(jagged: Jagged) -> Jagged:
    return Jagged(jagged.values.clone(), jagged.lengths.clone())


def _other_ids(name: str, jagged: Jagged) -> Jagged:
    return Jagged((jagged.values + 1) % ROWS[name], jagged.lengths.clone())


def _more_ids(name: str, jagged: Jagged) -> Jagged:
    """Return one id more in a batch of as many samples, or as it is if there are none."""
    if not jagged.lengths.numel():
        return _copied(jagged)
    lengths = jagged.lengths.clone()
    lengths[-1] += 1
    return Jagged(torch.cat([_other_ids(name, jagged).values, jagged.values.new_zeros(1)]), lengths)


def _other_lengths(name: str, jagged: Jagged) -> Jagged:
    return Jagged(jagged.values.clone(), jagged.lengths.flip(0))


def _impossible(name: str, jagged: Jagged) -> Jagged:
    return Jagged(torch.full_like(jagged.values, ROWS[name]), jagged.lengths.clone())


def _in_place(features: Features, name: str, true: Jagged) -> None:
    features[name].values.copy_(true.values)


def _by_numpy(features: Features, name: str, true: Jagged) -> None:
    features[name].values.numpy()[:] = true.values.numpy()


def _entry(features: Features, name: str, true: Jagged) -> None:
    features[name] = true


def _resized(features: Features, name: str, true: Jagged) -> None:
    features[name].values.resize_(true.values.shape).copy_(true.values)
    features[name].lengths.copy_(true.lengths)


def _set(features: Features, name: str, true: Jagged) -> None:
    features[name].values.set_(true.values)
    features[name].lengths.set_(true.lengths)


def _lengths_in_place(features: Features, name: str, true: Jagged) -> None:
    features[name].lengths.copy_(true.lengths)


def _lengths_replaced(features: Features, name: str, true: Jagged) -> None:
    features[name] = Jagged(features[name].values, true.lengths)


_WAYS: dict[str, tuple[Callable[[str, Jagged], Jagged], Callable[[Features, str, Jagged], None]]] = {
    "in place": (_other_ids, _in_place),
    "numpy": (_other_ids, _by_numpy),
    "replaced": (_other_ids, _entry),
    "more replaced": (_more_ids, _entry),
    "resize_": (_more_ids, _resized),
    "set_": (_more_ids, _set),
    "lengths in place": (_other_lengths, _lengths_in_place),
    "lengths replaced": (_other_lengths, _lengths_replaced),
    "out of range before": (_impossible, _in_place),
}
"""Inputs that are announced instead of a feature, and how the trainer makes them the right one."""
WAYS = (*_WAYS, "new mapping")


def announced_as(features: Features, way: str) -> Features:
    """Return what is announced before a batch is changed to ``features``."""
    before, _ = _WAYS["replaced" if way == "new mapping" else way]
    return {name: before(name, jagged) for name, jagged in features.items()}


def change(announced: Features, features: Features, way: str) -> Features:
    """Change what was announced to ``features``, and return the input of the look-up."""
    if way == "new mapping":
        return dict(features)
    for name, jagged in features.items():
        _WAYS[way][1](announced, name, _copied(jagged))
    return announced


def drawn_way(seed: int, index: int, rank: int) -> str:
    """Return how this rank's batch is changed; "" for most: other ranks' are changed then."""
    rng = np.random.default_rng([seed, index, rank, 17])
    return str(rng.choice(WAYS)) if rng.random() < 0.3 else ""
