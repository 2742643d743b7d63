"""Options and status of the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexd.config.links import ControlConfig
from flexd.control.daemon.coordinator_types import ControlOptions, ControlStatus
from flexd.control.daemon.message_receiver import REFUSED_KINDS


def test_default_options_equal_those_of_the_configuration() -> None:
    options, config = ControlOptions("job"), ControlConfig()
    for name in ("listen_host", "listen_port", "timeout_seconds"):
        assert getattr(options, name) == getattr(config, name), name
    assert config.secret_file is options.secret is None
    assert 0 < config.chunk_rows <= options.max_chunk_rows


def test_the_status_before_any_rank_registers(host: Callable[..., Any]) -> None:
    hosted = host()
    assert hosted.coordinator.live() is None
    status = hosted.coordinator.status()
    assert status.reason, "it waits for ranks"
    assert status == ControlStatus(
        epoch=0, epochs=0, generation=0, attempt="", ranks=0, ranks_ready=0, agreed_version=0, applied_version=0,
        paused=False, refused_messages=dict.fromkeys(REFUSED_KINDS, 0), refused_chunks=0, digest_mismatches=0,
        reason=status.reason,
    )  # fmt: skip
