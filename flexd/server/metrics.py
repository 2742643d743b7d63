"""The metrics page: the metric families of the API's models, in Prometheus' naming (base units, ``_total``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flexd.api.rank import RankPage
from flexd.api.routes import RANKS, DaemonApi
from flexd.core.errors import ApiError
from flexd.core.families import MAX_LABEL_VALUES, counter


class Metrics:
    """The page of one daemon. Its registry is its own, so that nothing else in the process shows up.

    Args:
        api: read once a scrape, from an HTTP thread.
    """

    def __init__(self, api: DaemonApi) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(DaemonCollector(api))
        ProcessCollector(registry=self.registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return (page, content type): OpenMetrics if the ``Accept`` header requests it, else Prometheus text."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class DaemonCollector(Collector):
    """Yields the metric families of a daemon's status and ranks; keeps nothing between scrapes."""

    def __init__(self, api: DaemonApi) -> None:
        self._api = api

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect at registration, when the daemon is not up yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._api.status().metrics()
        try:
            ranks = self._api.handler(RANKS.handler)(offset=0, limit=MAX_LABEL_VALUES)
        except ApiError:  # A daemon that waits for its state or its tables has no ranks.
            ranks = RankPage()
        yield from ranks.metrics()


class RefusalsCollector(Collector):
    """Yields the refused requests of the admin API.

    Args:
        counts: by reason, called once a scrape.
    """

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Requests of the admin API refused, by reason."
        yield counter("flexd_api_refused_requests", text, lambda counts: counts, ("reason",)).of(self._counts())
