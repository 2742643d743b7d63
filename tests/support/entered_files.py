"""Files of flexd in which a function was entered while a piece of work was done, in any thread."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tests.support.repository import ROOT

_PREFIX = f"{ROOT}/"
_SOURCES = f"{ROOT}/flexd/"


class EnteredFiles:
    """Record the files of functions that are called; made before the threads whose calls are to be seen.

    Bodies of modules and classes do not count, nor do what dataclasses generate and properties of values.

    Attributes:
        found: paths relative to the repository, in the order in which they were entered first.
    """

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._records = False
        threading.setprofile(self._profile)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the end of the block."""
        before = sys.getprofile()
        sys.setprofile(self._profile)
        self._records = True
        try:
            yield
        finally:
            self._records = False
            sys.setprofile(before)

    def close(self) -> None:
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._records and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(_SOURCES) and code.co_flags & 2:  # A function has fast locals.
                self.found.setdefault(code.co_filename.removeprefix(_PREFIX))
