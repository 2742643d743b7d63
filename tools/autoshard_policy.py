"""AutoShard's policy (Zha et al., KDD 2022, arXiv 2208.06399), for comparison: whole tables placed one by one.

Tables come in descending predicted cost. A network represents each table; a device is the sum of the representations
of its tables, over the mean number of tables of a device, so that tasks of any size look alike; an LSTM, whose weights
all devices share, reads every device's sum and the next table, and a softmax over the devices with room for it decides.
It is trained by REINFORCE with the predicted cost of the busiest device, on many small random tasks. Sizes of layers,
the scale of the sums and the baseline (the mean of a task's episodes) are chosen here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flexd.core.errors import PlanError

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

EPISODES = 16
_REPRESENTATION, _HIDDEN = 16, 32
_LEARNING_RATE = 3e-3
_ENTROPY = 1e-3
_NO_ROOM = 1.0
"""Added to the negative reward of an episode in which a table found no room."""
_MAX_NORM = 1.0


@dataclass(frozen=True)
class ShardingTask:
    """Tables to place on devices.

    Attributes:
        features: float64[T, F], of each table.
        cost: float64[T] seconds, of each table on its own.
        bytes: float64[T], that a table takes on its device.
        devices: number of devices.
        memory_bytes: of a device.
        device_seconds: from int64[E, T] devices of the tables to float64[E, devices] predicted seconds.

    Raises:
        PlanError: no table, no device, a table larger than a device, or arrays of different lengths.
    """

    features: Float64Array
    cost: Float64Array
    bytes: Float64Array
    devices: int
    memory_bytes: float
    device_seconds: Callable[[Int64Array], Float64Array]

    def __post_init__(self) -> None:
        if self.devices < 1 or not len(self.cost) or not len(self.features) == len(self.cost) == len(self.bytes):
            raise PlanError("a sharding task without tables or devices", remedy="give one row of figures a table")
        if float(self.bytes.max()) > self.memory_bytes:
            raise PlanError("a table is larger than a device's memory", remedy="leave it out, or give more memory")


@dataclass(frozen=True)
class Placements:
    """Episodes of one task.

    Attributes:
        device: int64[E, T].
        fits: bool[E]: every table found room.
        log_probability, entropy: float32[E], sums over the decisions.
    """

    device: Int64Array
    fits: npt.NDArray[np.bool_]
    log_probability: torch.Tensor
    entropy: torch.Tensor


class AutoShardPolicy(nn.Module):
    """The network; ``features`` columns for each table."""

    def __init__(self, features: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.table = nn.Sequential(nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _REPRESENTATION))
            self.cell = nn.LSTMCell(2 * _REPRESENTATION, _HIDDEN)
            self.head = nn.Linear(_HIDDEN, 1)

    def place(self, task: ShardingTask, episodes: int = 1, generator: torch.Generator | None = None) -> Placements:
        """Place the tables of a task; without a generator each decision is the most probable one.

        A device without room for a table is masked. If none has room, all are allowed and the episode does not fit.
        """
        order = np.argsort(-task.cost, kind="stable")
        represented = self.table(torch.tensor(task.features, dtype=torch.float32))
        size = torch.tensor(task.bytes)
        held = torch.zeros(episodes, task.devices, _REPRESENTATION)
        used = torch.zeros(episodes, task.devices, dtype=torch.float64)
        hidden = torch.zeros(episodes * task.devices, _HIDDEN)
        cell = torch.zeros_like(hidden)
        fits = torch.ones(episodes, dtype=torch.bool)
        device = torch.empty(episodes, len(order), dtype=torch.int64)
        logs, entropies = torch.zeros(episodes), torch.zeros(episodes)
        each, per_table = torch.arange(episodes), task.devices / len(order)
        for at in order.tolist():
            one = represented[at].expand(episodes, task.devices, -1)
            hidden, cell = self.cell(torch.cat([held * per_table, one], dim=2).flatten(0, 1), (hidden, cell))
            room = used + size[at] <= task.memory_bytes
            some = room.any(dim=1)
            fits &= some
            logits = self.head(hidden).view(episodes, task.devices)
            chances = logits.masked_fill(~(room | ~some[:, None]), -torch.inf).softmax(dim=1)
            chosen = (
                chances.argmax(dim=1) if generator is None
                else torch.multinomial(chances.detach(), 1, generator=generator).view(-1)
            )  # fmt: skip
            device[:, at] = chosen
            logs = logs + chances[each, chosen].clamp_min(1e-12).log()
            entropies = entropies - (chances * chances.clamp_min(1e-12).log()).sum(dim=1)
            put = nn.functional.one_hot(chosen, task.devices)
            held = held + put[..., None] * one
            used = used + put * size[at]
        return Placements(device.numpy(), fits.numpy(), logs, entropies)

    def best(self, task: ShardingTask, episodes: int, seed: int = 0) -> Int64Array | None:
        """Return int64[T]: of the most probable placement and ``episodes`` drawn ones that of the least busiest device;
        None if none fits."""
        with torch.no_grad():
            found = [self.place(task)]
            if episodes:
                found.append(self.place(task, episodes, torch.Generator().manual_seed(seed)))
        device = np.concatenate([one.device for one in found])
        busiest = task.device_seconds(device).max(axis=1)
        busiest[~np.concatenate([one.fits for one in found])] = np.inf
        at = int(busiest.argmin())
        return device[at] if np.isfinite(busiest[at]) else None


def train(
    policy: AutoShardPolicy, draw: Callable[[np.random.Generator], ShardingTask], updates: int, seed: int = 0
) -> list[float]:
    """Train by REINFORCE on drawn tasks, one an update; return each task's mean of the busiest device's
    seconds over what it takes at least: those of the mean device, or of the dearest table."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=_LEARNING_RATE)
    history: list[float] = []
    for _ in range(updates):
        task = draw(rng)
        episodes = policy.place(task, EPISODES, generator)
        seconds = task.device_seconds(episodes.device)
        busiest = seconds.max(axis=1) / np.maximum(seconds.mean(axis=1), task.cost.max())
        reward = torch.tensor(-busiest - _NO_ROOM * ~episodes.fits, dtype=torch.float32)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        loss = -(advantage * episodes.log_probability).mean() - _ENTROPY * episodes.entropy.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), _MAX_NORM)
        optimizer.step()
        history.append(float(busiest.mean()))
    return history
