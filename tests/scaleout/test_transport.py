"""A leader that cannot be reached."""

from __future__ import annotations

import pytest

from flexd.core.errors import ScaleOutError
from flexd.scaleout.transport import HttpLink

SECRET = b"correct horse battery staple"


def test_an_unreachable_leader_is_an_error() -> None:
    with pytest.raises(ScaleOutError) as caught:
        HttpLink("127.0.0.1", 1, SECRET, attempt_seconds=2.0).offer(b"x")
    assert caught.value.reason == "unreachable"
