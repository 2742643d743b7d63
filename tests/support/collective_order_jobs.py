"""Jobs of ranks: which thread issues which collective, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

from flexd.embedding.exchange import collectives, job_groups
from tests.support.exactness import Scenario
from tests.support.run_ahead_jobs import Loop, train

Issued = tuple[str, tuple[int, ...], str]


def issued(rank: int, scenario: Scenario, loop: Loop) -> tuple[list[Issued], int]:
    """Train; return (thread, ranks of the group, operation) of each collective, and the number of new groups."""
    record: list[Issued] = []
    made = 0

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            thread = "training" if threading.current_thread() is threading.main_thread() else "other"
            record.append((thread, tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)), name))
            return call(*args, **kwargs)

        return issue

    new_subgroup = job_groups.new_subgroup

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return new_subgroup(*args, **kwargs)

    with (
        mock.patch.object(dist, "all_to_all_single", recorded("all_to_all", dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", recorded("all_reduce", dist.all_reduce)),
        mock.patch.object(collectives, "all_gather_flat", recorded("all_gather", collectives.all_gather_flat)),
        mock.patch.object(job_groups, "new_subgroup", counted),
    ):
        train(rank, scenario, loop)
    return record, made
