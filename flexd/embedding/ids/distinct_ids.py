"""The distinct ones among ids, repeats allowed: in any order, as a rank asks for them, or by set, as a home decides."""

from __future__ import annotations

import numpy as np
import torch

from flexd.embedding import devices
from flexd.embedding.row_hashes import GOLDEN

# The table has at least 2**2 places per id: the more, the fewer ids are overwritten by others and have to be sorted.
_SPREAD_BITS = 2


def distinct_ids(
    ids: torch.Tensor, hashes: torch.Tensor, numbers: torch.Tensor | None = None, *, waits: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one place of each distinct one of int64 [n] ids, in any order.

    Args:
        hashes: int64 [n] of the ids; their highest bits look random.
        numbers: int64 [n] of the tables: equal ids of two are distinct. None: there is one table.
        waits: the host may wait for the device to know how many are distinct.

    Returns:
        (int64 [d] places, or [n], of which those behind the distinct ones are n, where the host must not wait;
        int64 [n]: for each id the number of its distinct one).
    """
    if not devices.in_host_memory(ids):
        return _by_order(numbers, ids, waits=waits)
    count, places = len(ids), torch.arange(len(ids))
    bits = count.bit_length() + _SPREAD_BITS
    # Each id writes its own place into a table, at the highest bits of its hash; the last one stays.
    mixed = hashes if numbers is None else torch.add(hashes, numbers, alpha=GOLDEN)
    at = (mixed >> 64 - bits).bitwise_and_((1 << bits) - 1)
    first = places.new_empty(1 << bits).scatter_(0, at, places).index_select(0, at)
    others = ids.index_select(0, first) != ids
    if numbers is not None:
        others |= numbers.index_select(0, first) != numbers
    left = torch.from_numpy(np.flatnonzero(others.numpy()))
    if len(left):
        chosen, number = _by_order(None if numbers is None else numbers[left], ids[left], waits=True)
        first.index_copy_(0, left, left[chosen].index_select(0, number))
    chosen = torch.from_numpy(np.flatnonzero((first == places).numpy()))
    number = torch.empty_like(first).scatter_(0, chosen, places[: len(chosen)])
    return chosen, number.index_select(0, first)


def ids_by_set(
    sets: torch.Tensor, ids: torch.Tensor, hashes: torch.Tensor, *, several: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one place of each distinct one of int64 [n] ids of int64 [n] sets, ascending by set and in each by id.

    Args:
        hashes: as of ``distinct_ids``.
        several: whether equal ids may be of several sets.

    Returns:
        (int64 [d] places; int64 [n]: for each id the number of its distinct one).
    """
    if not devices.in_host_memory(ids):
        return _by_order(sets, ids, waits=True)
    chosen, number = distinct_ids(ids, hashes, sets if several else None)
    order = devices.order_of(ids.index_select(0, chosen))
    order = order.index_select(0, devices.stable_order_of(sets.index_select(0, chosen.index_select(0, order))))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return chosen.index_select(0, order), places.index_select(0, number)


def _by_order(sets: torch.Tensor | None, ids: torch.Tensor, *, waits: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``ids_by_set`` does, by sorting. ``sets`` None: there is one. ``waits``: as of ``distinct_ids``."""
    order = devices.order_of(ids)
    if sets is not None:
        order = order.index_select(0, devices.stable_order_of(sets.index_select(0, order)))
    begins = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    begins[:1] = True
    for column in (ids,) if sets is None else (ids, sets):
        ordered = column.index_select(0, order)
        begins[1:] |= ordered[1:] != ordered[:-1]
    number = torch.empty_like(order).index_copy_(0, order, begins.to(torch.int64).cumsum(0) - 1)
    if waits:
        return order.index_select(0, begins.nonzero().view(-1)), number
    places = torch.nonzero_static(begins, size=len(ids), fill_value=len(ids)).view(-1)
    order = torch.nn.functional.pad(order, (0, 1), value=len(ids))
    return order.index_select(0, places), number
