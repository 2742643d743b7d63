"""The outbox of counted accesses."""

from __future__ import annotations

import pytest

from flexd.control.agent.tap_outbox import TapOutbox


def test_an_outbox_holds_one_payload_until_that_is_acknowledged():
    outbox = TapOutbox()
    assert outbox.put(b"a") == 0
    with pytest.raises(ValueError, match="holds"):
        outbox.put(b"b")
    outbox.acknowledge(1)
    assert not outbox.free
    outbox.acknowledge(0)
    assert outbox.free
    assert outbox.put(b"b") == 1
    outbox.acknowledge(0)
    assert not outbox.free
    assert not outbox.wait_until_free(0.01)
