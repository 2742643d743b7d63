"""Routes of migrations: their history, and abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Path, Query, Response

from flexd.api.abort import AbortPreview, AbortPreviewRequest, AbortRequest, AbortResult, abort_status
from flexd.api.interface import MigrationsApi
from flexd.api.migration import MAX_LISTED, MigrationDetail, MigrationList, MigrationStateName
from flexd.server.access import requester
from flexd.server.routing import VERB_ERRORS, SlowCalls, json_response, refusal


def add_migrations(app: FastAPI, migrations: Callable[[], MigrationsApi], slow: SlowCalls) -> None:
    """Add the routes. ``migrations`` is called at every request, because a daemon with other tables may replace it."""

    @app.get("/v1/migrations", response_model=MigrationList, responses=VERB_ERRORS)
    def history(
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100, state: MigrationStateName | None = None
    ) -> Response:
        """The migrations of this daemon and of those before it, the newest first."""
        return json_response(migrations().migrations(limit, state))

    @app.get(
        "/v1/migrations/{migration_id}",
        response_model=MigrationDetail,
        responses={**VERB_ERRORS, 404: refusal("No such migration is kept.")},
    )
    def migration(migration_id: Annotated[str, Path(max_length=200)]) -> Response:
        """One migration with every change of its state; ``latest`` is the newest."""
        return json_response(migrations().migration(migration_id))

    @app.post("/v1/abort/preview", response_model=AbortPreview, responses=VERB_ERRORS)
    def preview_abort(request: AbortPreviewRequest) -> Response:
        """Dry run: the migration that would stop, its position, and the rows that a rollback would move."""
        with slow.one():
            return json_response(migrations().preview_abort(rollback=request.rollback))

    @app.post(
        "/v1/abort",
        response_model=AbortResult,
        responses={**VERB_ERRORS, 202: {"model": AbortResult, "description": "It is still stopping or rolling back."}},
    )
    def abort(request: AbortRequest) -> Response:
        """Stops the running migration at its next chunk; with ``rollback`` restores the placement it started from."""
        with slow.one():
            result = migrations().abort(
                rollback=request.rollback, reason=request.reason, wait_seconds=request.wait_seconds,
                who=requester(request.who),
            )  # fmt: skip
        return json_response(result, abort_status(result))
