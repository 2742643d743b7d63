"""Training on ranks with random migrations, and the same training in one process with nn.Embedding."""

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from flexd.core.keyspace import KeySpace
from flexd.core.placement import REHOMED, Delta, Placement, RankLayout
from flexd.core.sharding_types import ROW_WISE, ShardingType
from flexd.embedding.bag_collection import EmbeddingBagCollection, EmbeddingBagTable
from flexd.embedding.collection import EmbeddingCollection
from flexd.embedding.embedding_table import EmbeddingTable
from flexd.embedding.features import Jagged
from flexd.embedding.prefetch.empty_batch import empty_batch
from flexd.embedding.row_optimizers import SGD, Adagrad, Adam, DenseAdam, RowOptimizer, RowWiseAdagrad, RowWiseAdam
from flexd.embedding.store.quantized_rows import int8_rows, looked_up
from flexd.embedding.store.store import TORCH_DTYPES
from tests.support.plain_ids import PlainIds


@dataclass(frozen=True)
class Scenario:
    """A training of two tables.

    Attributes:
        second_dtype: dtype of the second table, if it differs.
        second_rate: learning rate of the second table, of the optimizer's.
        gamma: factor of the learning rate after each step.
        idle_rank: rank that has empty batches only; -1: none.
        only_rail: only rows with homes on this rail get copies, one per node; -1: rows of all rails.
        switch_every: steps after which one of the ranks proposes the other exchange; 0: never.
        fast_memory_bytes: of home rows of a rank; None: all are fast.
        slow_file: cold rows are in a file instead of host memory.
        divide_every: after every so many steps each rank divides its fast memory as it likes.
        pooling_at: of the two tables, whose features are pooled then, the second's by mean; None: they are not.
        homes: sharding types of the two tables; nodes and ranks are counted modulo those of the job.
        second_optimizer: optimizer of the second table, if it differs.
        mixed: features of the first table are not pooled where those of the second are.
        moved: rows also move to other nodes than those of their homes.
        weighted: rows that are pooled by sum have factors.
        uneven: ranks have batches with samples for different numbers of steps.
        read_only: the tables that are not trained at first.
        quantized: they have rows of int8, are looked up in the dtype of trained ones, and are never trained.
        turns: tables that are frozen, or unfrozen if they are, before each of some steps: (step, their names), or after
            the step before, of odd steps.
        loads: values that are loaded before each of some steps: (step, table, first row, rows).
        unbounded: tables of unbounded ids: (name, look-ups after which an id has a row of its own).
    """

    nodes: int
    local_ranks: int
    optimizer: str = "sgd"
    exchange: str = "chain"
    steps: int = 12
    seed: int = 0
    dtype: str = "float64"
    slots_share: float = 0.4
    """Replica slots as a share of the rows of each dim-group."""
    migrate_every: int = 2
    two_dims: bool = False
    passes: int = 1
    second_dtype: str = ""
    second_rate: float = 1.0
    gamma: float = 1.0
    average_gradients: bool = True
    idle_rank: int = -1
    only_rail: int = -1
    comm_dtype: str | tuple[str | None, ...] | None = None
    switch_every: int = 0
    fast_memory_bytes: int | None = None
    slow_file: bool = False
    divide_every: int = 0
    pooling_at: tuple[str, str] | None = None
    homes: tuple[str, str] = ("row_wise", "row_wise")
    second_optimizer: str = ""
    mixed: bool = False
    moved: bool = False
    weighted: bool = False
    read_only: tuple[str, ...] = ()
    quantized: bool = False
    turns: tuple[tuple[int, tuple[str, ...]], ...] = ()
    loads: tuple[tuple[int, str, int, int], ...] = ()
    uneven: bool = False
    unbounded: tuple[tuple[str, int], ...] = ()

    def frozen_at(self, step: int) -> frozenset[str]:
        """Return the tables that are read only in a step."""
        frozen = frozenset(self.read_only)
        never_trained = frozen if self.quantized else frozenset()
        for turn, names in self.turns:
            if turn <= step:
                frozen ^= frozenset(names) - never_trained
        return frozen

    def loaded(self, step: int) -> list[tuple[str, int, torch.Tensor]]:
        """Return (table, first row, values) of what is loaded before a step."""
        found = []
        for number, (at, name, first, rows) in enumerate(self.loads):
            if at == step:
                dim = 5 if name == "shop" and self.two_dims else 8
                rng = np.random.default_rng([self.seed, number, 29])
                dtype = self.second_dtype if name == "shop" and self.second_dtype else self.dtype
                values = torch.from_numpy(rng.normal(size=(rows, dim)) * 0.3)
                found.append((name, first, values.to(TORCH_DTYPES[dtype])))
        return found

    def batches(self, rank: int) -> int:
        """Return the number of batches of a rank before those that are empty, on one rank all of them."""
        every = self.steps * self.passes
        if not self.uneven or rank == self.seed % self.layout.world_size:
            return every
        return int(np.random.default_rng([self.seed, rank, 23]).integers(1, every + 1))

    def due(self, step: int, chunks: int) -> int:
        """Return how many of the chunks have been released before a step."""
        return min(chunks, step // self.migrate_every)

    @property
    def pooled(self) -> tuple[str, ...]:
        if self.pooling_at is None:
            return ()
        return ("shop",) if self.mixed else ("history", "target", "shop")

    def memories(self) -> dict[str, Any]:
        """Arguments of a collection. A directory is the caller's to remove."""
        if self.fast_memory_bytes is None:
            return {}
        directory = tempfile.mkdtemp(prefix="flexd-slow-rows-") if self.slow_file else None
        return {"fast_memory_bytes": self.fast_memory_bytes, "slow_memory_dir": directory}

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.nodes, self.local_ranks)


