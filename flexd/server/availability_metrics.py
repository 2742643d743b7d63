"""Metric families of a daemon that shares a lease with others."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from flexd.api.families import counter, gauge
from flexd.server.figures import AvailabilityFigures


def availability_metrics(figures: AvailabilityFigures) -> Iterator[Metric]:
    yield gauge("flexd_leading", "1 while this daemon leads, 0 while it stands by.", figures.leading)
    yield gauge("flexd_lease_term", "Term of the lease that this daemon holds; 0 if it holds none.", figures.term)
    yield counter(
        "flexd_leadership_acquisitions", "Times that this daemon began to lead.", figures.leadership_acquisitions
    )
    yield counter(
        "flexd_leadership_losses", "Times that this daemon lost the lease while it led.", figures.leadership_losses
    )
    yield counter("flexd_lease_failures", "Attempts that could not reach the lease.", figures.lease_failures)
