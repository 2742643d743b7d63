"""What homes and dealing by affinity would win."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexd.api.base import FiniteOrNone, Model, RequestBody
from flexd.api.families import gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from flexd.operations.affinity import UserNodes
    from flexd.planner.affinity.outlook import AffinityOutlook

MAX_PAGE_USERS = 100_000


class ShareRangeReport(Model):
    """A predicted share, and the 5th to the 95th percentile over batches."""

    expected: FiniteOrNone = None
    """Of all judged batches together."""
    low: FiniteOrNone = None
    """5th percentile."""
    high: FiniteOrNone = None
    """95th percentile."""


class AffinityReport(Model):
    """Bytes between nodes with rows in the node that uses them most, as far as they may move, and samples dealt."""

    words: tuple[str, ...] = ()
    """The answer in sentences, the verdict first."""
    samples: int = 0
    """Sampled training samples held."""
    batches: int = 0
    """Whole global batches among them."""
    batch_samples: int = 0
    """Samples of a global batch, from the accesses of a step and the mean length."""
    moved_rows: int = 0
    """Rows that would live in another node than by their rule, or do."""
    move_bytes: FiniteOrNone = None
    """Of moving them once, with optimizer state."""
    loader: ShareRangeReport | None = None
    """Share of the chain's bytes left with a loader that deals; null if not known."""
    dealing_loader: ShareRangeReport | None = None
    """Share left with a loader that deals and rows where their rule puts them; null if not known."""
    chain_bytes: FiniteOrNone = None
    """Bytes between nodes of a step of the whole job without affinity, of the sampled tables."""
    saved_seconds_loader: FiniteOrNone = None
    """Transfer time of a rank's step that a loader saves, hidden or not."""
    pays_loader: bool = False
    """Whether a loader that deals pays."""
    users: int = 0
    """Users whose node is known."""
    by_user: ShareRangeReport | None = None
    """Share left with each user's samples in her node; null without ids of users."""
    learning: bool = False
    """Whether homes are being learnt for the first time: nothing else is known then."""


class UsersRequest(RequestBody):
    """A page of users."""

    offset: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Users before it."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_USERS)] = MAX_PAGE_USERS
    """Users of it, at most."""


class UserNodePage(Model):
    """Users, ascending by id, and the node in which the samples of each are best trained."""

    learnt: int = 0
    """Number of the learning that found them: pages of equal numbers belong together."""
    nodes: int = 0
    """Nodes of the job."""
    users: int = 0
    """Users of all pages."""
    ids: tuple[int, ...] = ()
    """Of this page."""
    nodes_of: tuple[int, ...] = ()
    """Node of each."""
    by_user: ShareRangeReport | None = None
    """Share of the chain's bytes left with all samples of a user in her node; null if it is not known."""


SHARES = ("loader", "dealing_loader", "by_user")


def affinity_report(outlook: AffinityOutlook) -> AffinityReport:
    """Return the report of an outlook."""
    found = {name: getattr(outlook, name) for name in SHARES}
    return AffinityReport.from_object(
        outlook, **{name: None if each is None else ShareRangeReport.from_object(each) for name, each in found.items()}
    )


def user_node_page(found: UserNodes, offset: int, limit: int) -> UserNodePage:
    """Return at most ``limit`` users from ``offset`` on."""
    users, page = found.users, slice(offset, offset + limit)
    return UserNodePage(
        learnt=found.number, nodes=users.nodes, users=len(users.ids), ids=tuple(users.ids[page].tolist()),
        nodes_of=tuple(users.nodes_of[page].tolist()),
        by_user=None if found.share is None else ShareRangeReport.from_object(found.share),
    )  # fmt: skip


def affinity_metrics(report: AffinityReport | None) -> Iterator[Metric]:
    """Yield the metric families of the newest outlook."""
    found = {name: None if report is None else getattr(report, name) for name in SHARES}
    shares = {name: None if each is None else each.expected for name, each in found.items()}
    yield gauges(
        "flexd_affinity_bytes_ratio",
        "Bytes between nodes that homes and dealing by affinity would leave, over the chain's; NaN if unknown.",
        "dealing",
        shares,
    )
