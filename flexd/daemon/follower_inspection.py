"""The inspection API of a follower: its configuration. Everything else is at its leader."""

from __future__ import annotations

from flexd import __version__
from flexd.api.config import ConfigReport
from flexd.api.rank import RankPage
from flexd.api.table import HotRowPage, TableOrder, TablePage
from flexd.api.timeline import Timeline
from flexd.config.model import Config
from flexd.core.errors import ApiError


class FollowerInspection:
    """Returns the configuration and refuses everything else with the leader's address."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def config(self) -> ConfigReport:
        return ConfigReport(version=__version__, config=self._config.document())

    def tables(self, offset: int, limit: int, order: TableOrder) -> TablePage:
        raise self._refusal()

    def rows(self, table: str, offset: int, limit: int) -> HotRowPage:
        raise self._refusal()

    def ranks(self, offset: int, limit: int) -> RankPage:
        raise self._refusal()

    def timeline(self) -> Timeline:
        raise self._refusal()

    def _refusal(self) -> ApiError:
        return ApiError(
            "a follower knows its own partitions only",
            status=409,
            remedy=f"ask the leader ({self._config.scale_out.leader})",
        )