def sharding_type(text: str, layout: RankLayout, pooling_at: str = "requester") -> str:
    """Return a rule that the layout has, and a table pooled there may have."""
    rule = ShardingType.parse(text)
    if rule.copied and pooling_at == "owner":
        return ROW_WISE
    return str(
        replace(rule, number=rule.number % (layout.nodes if rule.kind == "table_row_wise" else layout.world_size))
    )


def tables_of(scenario: Scenario) -> list[EmbeddingTable]:
    by_table = scenario.second_optimizer or scenario.second_rate == 1.0
    of_item, of_shop = scenario.pooling_at or ("requester", "requester")
    item = {
        "name": "item", "rows": 61, "dim": 8, "features": ("history", "target"), "dtype": scenario.dtype,
        "init_scale": 0.5, "sharding": sharding_type(scenario.homes[0], scenario.layout, of_item),
        "trainable": "item" not in scenario.read_only,
    }  # fmt: skip
    shop = {
        "name": "shop", "rows": 17, "dim": 5 if scenario.two_dims else 8,
        "dtype": scenario.second_dtype or scenario.dtype, "init_scale": 0.5,
        "sharding": sharding_type(scenario.homes[1], scenario.layout, of_shop),
        "lr": None if by_table else scenario.second_rate * row_optimizer(scenario).lr,
        "optimizer": second_rule(scenario) if scenario.second_optimizer else None,
        "trainable": "shop" not in scenario.read_only,
    }  # fmt: skip
    for table in (item, shop):
        if table["name"] in dict(scenario.unbounded):
            table |= {"ids": "unbounded", "admit_after": dict(scenario.unbounded)[table["name"]]}
    if scenario.quantized:
        for table in (item, shop):
            if not table["trainable"]:
                table |= {"dtype": "int8", "output_dtype": table["dtype"]}
    if scenario.pooling_at is None:
        return [EmbeddingTable(**item), EmbeddingTable(**shop)]
    first = EmbeddingTable(**item) if scenario.mixed else EmbeddingBagTable(**item, pooling_at=of_item)
    return [first, EmbeddingBagTable(**shop, pooling="mean", pooling_at=of_shop)]


def second_rule(scenario: Scenario) -> RowOptimizer:
    rule = row_optimizer(replace(scenario, optimizer=scenario.second_optimizer or scenario.optimizer))
    return replace(rule, lr=scenario.second_rate * rule.lr)


