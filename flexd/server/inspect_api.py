"""What the HTTP side needs to show tables, rows, ranks, traffic and configuration in detail."""

from __future__ import annotations

from typing import Protocol

from flexd.server.config_report import ConfigReport
from flexd.server.rank_report import RankPage
from flexd.server.table_report import HotRowPage, TableOrder, TablePage
from flexd.server.timeline_report import Timeline


class InspectApi(Protocol):
    """Reads only. Called from several HTTP threads at once.

    Raises (every method):
        ApiError: this daemon does not know it (a follower: 409).
    """

    def config(self) -> ConfigReport:
        """The effective configuration, secrets replaced."""
        ...

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        """At most ``limit`` tables from ``offset`` on."""
        ...

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        """At most ``limit`` hot rows of a table from ``offset`` on. Copies the table's counters.

        Raises:
            ApiError: no such table (404).
        """
        ...

    def ranks(self, offset: int, limit: int) -> RankPage:
        """At most ``limit`` ranks from ``offset`` on."""
        ...

    def timeline(self) -> Timeline:
        """Traffic and plans of the last half hour."""
        ...
