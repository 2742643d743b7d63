"""Sequences of legal and illegal calls of the trainer's side, and what one process of plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

import flexd
from flexd.core.errors import FlexdError
from flexd.core.placement import RankLayout
from flexd.embedding.exchange import waits
from flexd.embedding.features import Jagged

ROWS, DIM, RATE = 20, 3, 0.1
BATCHES = 3
"""Of a loop."""

LEGAL = (
    "step", "accumulate", "apply", "drop", "clip", "evaluate", "read", "save", "load", "no backward", "empty", "loop",
    "loop ends", "loop changes", "loop evaluates", "loop reads",
)  # fmt: skip
REFUSED = {
    "bad id": "rank",
    "bad id in a loop": "rank",
    "changed to a bad id in a loop": "rank",
    "bad feature": "rank",
    "bad dtype": "rank",
    "bad lengths": "rank",
    "no mapping": "rank",
    "late backward": "a backward pass after the gradients of its look-up were summed",
    "other mode": "ranks make different calls",
    "other rows": "load",
    "bad norm": "a norm of type -1",
    "bad table": "no table 'other'",
    "other loop": "begin a loop of flexd.prefetch with other settings",
    "bad loader": "loader",
}
"""Calls that are wrong on one rank or on all, and what the errors of all ranks contain. Training goes on after them."""
OF_ONE_RANK = ("other mode", "other rows", "other loop")
"""With one rank they are legal."""
FATAL = (
    "other rate", "skips a step", "raises", "extra look-up", "leaves", "leaves a loop", "leaves a loop before a step",
    "clips", "clips in a loop", "closes",
)  # fmt: skip
"""Calls of one rank after which training ends on all of them."""


@dataclass(frozen=True)
class Call:
    """Attributes:
    odd: the rank that does what is wrong, modulo their number.
    """

    kind: str
    seed: int
    odd: int


class _Loader:
    def __init__(self, batches: list[Any], *, fails: bool) -> None:
        self._batches, self._fails = batches, fails

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches
        if self._fails:
            raise OSError("the loader has failed")


def ids_of(call: Call, rank: int, number: int = 0) -> torch.Tensor:
    rng = np.random.default_rng([call.seed, rank, number])
    count = int(rng.integers(0, 6))
    if call.kind == "empty" and rank == call.odd:
        count = 0
    return torch.from_numpy(rng.integers(0, ROWS, count))


def loss_of(rows: torch.Tensor) -> torch.Tensor:
    return (rows + 1).square().sum()


def _table(call: Call) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([call.seed, 9]).random((4, DIM)))


class Reference:
    """One process of plain torch, with the batches of all ranks."""

    def __init__(self, weight: torch.Tensor, world_size: int) -> None:
        self.weight = torch.nn.Parameter(weight.clone())
        self._optimizer = torch.optim.SGD([self.weight], RATE)
        self._ranks = range(world_size)

    def _backward(self, call: Call, number: int = 0, ranks: Any = None) -> None:
        for rank in self._ranks if ranks is None else ranks:
            loss_of(self.weight[ids_of(call, rank, number)]).backward()

    def play(self, call: Call) -> None:
        kind = call.kind
        if kind in ("step", "empty", "accumulate", "late backward"):
            self._backward(call)
        if kind == "no backward":
            self._backward(call, ranks=[rank for rank in self._ranks if rank != call.odd])
        if kind in ("step", "empty", "no backward", "apply", "late backward"):
            self._step()
        if kind == "drop":
            self._optimizer.zero_grad()
        if kind == "clip":
            torch.nn.utils.clip_grad_norm_([self.weight], 0.5)
        if kind == "load":
            with torch.no_grad():
                self.weight[5:9] = _table(call)
        if kind.startswith("loop") or kind in ("bad loader", "bad id in a loop", "changed to a bad id in a loop"):
            last = 1 if kind in ("bad id in a loop", "changed to a bad id in a loop", "loop ends") else BATCHES
            for number in range(last):
                self._backward(call, number)
                self._step()

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Player:
    """One rank."""

    def __init__(self, rank: int, layout: RankLayout, settings: dict[str, Any]) -> None:
        self.rank, self.layout = rank, layout
        tables = [flexd.EmbeddingTable("item", ROWS, DIM, dtype="float64")]
        settings = dict(settings)
        if settings.pop("unbounded_ids", False):
            tables.append(flexd.EmbeddingTable("user", 10, 2, ids="unbounded"))
        self._has_users = len(tables) > 1
        self.collection = flexd.EmbeddingCollection(
            tables, optimizer=flexd.SGD(RATE), layout=layout, average_gradients=False, **settings
        )

    def _batch(self, ids: torch.Tensor) -> dict[str, Jagged]:
        given = {"item": ids} | ({"user": ids - 2**40} if self._has_users else {})
        return {name: Jagged(values, torch.tensor([len(ids)])) for name, values in given.items()}

    def rows(self, given: Any) -> torch.Tensor:
        found: torch.Tensor = self.collection(given)["item"].values
        return found

    def _train(self, given: Any, *, backward: bool = True) -> None:
        rows = self.rows(given)
        if backward:
            loss_of(rows).backward()
        self.collection.optimizer.step()

    def _wrong(self, call: Call, ids: torch.Tensor) -> Any:
        """Return a batch that cannot be looked up."""
        return {
            "bad feature": {"other": Jagged(ids, torch.tensor([len(ids)]))},
            "bad dtype": {"item": Jagged(ids.double(), torch.tensor([len(ids)]))},
            "bad lengths": {"item": Jagged(ids, torch.tensor([len(ids) + 1]))},
            "no mapping": 3,
        }.get(call.kind, self._batch(torch.tensor([-1 if call.seed % 2 else ROWS])))

    def play(self, call: Call) -> None:
        """Raises what the call raises."""
        kind, odd, collection = call.kind, self.rank == call.odd, self.collection
        ids = ids_of(call, self.rank)
        if kind in ("step", "empty", "no backward"):
            self._train(self._batch(ids), backward=kind != "no backward" or not odd)
        elif kind == "accumulate":
            loss_of(self.rows(self._batch(ids))).backward()
        elif kind == "apply":
            collection.optimizer.step()
        elif kind == "drop":
            collection.optimizer.zero_grad()
        elif kind == "clip":
            collection.clip_grad_norm_(0.5)
        elif kind == "evaluate":
            with torch.no_grad():
                self.rows(self._batch(ids))
        elif kind == "read":
            collection.gather_table("item")
        elif kind == "save":
            collection.load_state_dict(collection.state_dict())
        elif kind in ("load", "other rows"):
            collection.load_rows("item", 5, _table(call) + (kind == "other rows" and odd))
        elif kind == "late backward":
            rows = self.rows(self._batch(ids))
            loss_of(rows).backward()
            collection.optimizer.step()
            loss_of(rows).backward()
        elif kind == "other mode":
            collection.train(not odd)
            try:
                self.rows(self._batch(ids))
            finally:
                collection.train()
        elif kind == "bad norm":
            self.rows(self._batch(ids))
            collection.clip_grad_norm_(1.0, -1)
        elif kind == "bad table":
            collection.load_rows("other", 0, None)
        elif "loop" in kind or kind == "bad loader":
            self._loop(call, odd=odd)
        elif odd:
            self._train(self._wrong(call, ids))
        else:
            self._train(self._batch(ids))

    def _loop(self, call: Call, *, odd: bool) -> None:
        kind, collection = call.kind, self.collection
        batches: list[Any] = [self._batch(ids_of(call, self.rank, number)) for number in range(BATCHES)]
        wrong = self._batch(torch.tensor([ROWS]))
        if kind == "bad id in a loop" and odd:
            batches[1] = wrong
        given = {"one_thread": call.seed % 2 == 0} | ({"passes_per_step": 2} if kind == "other loop" and odd else {})
        loader = _Loader(batches, fails=kind == "bad loader" and odd)
        for number, features in enumerate(flexd.prefetch(loader, collection, **given)):
            chosen = features
            if kind == "changed to a bad id in a loop" and odd and number == 1:
                chosen = wrong
            if kind == "loop changes" and odd:
                values = features["item"].values
                kept = values.clone()
                values.zero_()
                chosen = self._batch(kept)
            if kind == "loop evaluates":
                with torch.no_grad():
                    self.rows(self._batch(ids_of(call, self.rank, 7)))
            if kind == "leaves a loop before a step" and odd and number == 1:
                loss_of(self.rows(chosen)).backward()
                break
            if kind == "clips in a loop" and odd and number == 1:
                loss_of(self.rows(chosen)).backward()
                collection.clip_grad_norm_(0.5)
                collection.optimizer.step()
                continue
            self._train(chosen)
            if kind == "loop reads":
                collection.gather_table("item")
            if kind == "loop ends" or (kind == "leaves a loop" and odd and number == 1):
                break

    def play_fatal(self, call: Call) -> None:
        """Do what ends the training of all ranks. Raises what it raises here."""
        kind, odd, collection = call.kind, self.rank == call.odd, self.collection
        if "loop" in kind:
            self._loop(call, odd=odd)
        if not odd:
            return
        if kind == "other rate":
            collection.optimizer.param_groups[0]["lr"] *= 0.5
        elif kind == "skips a step":
            loss_of(self.rows(self._batch(ids_of(call, self.rank)))).backward()
        elif kind == "clips":
            loss_of(self.rows(self._batch(ids_of(call, self.rank)))).backward()
            collection.clip_grad_norm_(0.5)
        elif kind == "extra look-up":
            with torch.no_grad():
                self.rows(self._batch(ids_of(call, self.rank)))
        elif kind == "raises":
            with collection:
                raise ValueError("of the trainer")
        elif kind == "closes":
            collection.close()


def _text(call: Callable[[], Any]) -> str:
    """Return what a call raises, "" if nothing; "unnamed: ..." if it is no error of flexd."""
    try:
        call()
    except FlexdError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"unnamed: {type(error).__name__}: {error}"
    return ""


def play(
    rank: int, layout: RankLayout, settings: dict[str, Any], calls: list[Call]
) -> tuple[torch.Tensor, list[str], torch.Tensor]:
    """Return the initial table, what each call raised, and the table at the end."""
    player = Player(rank, layout, settings)
    first = player.collection.gather_table("item")
    texts = [_text(lambda call=call: player.play(call)) for call in calls]
    return first, texts, player.collection.gather_table("item")


def play_to_the_end(
    rank: int, layout: RankLayout, settings: dict[str, Any], calls: list[Call], fatal: Call, timeout_seconds: float
) -> tuple[list[str], str, str]:
    """Return what each call raised, what the fatal one did, and what training after it did."""
    player = Player(rank, layout, settings)
    groups = player.collection.engine.groups
    groups.timeout_seconds = timeout_seconds
    waits.NAMED_SECONDS = timeout_seconds / 4
    for peers in (groups.world, groups.node, groups.rail):
        if peers.group is not None:
            backend = peers.group._get_backend(torch.device("cpu"))  # type: ignore[attr-defined]
            backend._set_default_timeout(timedelta(seconds=timeout_seconds))
    texts = [_text(lambda call=call: player.play(call)) for call in calls]
    own = _text(lambda: player.play_fatal(fatal))
    if fatal.kind == "leaves" and rank == fatal.odd:
        return texts, own, ""

    def train() -> None:
        for number in range(3):
            player.play(Call("step", fatal.seed + number, 0))
        player.collection.gather_table("item")

    after = _text(train) if not own else ""
    with suppress(FlexdError):
        player.collection.engine.close(orderly=False)
    return texts, own, after