def row_optimizer(scenario: Scenario) -> RowOptimizer:
    optimizers: dict[str, RowOptimizer] = {
        "sgd": SGD(lr=0.3),
        "sgd_decay": SGD(lr=0.3, weight_decay=0.1),
        "rowwise_adagrad": RowWiseAdagrad(lr=0.1),
        "adagrad": Adagrad(lr=0.1, initial_accumulator_value=0.1),
        "adam": Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-3),
        "dense_adam": DenseAdam(lr=0.1, betas=(0.8, 0.9), eps=1e-3),
        "rowwise_adam": RowWiseAdam(lr=0.1, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    }
    return optimizers[scenario.optimizer]


class PlainOptimizer:
    """The formulas of ``row_optimizer`` on the rows of a whole table that were looked up."""

    def __init__(self, name: str, rows: int, dim: int) -> None:
        self.name = name
        self.mean = torch.zeros(rows, dim, dtype=torch.float64)
        self.square = torch.full((rows, dim), 0.1 if name == "adagrad" else 0.0, dtype=torch.float64)

    def begin(self, rows: list[int]) -> None:
        """Set the state of rows to its initial value."""
        self.mean[rows], self.square[rows] = 0.0, 0.1 if self.name == "adagrad" else 0.0

    def step(self, weight: torch.Tensor, grad: torch.Tensor, seen: torch.Tensor, slower: float, step: int) -> None:
        if self.name == "dense_adam":
            seen = torch.ones_like(seen)
        w, g = weight[seen].double(), grad[seen].double()
        square = (
            g.square()
            if self.name in ("adam", "dense_adam", "adagrad")
            else g.square().mean(dim=1, keepdim=True).expand_as(g)
        )
        if self.name == "sgd":
            w -= slower * 0.3 * g
        elif self.name == "sgd_decay":
            w -= slower * 0.3 * (g + 0.1 * w)
        elif self.name.endswith("adagrad"):
            self.square[seen] += square
            w -= slower * 0.1 * g / (self.square[seen].sqrt() + (1e-8 if self.name.startswith("row") else 1e-10))
        else:
            beta1, beta2, decay = (0.9, 0.999, 0.1) if self.name == "rowwise_adam" else (0.8, 0.9, 0.0)
            self.mean[seen] = beta1 * self.mean[seen] + (1 - beta1) * g
            self.square[seen] = beta2 * self.square[seen] + (1 - beta2) * square
            root = (self.square[seen] / (1 - beta2**step)).sqrt() + 1e-3
            w -= slower * 0.1 * (self.mean[seen] / (1 - beta1**step) / root + decay * w)
        weight[seen] = w.to(weight.dtype)


def batch(scenario: Scenario, step: int, rank: int) -> dict[str, Jagged]:
    """Make skewed ids; some batches are empty, all-unique, or without a feature."""
    if scenario.batches(rank) <= step < scenario.steps * scenario.passes:
        return empty_batch(batch(scenario, 0, rank))
    rng = np.random.default_rng([scenario.seed, step, rank])
    samples = int(rng.integers(0, 5))
    out: dict[str, Jagged] = {}
    if rank == scenario.idle_rank:
        return out
    for name, rows in (("history", 61), ("target", 61), ("shop", 17)):
        if rng.random() < 0.15:
            continue
        lengths = rng.integers(0, 6, size=samples)
        count = int(lengths.sum())
        unbounded = ("shop" if name == "shop" else "item") in dict(scenario.unbounded)
        rows *= 3 if unbounded else 1
        ids = rng.permutation(rows)[:count] if rng.random() < 0.2 else (rng.zipf(1.3, count) - 1) % rows
        lengths = lengths if len(ids) == count else np.array([len(ids)])
        ids = ids * 1_000_003 - 10_000_000 if unbounded else ids
        out[name] = Jagged(
            torch.from_numpy(ids.astype(np.int32 if rng.random() < 0.5 else np.int64)), torch.from_numpy(lengths)
        )
    return out


def factors_of(
    scenario: Scenario, index: int, rank: int, features: dict[str, Jagged]
) -> dict[str, torch.Tensor] | None:
    """Return factors of the rows of features that are pooled by sum, in every other batch; None in the others. In every
    fourth one of the two features of their table has a gradient."""
    if not scenario.weighted or "history" not in scenario.pooled or index % 2 == 0:
        return None
    rng = np.random.default_rng([scenario.seed, index, rank, 5])
    out: dict[str, torch.Tensor] = {}
    for name in ("history", "target"):
        if name in features and (name == "history" or rank % 2 == 0):
            factors = torch.from_numpy(rng.normal(size=features[name].values.numel()))
            out[name] = factors.requires_grad_(name == "history" and index % 4 == 1)
    return out


