"""Requests to the store of the default process group that end after a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

_STORE_SECONDS = 2.0
Store = torch._C._distributed_c10d.Store
Result = TypeVar("Result")


class BoundedStore:
    """One request at a time. The host of the store may be the rank that has died or stopped, and requests have no
    deadline of their own."""

    def __init__(self) -> None:
        self.live = dist.is_available() and dist.is_initialized()
        self._request: threading.Thread | None = None

    def request(self, request: Callable[[Store], Result]) -> Result | None:
        """Return the result of a request to the store; None if it fails, takes long, or there is no process group."""
        if not self.live or (self._request is not None and self._request.is_alive()):
            return None
        results: list[Result] = []

        def run() -> None:
            try:
                results.append(request(dist.distributed_c10d._get_default_store()))
            except Exception:  # the error of the collective itself is then all that is known
                results.clear()

        self._request = threading.Thread(target=run, name="flexd-store-request", daemon=True)
        self._request.start()
        self._request.join(_STORE_SECONDS)
        return results[0] if results else None
