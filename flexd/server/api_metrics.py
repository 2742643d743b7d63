"""What the HTTP side tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from flexd.api.families import counters


class RefusalsCollector(Collector):
    """Requests of the admin API that were refused.

    Args:
        counts: by reason, called once a scrape.
    """

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield counters(
            "flexd_api_refused_requests", "Requests of the admin API refused, by reason.", "reason", self._counts()
        )
