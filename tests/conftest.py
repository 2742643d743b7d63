"""What all tests share: their order, and a collector that does not look through thousands of modules all the time."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

LONG_FIRST = (
    "e2e/test_exactly_once.py", "embedding/test_run_ahead.py", "examples/test_examples.py", "embedding/test_exact.py",
    "stream/test_broker_probe.py", "server/test_status_page.py", "e2e/test_secrets_stay_secret.py",
    "control/test_protocol_model.py", "stream/test_kafka.py", "embedding/test_checkpoint.py",
    "control/test_inbox.py", "e2e/test_bad_input.py", "embedding/test_broken_ranks.py",
)  # fmt: skip
"""Files that take long, those that wait and those that compute by turns: left for the end, they would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    gone = [name for name in LONG_FIRST if not (folder / name).is_file()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: LONG_FIRST names no file: {', '.join(gone)}")
    place = {folder / name: at for at, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def keep_what_there_is() -> None:
    """A full collection costs what is tracked: modules, classes, collected tests. That took a quarter of the time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    keep_what_there_is()


@pytest.fixture(scope="module", autouse=True)
def _keep_imports_of_the_file():
    yield
    keep_what_there_is()
