"""Which row an id has under the policies of others, decided for all look-ups beforehand.

Each stay of an id in a table has a row of its own here, which begins as every row does: training cannot tell it from a
row that was reset. So a table has as many rows as there were stays, and one that ids without a row share.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def hashed_rows(ids: Ints, rows: int) -> tuple[Ints, int, int]:
    """Return (row of each look-up, rows of the table, evictions) of ids modulo rows."""
    return ids % rows, rows, 0


def rows_after(ids: Ints, rows: int, look_ups: int) -> tuple[Ints, int, int]:
    """As ``hashed_rows``: the last row until an id was looked up so often, and for ever where there is no other."""
    dense = np.unique(ids, return_inverse=True)[1]
    order = np.argsort(dense, kind="stable")
    first = np.searchsorted(dense[order], dense[order])
    count = np.empty_like(dense)
    count[order] = np.arange(len(dense)) - first + 1
    came = np.flatnonzero(count == look_ups)[: rows - 1]
    row_of = np.full(int(dense.max()) + 1, rows - 1)
    row_of[dense[came]] = np.arange(len(came))
    return np.where(count >= look_ups, row_of[dense], rows - 1), rows, 0


def least_recently_used(ids: Ints, rows: int) -> tuple[Ints, int, int]:
    """As ``hashed_rows``: an id gets a row at its first look-up, that of the id that was used longest ago, as
    TorchRec's MPZCH would give it with one bucket and no limit of probes."""
    stays: OrderedDict[int, int] = OrderedDict()
    found = np.empty_like(ids)
    begun = evicted = 0
    for at, id_ in enumerate(ids.tolist()):
        row = stays.pop(id_, None)
        if row is None:
            row, begun = begun, begun + 1
            if len(stays) == rows - 1:
                stays.popitem(last=False)
                evicted += 1
        stays[id_] = found[at] = row
    return found, begun + 1, evicted


def distance_lfu(ids: Ints, rows: int, interval: int) -> tuple[Ints, int, int]:
    """As ``hashed_rows``: TorchRec's ``DistanceLFU_EvictionPolicy``, decided after every so many look-ups: of the ids
    that have rows and those of the interval those stay with the most uses by intervals since the last one."""
    dense = np.unique(ids, return_inverse=True)[1]
    size, kinds = rows - 1, int(dense.max()) + 1
    slot_of, owner, stay = np.full(kinds, -1), np.full(size, -1), np.zeros(size, dtype=np.int64)
    uses, last = np.zeros(size), np.zeros(size)
    found = np.empty_like(dense)
    begun = evicted = 0
    for number, start in enumerate(range(0, len(dense), interval)):
        some = dense[start : start + interval]
        slots = slot_of[some]
        found[start : start + interval] = np.where(slots >= 0, stay[slots], -1)
        distinct, counts = np.unique(some, return_counts=True)
        known = slot_of[distinct] >= 0
        uses[slot_of[distinct[known]]] += counts[known]
        last[slot_of[distinct[known]]] = number
        order = np.argsort(-counts[~known], kind="stable")
        new, of_new = distinct[~known][order], counts[~known][order]
        scores = np.concatenate([np.where(owner < 0, -np.inf, uses / (number - last + 1)), of_new])
        stays = np.zeros(len(scores), dtype=bool)
        stays[np.argsort(-scores, kind="stable")[:size]] = True
        into, come = np.flatnonzero(~stays[:size]), stays[size:]
        into, lost = into[: come.sum()], owner[into[: come.sum()]]
        evicted += int((lost >= 0).sum())
        slot_of[lost[lost >= 0]] = -1
        owner[into], slot_of[new[come]] = new[come], into
        uses[into], last[into] = of_new[come], number
        stay[into] = begun + np.arange(len(into))
        begun += len(into)
    return np.where(found < 0, begun, found), begun + 1, evicted
