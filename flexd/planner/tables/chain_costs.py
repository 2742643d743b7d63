"""Loads of flexd's own exchanges for every home rule and answer (docs/cost-model.md, "Tables").

Rows take the chain: to the rank of the node that has the home's local rank, and over the rail to the home. Sums take
the rail first and the node second, so that one vector a bag crosses the network for each node that has any of its ids.
Rows that every rank has copies of travel never; their gradients are summed as those of rows at DEVICE.
Bytes are those of one optimizer step, with no copies of single rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.prices import exposed_share, latencies
from flexd.planner.model.row_bytes import Exchange, Phase
from flexd.planner.tables.chain_loads import MESSAGES, copy_loads, kernel_bytes, row_loads, sum_loads
from flexd.planner.tables.options import Answer, HomeKind, Option, Part, TableOptions
from flexd.planner.tables.table_work import TableWork
from flexd.topology.cluster import Cluster, Collective, Link

Float64Array = npt.NDArray[np.float64]

OPTIONS = (
    Option(HomeKind.ALL, Answer.ROWS),
    Option(HomeKind.ALL, Answer.SUMS),
    Option(HomeKind.NODE, Answer.ROWS),
    Option(HomeKind.NODE, Answer.SUMS),
    Option(HomeKind.RANK, Answer.ROWS),
    Option(HomeKind.RANK, Answer.SUMS),
    Option(HomeKind.COPIES, Answer.NONE),
)
"""What the runtime can do with a table."""
PHASES = (
    *(f"{answer}_{message}_{link}" for answer in (Answer.ROWS, Answer.SUMS) for message in MESSAGES for link in Link),
    *(f"summed_gradients_{link}" for link in Link),
    "lookup",
    "update",
)
"""Each answer has collectives of its own, and so have the gradients of tables that every rank has; look-ups and updates
of all run together."""
_EXCHANGED = 2 * len(MESSAGES) * len(Link)
"""Load axes of an answer."""


_SUMMED = (
    (Link.INTRA_NODE, Phase.SYNC_SUMS, Collective.ALL_TO_ALL),
    (Link.INTER_NODE, Phase.SYNC_ROWS, Collective.ALL_REDUCE),
)
"""How gradients of copies are summed, by link."""


ROW_BYTES_PER_SECOND = 0.8e12
"""At which look-ups and updates read and write rows, where step costs are not measured: an assumption, half of the
1,555 GB/s in the data sheet of an A100 with 40 GB."""


def chain_options(
    work: TableWork,
    layout: RankLayout,
    cluster: Cluster,
    options: Sequence[Option] = OPTIONS,
) -> TableOptions:
    """Return the loads of the options, sent and received bytes in every phase.

    Args:
        cluster: bandwidths at the message sizes of rows spread over all ranks, exposed shares, and the step costs that
            were measured: what an answer takes beside bytes is the larger of those and of the latencies.
        options: the first is what everything is compared with.
    """
    costs = cluster.step_costs
    exchanges = len(PHASES) - 2
    axis = np.concatenate([np.repeat(np.arange(exchanges), 2), [exchanges, exchanges + 1]])
    loads = np.zeros((len(work.names), len(options), len(Part), len(axis)))
    memory = np.zeros((len(work.names), len(options), len(Part)))
    allowed = np.ones(loads.shape[:2], bool)
    for at, option in enumerate(options):
        sums = option.answer is Answer.SUMS
        if option.rule is HomeKind.COPIES:
            copied = copy_loads(work, layout)
            loads[:, at, :, :_EXCHANGED] = copied[:, :, :_EXCHANGED]
            loads[:, at, :, 2 * _EXCHANGED : -2] = copied[:, :, _EXCHANGED:]
        else:
            first = _EXCHANGED if sums else 0
            of = sum_loads if sums else row_loads
            loads[:, at, :, first : first + _EXCHANGED] = of(work, layout, option.rule)
        loads[:, at, :, -2:] = kernel_bytes(work, layout, option.rule, sums=sums)
        part, ranks = {
            HomeKind.ALL: (Part.EVERYWHERE, layout.world_size),
            HomeKind.NODE: (Part.HOME_NODE, layout.local_ranks),
            HomeKind.RANK: (Part.HOME_RANK, 1),
            # A rank's own part of the rows needs no copy there.
            HomeKind.COPIES: (Part.EVERYWHERE, 1),
        }[option.rule]
        memory[:, at, part] = work.stored_bytes / ranks
        allowed[:, at] = (work.bags > 0) | (not sums)
        if layout.nodes == 1 and option.rule is HomeKind.NODE:
            allowed[:, at] = False
    shares = exposed_share(cluster)
    # Messages are priced at the size that they have when all tables are spread over all ranks and answer by rows.
    sizes = loads[:, 0, Part.EVERYWHERE].sum(axis=0)
    seconds = []
    for _ in (Answer.ROWS, Answer.SUMS):
        for message, phase in enumerate((Phase.FORWARD_IDS, Phase.FORWARD_ROWS, Phase.BACKWARD_ROWS)):
            for at, link in enumerate(Link):
                size = float(sizes[2 * (message * len(Link) + at)])
                curve = cluster.curve(link, Collective.ALL_TO_ALL)
                seconds.append(curve.seconds_per_byte(max(size, 1.0)) * float(shares[phase]))
    summed = loads[:, :, Part.EVERYWHERE, 2 * _EXCHANGED : -2 : 2].max(axis=1, initial=0).sum(axis=0)
    for at, (link, phase, collective) in enumerate(_SUMMED):
        curve = cluster.curve(link, collective)
        seconds.append(curve.seconds_per_byte(max(float(summed[at]), 1.0)) * float(shares[phase]))
    seconds += [1.0 / (ROW_BYTES_PER_SECOND if costs is None else costs.row_bytes_per_second)] * 2

    def fixed(*tiers: Tier) -> float:
        return float(latencies(cluster, layout, Exchange.CHAIN, tiers).sum())

    with_sums, with_copies = fixed(), fixed(Tier.DEVICE) - fixed()
    if costs is not None:
        with_sums = max(with_sums, costs.sums_seconds)
        with_copies = max(with_copies, costs.copies_seconds)
    return TableOptions(
        work.names,
        tuple(options),
        PHASES,
        axis.astype(np.int64),
        np.array(seconds),
        loads,
        memory,
        allowed,
        ((Answer.SUMS, with_sums), (Answer.NONE, with_copies)),
    )
