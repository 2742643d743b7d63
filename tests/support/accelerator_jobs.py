"""Jobs of other modules, run with the kernels that an accelerator runs instead of those for host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from flexd.embedding import devices


def run(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(rank, *args)`` as if no tensor were in host memory."""
    with mock.patch.object(devices, "in_host_memory", return_value=False):
        return function(rank, *args)


def run_in_units(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """As ``run``, and every message is packed and taken apart in units, however few parts it has."""
    with (
        mock.patch("flexd.embedding.exchange.unit_message.MAX_JOINED_PARTS", 0),
        mock.patch("flexd.embedding.exchange.hop.MAX_JOINED_PARTS", 0),
    ):
        return run(rank, function, *args)
