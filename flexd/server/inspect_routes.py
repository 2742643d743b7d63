"""Routes of tables, rows, ranks, traffic and configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Query, Response

from flexd.api.config import ConfigReport
from flexd.api.interface import InspectApi
from flexd.api.rank import RankPage
from flexd.api.table import MAX_PAGE_ENTRIES, HotRowPage, RowsRequest, TableOrder, TablePage
from flexd.api.timeline import Timeline
from flexd.server.routing import VERB_ERRORS, SlowCalls, json_response, refusal

Offset = Annotated[int, Query(ge=0, le=2**40)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_ENTRIES)]


def add_inspection(app: FastAPI, inspect: Callable[[], InspectApi], slow: SlowCalls) -> None:
    """Add the routes.

    Args:
        inspect: called at every request, because a daemon with other tables may replace it.
        slow: bounds the calls that copy counters.
    """

    @app.get("/v1/config", response_model=ConfigReport, responses=VERB_ERRORS)
    def config() -> Response:
        """The effective configuration, defaults included, secrets replaced."""
        return json_response(inspect().config())

    @app.get("/v1/tables", response_model=TablePage, responses=VERB_ERRORS)
    def tables(offset: Offset = 0, limit: Limit = 100, order: TableOrder = "accesses") -> Response:
        """The tables: counters, accesses, and rows by tier."""
        return json_response(inspect().tables(offset, limit, order))

    @app.post(
        "/v1/rows",
        response_model=HotRowPage,
        responses={**VERB_ERRORS, 404: refusal("No such table.")},
    )
    def rows(request: RowsRequest) -> Response:
        """The hot rows of one table with their tiers, the most accessed first."""
        with slow.one():
            return json_response(inspect().rows(request.table, request.offset, request.limit))

    @app.get("/v1/topology", response_model=RankPage, responses=VERB_ERRORS)
    def topology(offset: Offset = 0, limit: Limit = 100) -> Response:
        """The ranks one by one: placement version, step, traffic and balance."""
        return json_response(inspect().ranks(offset, limit))

    @app.get("/v1/timeline", response_model=Timeline, responses=VERB_ERRORS)
    def timeline() -> Response:
        """Traffic of the last half hour against row-wise sharding, and the plans that moved rows."""
        return json_response(inspect().timeline())
