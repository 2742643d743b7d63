"""What the tiered storage of a rank did between two reports to the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexd.control.protocol.report import SlowMemoryReport, SlowTableReport, named_tables
from flexd.embedding.store.slow.cold_rows import SlowTraffic
from flexd.embedding.store.slow.tier import Tier
from flexd.embedding.store.store import GroupStore


class SlowMemoryMeter:
    """What happened in the tiered storage of a rank between two reports.

    Args:
        stores: of all dim-groups.
    """

    def __init__(self, stores: Sequence[GroupStore]) -> None:
        self._tiers = [(store.group.tables, store.tier) for store in stores if store.tier is not None]
        self._last = [self._now(tier) for _, tier in self._tiers]

    def drain(self) -> SlowMemoryReport | None:
        """Return what happened since the call before; None where all rows are in fast memory."""
        if not self._tiers:
            return None
        found: list[SlowTableReport] = []
        bytes_read = bytes_written = 0
        seconds = 0.0
        for number, (tables, tier) in enumerate(self._tiers):
            now, before = self._now(tier), self._last[number]
            self._last[number] = now
            if tier.begun != before.begun:
                before = _Totals(tier.begun, torch.zeros_like(now.by_table), SlowTraffic())
            since = now.by_table - before.by_table
            for at in since.any(dim=1).nonzero().view(-1).tolist():
                found.append(SlowTableReport(tables[at], *since[at].tolist()))
            bytes_read += now.traffic.bytes_read - before.traffic.bytes_read
            bytes_written += now.traffic.bytes_written - before.traffic.bytes_written
            seconds += now.traffic.seconds - before.traffic.seconds
        return SlowMemoryReport(named_tables(found), bytes_read, bytes_written, seconds)

    @staticmethod
    def _now(tier: Tier) -> _Totals:
        return _Totals(tier.begun, tier.counts.by_table(), replace(tier.slow.traffic))


@dataclass(frozen=True)
class _Totals:
    begun: int
    by_table: torch.Tensor
    traffic: SlowTraffic
