"""What all tests share: a collector that does not look through thousands of modules and tests again and again."""

from __future__ import annotations

import gc

import pytest


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