def checksums(factors: dict[str, torch.Tensor], scale: float = 1.0) -> list[float]:
    grads = [each.grad * scale for each in factors.values() if each.grad is not None]
    return [float(grad @ torch.arange(1.0, 1 + len(grad), dtype=grad.dtype)) for grad in grads]


def loss_of(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a smooth function that couples the features."""
    total = sum((values.double().tanh() ** 2).sum() for values in rows.values())
    mixed = torch.stack([values.double().sum() for values in rows.values()]).sum() if rows else torch.zeros(())
    return total * 0.1 + (mixed * 0.05).sin()


def values_of(out: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: part.values if isinstance(part, Jagged) else part for name, part in out.items()}


def class_of(scenario: Scenario) -> type[EmbeddingCollection]:
    return EmbeddingCollection if scenario.pooling_at is None else EmbeddingBagCollection


def pooled_alone(rows: torch.Tensor, lengths: torch.Tensor, *, mean: bool) -> torch.Tensor:
    bags = torch.arange(len(lengths)).repeat_interleave(lengths)
    sums = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bags, rows)
    return sums / lengths.clamp(min=1).unsqueeze(1) if mean else sums


def random_chunks(scenario: Scenario, collection: EmbeddingCollection) -> list[Delta]:
    """Make a chunk every ``migrate_every`` steps that fits every rank, in every direction between tiers."""
    keyspace = KeySpace(collection.keyspace.tables)  # as the daemon knows it
    rng = np.random.default_rng([scenario.seed, 999])
    placement = Placement.empty()
    homes = collection.engine.homes
    chunks = []
    limits = np.array(collection.replica_slots)
    for _ in range(scenario.steps // scenario.migrate_every):
        keys = np.sort(rng.choice(keyspace.total_rows, size=int(rng.integers(1, 24)), replace=False)).astype(np.int64)
        keys = keys[~np.isin(keys, homes.copied_keys)]
        if scenario.only_rail >= 0:
            keys = keys[homes.rail(keys) == scenario.only_rail]
        old = placement.tiers_of(keys)
        new = rng.integers(0, 3 if scenario.only_rail < 0 else 2, size=len(keys)).astype(np.uint8)
        if scenario.moved and scenario.nodes > 1:
            moves = rng.random(len(keys)) < 0.6
            to = (homes.home_node(keys) + rng.integers(1, scenario.nodes, size=len(keys))) % scenario.nodes
            new = np.where(moves, REHOMED + to, new).astype(np.uint8)
        changed = new != old
        delta = Delta(keys[changed], old[changed], new[changed])
        after = placement.apply(delta)
        group = keyspace.group_of(after.keys)
        addresses = homes.addresses(after.keys)
        used = [
            homes.layout.replica_slots_used(addresses[group == g], after.tiers[group == g]).max(initial=0)
            for g in range(len(limits))
        ]
        if (np.array(used) <= limits).all():
            placement = after
            chunks.append(delta)
    return chunks


def train_alone(
    scenario: Scenario,
) -> tuple[list[list[float]], dict[str, np.ndarray], dict[str, dict[int, int]]]:
    """Return losses by rank, with checksums of the gradients of factors, the final tables, and of those of unbounded
    ids the id of each row that has one, of plain nn.Embedding in this process."""
    specs = {table.name: table for table in tables_of(scenario)}
    # Of initial values alone: rows without homes of their own and without a pooling place.
    plain_tables = [
        EmbeddingTable(
            spec.name, spec.rows, spec.dim, dtype=spec.dtype, init_scale=spec.init_scale, trainable=spec.trainable
        )
        for spec in specs.values()
    ]
    reference = EmbeddingCollection(plain_tables, layout=RankLayout(1, 1), seed=scenario.seed)
    tables = {name: nn.Embedding.from_pretrained(reference.initial_table(name), freeze=True) for name in specs}
    table_of = {"history": "item", "target": "item", "shop": "shop"}
    world = scenario.layout.world_size
    shares = world if scenario.average_gradients else 1
    kinds = {"item": scenario.optimizer, "shop": scenario.second_optimizer or scenario.optimizer}
    plain = {name: PlainOptimizer(kinds[name], spec.rows, spec.dim) for name, spec in specs.items()}
    homes = {name: PlainIds(specs[name].rows, admit_after) for name, admit_after in scenario.unbounded}
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(scenario.steps):
        frozen, before = scenario.frozen_at(step), scenario.frozen_at(step - 1)
        for name, table in tables.items():
            table.weight.requires_grad_(name not in frozen)
            if name in before - frozen:
                plain[name] = PlainOptimizer(kinds[name], specs[name].rows, specs[name].dim)
        with torch.no_grad():
            for name, first, values in scenario.loaded(step):
                is_int8 = specs[name].dtype == "int8"
                stored = looked_up(int8_rows(values), torch.int8) if is_int8 else values
                tables[name].weight[first : first + len(values)] = stored
        for table in tables.values():
            if table.weight.requires_grad:
                table.weight.grad = torch.zeros_like(table.weight)
        seen = {name: torch.zeros(spec.rows, dtype=torch.bool) for name, spec in specs.items()}
        for index in range(scenario.passes):
            batches = [batch(scenario, step * scenario.passes + index, rank) for rank in range(world)]
            for name, home in homes.items():
                given = [
                    number
                    for of_rank in batches
                    for feature, jagged in of_rank.items()
                    if table_of[feature] == name and name not in frozen
                    for number in jagged.values.tolist()
                ]
                # Where no table is trained every look-up is a step.
                begun = home.look_up(Counter(given), new_step=index == 0 or len(frozen) == len(specs))
                with torch.no_grad():
                    tables[name].weight[begun] = 0.0
                plain[name].begin(begun)
            for rank, features in enumerate(batches):
                rows, places = {}, {}
                for name, jagged in features.items():
                    table, home = table_of[name], homes.get(table_of[name])
                    places[name] = jagged.values.long() if home is None else home.rows(jagged.values)
                    rows[name] = tables[table](places[name])
                    seen[table][places[name]] = True
                    if home is not None and len(places[name]) and bool((fresh := home.fresh(jagged.values)).any()):
                        shared = tables[table].weight[home.shared]
                        own_gradient = rows[name] - rows[name].detach()
                        rows[name] = torch.where(fresh.unsqueeze(1), shared + own_gradient, rows[name])
                        seen[table][home.shared] = True
                factors = factors_of(scenario, step * scenario.passes + index, rank, features) or {}
                rows |= {name: rows[name] * each.unsqueeze(1) for name, each in factors.items()}
                rows |= {
                    name: pooled_alone(part, features[name].lengths, mean=name == "shop")
                    for name, part in rows.items()
                    if name in scenario.pooled
                }
                loss = loss_of(rows)
                if loss.requires_grad:
                    (loss / shares).backward()
                losses[rank] += [float(loss.detach()), *checksums(factors, shares)]
        slower = scenario.gamma**step
        with torch.no_grad():
            for name, table in tables.items():
                if name in frozen:
                    continue
                rate = slower * (scenario.second_rate if name == "shop" else 1.0)
                plain[name].step(table.weight, table.weight.grad, seen[name], rate, step + 1)
    ids = {name: home.ids() for name, home in homes.items()}
    return losses, {name: table.weight.detach().double().numpy() for name, table in tables.items()}, ids


def check_training(results: list[dict[str, Any]], scenario: Scenario, tolerance: float) -> None:
    """Compare the ranks of a training with one process, and with each other."""
    losses, tables, ids = train_alone(scenario)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["trained"], losses[rank], rtol=0, atol=tolerance)
        assert result["ids"] == ids, "another id has a row"
        assert result["unequal"] == 0, "a replica differed from its home copy"
        for what in ("versions", "exchanges", "prefetched", "digest"):
            assert result[what] == results[0][what], f"ranks differ in their {what}"
        for name, table in tables.items():
            never_trained = all(name in scenario.frozen_at(step) for step in range(scenario.steps))
            np.testing.assert_allclose(result["tables"][name], table, rtol=0, atol=0 if never_trained else tolerance)
