"""Move batches to the device of the tables ahead of their step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from flexd.embedding.side_stream import SideStream, receive


class BatchMover:
    """Moves batches to ``device``, on an accelerator beside training, on a stream of its own.

    The host waits for no copy of pinned memory (``DataLoader(pin_memory=True)``); other memory is copied before the
    call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side_stream = SideStream(device)

    def move(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device; a batch that is there already is returned as it is.

        Moved are tensors and objects with ``to(device, non_blocking=)`` (as those of TorchRec), in mappings, lists,
        tuples, named tuples and dataclasses, ``Jagged`` among them; anything else stays. An object that the batch has
        in several places stays one object.
        """
        moving = _Moving(self._device)
        with self._side_stream.work():
            moved = moving.move(batch)
        receive(self._side_stream.finished(), moving.leaves)
        return moved


class _Moving:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The originals are kept with the results: an id is that of one object only while the object lives.
        self._done: dict[int, tuple[Any, Any]] = {}
        self.leaves: list[Any] = []

    def move(self, given: Any) -> Any:
        if given is None or isinstance(given, (str, bytes, bool, int, float)):
            return given
        if id(given) not in self._done:
            self._done[id(given)] = given, self._moved(given)
        return self._done[id(given)][1]

    def _moved(self, given: Any) -> Any:
        if callable(getattr(given, "to", None)):
            moved = given.to(self._device, non_blocking=True)
            if moved is not given and hasattr(moved, "record_stream"):
                self.leaves.append(moved)
            return moved
        if isinstance(given, Mapping):
            return self._rebuilt(given, dict(given), dict if isinstance(given, dict) else type(given))
        if isinstance(given, (list, tuple)):
            named = hasattr(given, "_fields")
            kind: Any = type(given)
            return self._rebuilt(
                given, dict(enumerate(given)), lambda items: kind(*items.values()) if named else kind(items.values())
            )
        if is_dataclass(given) and not isinstance(given, type):
            attributes = {field.name: getattr(given, field.name) for field in fields(given) if field.init}
            return self._rebuilt(given, attributes, lambda items: replace(given, **items))
        return given

    def _rebuilt(self, given: Any, items: dict[Any, Any], build: Any) -> Any:
        moved = {key: self.move(value) for key, value in items.items()}
        return given if all(moved[key] is value for key, value in items.items()) else build(moved)
