"""Skip tests that need an emulated cluster where this machine cannot emulate one."""

import pytest


@pytest.fixture(scope="session")
def can_emulate() -> None:
    from tools.bench.cluster import why_not

    if (reason := why_not()) is not None:
        pytest.skip(f"an emulated cluster {reason}")
