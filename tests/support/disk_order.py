"""Record the order in which writes reach the disk: a file must not get its name before its content is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def watch_disk(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records later operations: ``sync NAME``, ``name NAME`` (a file renamed or linked to it)."""
    operations: list[str] = []
    sync, link, rename, replace = os.fsync, os.link, os.rename, os.replace

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        operations.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def naming(call: Any) -> Any:
        def named(source: Any, target: Any, **options: Any) -> None:
            call(source, target, **options)
            operations.append(f"name {Path(target).name}")

        return named

    patch.setattr(os, "fsync", fsync)
    for name, call in (("link", link), ("rename", rename), ("replace", replace)):
        patch.setattr(os, name, naming(call))
    return operations
