"""Negotiation of the protocol version between a trainer and a daemon."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexd.control.protocol.versions import Versions, negotiate
from flexd.core.errors import IncompatibleError

RANGES = st.tuples(st.integers(1, 20), st.integers(0, 3)).map(lambda pair: Versions(pair[0], sum(pair)))


def release(version: int) -> Versions:
    """Return what the release with this protocol version offers."""
    return Versions(max(1, version - 1), version)


@given(RANGES, RANGES)
def test_the_highest_common_version_is_chosen(trainer: Versions, daemon: Versions) -> None:
    common = set(range(trainer.lowest, trainer.highest + 1)) & set(range(daemon.lowest, daemon.highest + 1))
    if common:
        assert negotiate(trainer, daemon) == max(common)
    else:
        with pytest.raises(IncompatibleError):
            negotiate(trainer, daemon)


def test_the_refusal_names_both_offers_and_the_side_to_upgrade() -> None:
    with pytest.raises(IncompatibleError) as refused:
        negotiate(release(5), release(2))
    assert "trainer speaks versions 4 to 5" in refused.value.message
    assert "daemon versions 1 to 2" in refused.value.message
    assert "upgrade the daemon" in refused.value.remedy
    with pytest.raises(IncompatibleError, match="upgrade the trainer"):
        negotiate(release(1), release(7))
