"""The misuses of a careless trainer in a chaos run, in loops of ``flexd.prefetch``, and the rank that makes each.

All of it follows from the seed of the run and the step, so that every rank, every launch and the reference agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.errors import EmbeddingError

MASKED, REPLACED, ONE_BUFFER, LEFT, EVALUATES, NESTED, WEIGHTS, BAD_ID, GIVEN_UP = MISUSES = (
    "ids masked in place", "batch replaced in its dictionary", "one buffer for two batches", "loop left early",
    "evaluation in between", "loop in a loop", "weights from one buffer", "id out of range", "step given up",
)  # fmt: skip
MISUSE_SHARE = 0.3
"""Of the steps."""
_LOOP_STEPS = 4, 40
_DRAWS_MISUSE, _DRAWS_LOOP = 2, 3
_LOSS_TOLERANCE = 1e-9

Features = dict[str, flexd.Jagged]
Losses = Callable[[Mapping[str, Any], int], torch.Tensor]


def misuse_of(seed: int, step: int) -> tuple[str, int]:
    """Return the misuse of a step, "" for none, and a number that selects the rank that differs from the others."""
    rng = np.random.default_rng([seed, step, _DRAWS_MISUSE])
    kind = MISUSES[int(rng.integers(len(MISUSES)))] if rng.random() < MISUSE_SHARE else ""
    return kind, int(rng.integers(2**30))


class MisusingTrainer:
    """Train steps in loops of ``flexd.prefetch`` and in plain ones; with or without misuse each step is exact.

    Args:
        features_of: returns the right batch of a step, in new tensors.
        weights_of: returns a factor for each id of some features, in steps of the misuse ``WEIGHTS``.
        loss_of: returns the loss of a step, of what the collection returns for its batch.
    """

    def __init__(
        self,
        collection: flexd.EmbeddingBagCollection,
        seed: int,
        features_of: Callable[[int], Features],
        weights_of: Callable[[int], Mapping[str, torch.Tensor]],
        loss_of: Losses,
    ) -> None:
        self._collection = collection
        self._seed = seed
        self._features_of, self._weights_of, self._loss_of = features_of, weights_of, loss_of
        self._weights: dict[str, torch.Tensor] = {}

    def train(self, first: int) -> Iterator[tuple[float, str]]:
        """Train steps from ``first`` on, without end; yield loss and misuse of each."""
        step = first
        while True:
            with closing(self._loop(step)) as batches:
                for step, features in batches:
                    misuse, loss = self._misuse(step)[0], self._step(step, features)
                    yield loss, misuse
                    if misuse == LEFT:
                        break
            step += 1

    def _misuse(self, step: int) -> tuple[str, bool]:
        """Return the misuse of a step, and whether this rank is the one that differs."""
        kind, odd = misuse_of(self._seed, step)
        return kind, odd % self._collection.layout.world_size == self._collection.rank

    def _loop(self, first: int) -> Iterator[tuple[int, Features]]:
        """Go over the batches of some steps, announced or not."""
        rng = np.random.default_rng([self._seed, first, _DRAWS_LOOP])
        end, way = first + int(rng.integers(*_LOOP_STEPS)), int(rng.integers(3))
        loader: Any = self._announced(first, end)
        if way:
            loader = flexd.prefetch(loader, self._collection, one_thread=way == 1)
        yield from enumerate(loader, first)

    def _announced(self, first: int, end: int) -> Iterator[Features]:
        """Yield batches, some of which are not yet what is trained."""
        before: Features = {}
        for step in range(first, end):
            (misuse, is_odd), features = self._misuse(step), self._features_of(step)
            if misuse == MASKED and is_odd:
                for jagged in features.values():
                    jagged.values.zero_()
            elif misuse == REPLACED and is_odd:
                for name, jagged in features.items():
                    features[name] = flexd.Jagged(jagged.values[:0], torch.zeros_like(jagged.lengths))
            elif self._overwrites(step) and is_odd and before:
                for name, jagged in before.items():
                    jagged.values.copy_(features[name].values)
                features = before
            yield features
            before = features

    def _overwrites(self, step: int) -> bool:
        """Return whether the batch of a step is in the memory of the one before, if both are of one loop."""
        return step > 0 and self._misuse(step)[0] == ONE_BUFFER and self._misuse(step - 1)[0] not in (MASKED, REPLACED)

    def _step(self, step: int, features: Features) -> float:
        (misuse, is_odd), collection, right = self._misuse(step), self._collection, self._features_of(step)
        evaluated: list[torch.Tensor] = []
        if misuse == MASKED and is_odd:
            for name, jagged in right.items():
                features[name].values.copy_(jagged.values)
        elif misuse == REPLACED and is_odd:
            features.update(right)
        elif misuse == EVALUATES:
            evaluated.append(self._evaluate(right, step))
        elif misuse == NESTED:
            batches = [self._features_of(step) for _ in range(1 + collection.rank % 2)]
            for number, batch in enumerate(flexd.prefetch(batches, collection, uneven="empty")):
                if number < len(batches):
                    evaluated.append(self._evaluate(batch, step))
                else:  # this rank has no such batch
                    with torch.no_grad():
                        collection(batch)
        elif misuse == BAD_ID:
            self._look_up_bad(right, is_odd)
        elif misuse == GIVEN_UP:
            self._backward(features, step)
            collection.optimizer.zero_grad()
        loss = self._backward(features, step)
        collection.optimizer.step()
        for other in evaluated:
            assert abs(other - loss) <= _LOSS_TOLERANCE, f"step {step}: {other} in an evaluation, {loss} in training"
        return float(loss)

    def _backward(self, features: Features, step: int) -> torch.Tensor:
        weights = {}
        if self._misuse(step)[0] == WEIGHTS:
            for name, factors in self._weights_of(step).items():
                weights[name] = self._weights.setdefault(name, factors).copy_(factors)
        given = (weights,) if weights else ()
        try:
            rows = self._collection(features, *given)
        except EmbeddingError as error:
            refused = "to the memory of this one" if self._misuse(step + 1)[1] else "cannot be looked up"
            if not self._overwrites(step + 1) or refused not in str(error):
                raise
            rows = self._collection(self._features_of(step), *given)
        loss = self._loss_of(rows, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _evaluate(self, features: Features, step: int) -> torch.Tensor:
        with torch.no_grad():
            return self._loss_of(self._collection(features), step)

    def _look_up_bad(self, right: Features, is_odd: bool) -> None:
        """Look an id up that no table has, on one rank; all refuse it by name."""
        wrong = {name: flexd.Jagged(torch.full_like(f.values, -1), f.lengths) for name, f in right.items()}
        try:
            self._collection(wrong if is_odd else right)
        except EmbeddingError:
            return
        raise AssertionError("an id that no table has was looked up")
