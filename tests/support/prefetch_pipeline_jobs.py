"""Jobs of ranks: training with the prefetch pipeline in the scenarios of ``exactness``, and its failures."""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import flexd
from flexd.core.errors import EmbeddingError
from flexd.embedding import devices
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.exchange.arms import AgreedArm, Arm
from flexd.embedding.features import Jagged
from flexd.embedding.prefetch.pipeline import PrefetchPipeline
from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.step import StepMoments
from flexd.embedding.store.slow.tiered_storage import CacheSlotDivision
from flexd.embedding.tuning import StepTuner
from tests.support.exactness import (
    Scenario,
    batch,
    checksums,
    class_of,
    factors_of,
    loss_of,
    random_chunks,
    row_optimizer,
    tables_of,
    values_of,
)
from tests.support.slots_of_share import slots_of_share

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


def _impossible(name: str, jagged: Jagged) -> Jagged:
    return Jagged(torch.full_like(jagged.values, ROWS[name]), jagged.lengths.clone())


def _in_place(features: Features, name: str, true: Jagged) -> None:
    features[name].values.copy_(true.values)


def _entry(features: Features, name: str, true: Jagged) -> None:
    features[name] = true


_WAYS: dict[str, tuple[Callable[[str, Jagged], Jagged], Callable[[Features, str, Jagged], None]]] = {
    "in place": (_other_ids, _in_place),
    "replaced": (_other_ids, _entry),
    "more replaced": (_more_ids, _entry),
    "out of range before": (_impossible, _in_place),
}
"""Inputs that are announced instead of a feature, and how the trainer makes them the right one. Which changes are seen
is tested with ``AnnouncedInput``."""
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


def on_accelerator(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(rank, *args)`` as if no tensor were in host memory."""
    with mock.patch.object(devices, "in_host_memory", return_value=False):
        return function(rank, *args)


def in_windows(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """As ``on_accelerator``, and every message is made by an index, however few parts it has."""
    with mock.patch("flexd.embedding.exchange.hop.MAX_JOINED_PARTS", 0):
        return on_accelerator(rank, function, *args)


@dataclass(frozen=True)
class Loop:
    """Work of the loop beside training.

    Attributes:
        ahead: with ``flexd.prefetch``.
        announced_passes: ``passes_per_step`` of prefetch; 0: the number of the scenario.
        evaluate_every: steps between forward passes of other batches without gradients.
        extra_every: steps between forward passes for training on a batch that was not announced, before the step.
        between_every: steps between whole steps of training on such a batch.
        read_every: steps between reading whole tables.
        save_every: steps between saving everything and loading the save before.
        max_norm: gradients are clipped to it; 0: not.
        bad_at: index of a batch that cannot be looked up on the last rank, and is skipped; -1: none.
        loops: number of loops that share the batches.
        restarts: between two loops the job ends, as by a kill, and a new collection goes on from what was saved.
        break_at: index of a batch after whose step the loop ends; the rest is trained on without the prefetch pipeline.
        changes: "any": what is announced is drawn batch by batch on each rank, and changed before it is looked up; or
            the one way of ``WAYS`` in which the first rank changes each batch; "": nothing is changed.
        one_thread: as in ``flexd.prefetch``.
        depth: batches ahead; 0: the tuner decides about one.
    """

    ahead: bool = True
    announced_passes: int = 0
    evaluate_every: int = 0
    extra_every: int = 0
    between_every: int = 0
    read_every: int = 0
    save_every: int = 0
    max_norm: float = 0.0
    bad_at: int = -1
    loops: int = 1
    restarts: bool = False
    break_at: int = -1
    changes: str = ""
    one_thread: bool | None = None
    depth: int = 1


class RandomTuner(StepTuner):
    """Proposes arms without measuring any, on every rank."""

    def __init__(self, choice: AgreedArm, exchanges: tuple[str, ...]) -> None:
        super().__init__(choice, exchanges)
        self._choices, self._draw = choice, random.Random(f"{choice.proposed} {exchanges}")

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        if self._draw.random() < 0.5:
            self._choices.propose(self._draw.choice([a for a in self._choices.arms if a.exchange in self._exchanges]))


def other_arm(collection: EmbeddingCollection, step: int) -> Arm:
    """Return an arm with the exchange that is not in use."""
    other = "chain" if collection.exchange == "direct" else "direct"
    return Arm(other, step % 3 > 0, collection.engine.arm.wire)


def make(scenario: Scenario, memories: dict[str, Any] | None = None) -> EmbeddingCollection:
    given: dict[str, Any] = {
        "layout": scenario.layout, "exchange": scenario.exchange,
        "replica_slots": slots_of_share(tables_of(scenario), scenario.slots_share, row_optimizer(scenario)),
        "seed": scenario.seed, "max_migration_bytes_per_step": 2000, "average_gradients": scenario.average_gradients,
        "comm_dtype": scenario.comm_dtype,
    }  # fmt: skip
    collection = class_of(scenario)(
        tables_of(scenario), optimizer=row_optimizer(scenario), **given,
        **(scenario.memories() if memories is None else memories),
    )  # fmt: skip
    if scenario.exchange == "auto":
        engine = collection.engine
        engine.joined[:] = [each for each in engine.joined if not isinstance(each, StepTuner)]
        engine.step_tuner = engine.join(RandomTuner, engine.arm, engine._exchanges)
    return collection


def pipeline_of(collection: EmbeddingCollection) -> PrefetchPipeline | None:
    return next((each for each in collection.engine.joined if isinstance(each, PrefetchPipeline)), None)


def backward(
    collection: EmbeddingCollection, features: dict[str, Jagged], factors: dict[str, torch.Tensor] | None = None
) -> list[float]:
    """Return the loss, and checksums of the gradients of factors."""
    loss = loss_of(values_of(collection(features) if factors is None else collection(features, factors)))
    if loss.requires_grad:
        loss.backward()
    return [float(loss.detach()), *checksums(factors or {})]


def train(rank: int, scenario: Scenario, loop: Loop) -> dict[str, Any]:
    memories = scenario.memories()
    collection = make(scenario, memories)
    inbox = collection.engine.inbox
    schedule = torch.optim.lr_scheduler.ExponentialLR(collection.optimizer, scenario.gamma)
    chunks = random_chunks(scenario, collection)
    rng = np.random.default_rng([scenario.seed, 7, rank])
    losses: list[float] = []
    trained: list[float] = []
    versions, errors, unequal, deferred = [], [], 0, 0
    saved: list[dict[str, Any]] = []
    exchanges: list[str] = []
    prefetched: list[bool] = []
    every = [(index, batch(scenario, index, rank)) for index in range(scenario.steps * scenario.passes)]
    if loop.bad_at >= 0 and rank == scenario.layout.world_size - 1:
        every[loop.bad_at][1]["history"] = Jagged(torch.tensor([-1]), torch.tensor([1]))
    ways = {
        index: way_of(loop, scenario.seed, index, rank) if index < scenario.batches(rank) else "" for index, _ in every
    }
    changed = {index: features for index, features in every if ways[index]}
    every = [
        (index, announced_as(features, ways[index]) if index in changed else features) for index, features in every
    ]
    drawn = np.random.default_rng([scenario.seed, 11, rank])

    class RandomDivision(StepMoments):
        def updated(self, optimizer: RowUpdate, step: int) -> None:
            if step % scenario.divide_every == 0:
                for each in collection.engine.joined:
                    if isinstance(each, CacheSlotDivision):
                        each.change([int(drawn.integers(1, 40)) for store in collection.engine.stores if store.tier])

    if scenario.divide_every:
        collection.engine.join(RandomDivision)

    def restart() -> None:
        nonlocal collection, inbox, schedule
        kept, rates = collection.state_dict(), [group["lr"] for group in collection.optimizer.param_groups]
        directory = memories.get("slow_memory_dir")
        left = [] if directory is None else list(Path(directory).iterdir())
        for file in left:
            os.link(file, f"{file}.left")
        collection.close()
        for file in left:  # a kill leaves the files
            os.rename(f"{file}.left", file)
        read_only = collection.keyspace.read_only
        collection = make(replace(scenario, seed=scenario.seed + 1), memories)
        turn_to(read_only)
        collection.load_state_dict(kept)
        inbox = collection.engine.inbox
        for group, rate in zip(collection.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule = torch.optim.lr_scheduler.ExponentialLR(collection.optimizer, scenario.gamma)
        if scenario.divide_every:
            collection.engine.join(RandomDivision)

    def turn_to(then: frozenset[str]) -> None:
        now = collection.keyspace.read_only
        if then - now:
            collection.freeze(*sorted(then - now))
        if now - then:
            collection.unfreeze(*sorted(now - then))

    def each(index: int, step: int, what: int) -> bool:
        return what > 0 and (index + 1) % scenario.passes == 0 and step % what == 0

    def on(batches: Any, first: int) -> None:
        nonlocal losses, trained, unequal, deferred
        for index, (_, features) in enumerate(batches, first):
            step, number = divmod(index, scenario.passes)
            if index in changed:
                features = change(features, changed[index], ways[index])
            if number == 0:
                turn_to(scenario.frozen_at(step))
                for name, first_row, values in scenario.loaded(step):
                    collection.load_rows(name, first_row, values)
            due = scenario.due(step, len(chunks))
            every_nth = scenario.switch_every
            proposes = every_nth > 0 and number == 0 and step % every_nth == 1 % every_nth
            if proposes and rank == step // every_nth % scenario.layout.world_size:
                collection.engine.arm.propose(other_arm(collection, step))
            exchanges.append(collection.exchange)
            while number == 0 and inbox._received_version < due and rng.random() < 0.7:
                inbox.offer(inbox._received_version + 1, chunks[inbox._received_version])
            try:
                found = backward(collection, features, factors_of(scenario, index, rank, features))
                losses += found
                trained += found
            except EmbeddingError as error:
                errors.append(str(error))
                continue
            if number + 1 < scenario.passes:
                continue
            if each(index, step, loop.extra_every):
                losses += backward(collection, batch(scenario, 20_000 + step, rank))
            if loop.max_norm:
                losses.append(float(collection.clip_grad_norm_(loop.max_norm)))
            collection.optimizer.step()
            schedule.step()
            versions.append(collection.placement_version)
            prefetched.append(collection.engine.arm.prefetches > 0)
            unequal += not collection.replicas_bit_equal()
            pipeline = pipeline_of(collection)
            deferred += pipeline is not None and pipeline.deferred is not None
            if each(index, step, loop.between_every):
                losses += backward(collection, batch(scenario, 30_000 + step, rank))
                collection.optimizer.step()
            if each(index, step, loop.evaluate_every):
                with torch.no_grad():
                    collection.eval()
                    rows = values_of(collection(batch(scenario, 10_000 + step, rank)))
                    losses.append(float(sum(part.double().sum() for part in rows.values())))
                    collection.train()
            if step % 2 == 0 and not (loop.restarts and index + 1 in ends):
                turn_to(scenario.frozen_at(step + 1))
            if each(index, step, loop.read_every):
                losses.append(float(collection.gather_table("item").sum()))
            if each(index, step, loop.save_every):
                saved.append(collection.state_dict())
                collection.load_state_dict(saved[max(0, len(saved) - 2)])
            if index == loop.break_at:
                break

    ends = [round(len(every) * (part + 1) / loop.loops) for part in range(loop.loops)]
    for begin, end in zip([0, *ends], ends, strict=False):
        part: Any = every[begin:end]
        if loop.ahead:
            part = flexd.prefetch(
                every[begin : min(end, scenario.batches(rank))], collection, features=lambda pair: pair[1],
                passes_per_step=loop.announced_passes or scenario.passes, one_thread=loop.one_thread,
                ahead=loop.depth or None, uneven="empty" if scenario.uneven else "error",
            )  # fmt: skip
        on(part, begin)
        del part
        if loop.restarts and end < len(every):
            restart()
    if loop.break_at >= 0:
        on(every[loop.break_at + 1 :], loop.break_at + 1)
    tables = {table.name: collection.gather_table(table.name).double().numpy() for table in collection.tables}
    ids: dict[str, dict[int, int]] = {}
    for name, _ in scenario.unbounded:
        every = torch.arange(len(tables[name]))
        found, has = collection.ids_of(name, every)
        ids[name] = dict(zip(every[has].tolist(), found[has].tolist(), strict=True))
        assert torch.equal(collection.rows_of(name, found[has]), every[has])
    return {
        "ids": ids,
        "exchanges": exchanges, "prefetched": prefetched, "losses": losses, "trained": trained, "versions": versions,
        "unequal": unequal,
        "tables": tables, "deferred": deferred, "errors": errors,
        "digest": collection.engine.migrator.digest, "threads": threads(),
        "unused": collection.engine.unused_batches,
    }  # fmt: skip


def way_of(loop: Loop, seed: int, index: int, rank: int) -> str:
    """Return how a batch is changed after it was announced; "" if it is not."""
    if loop.changes == "any":
        return drawn_way(seed, index, rank)
    return loop.changes if rank == 0 else ""


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flexd-ahead")]
