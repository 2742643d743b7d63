"""Files of flexd in which a function is entered while a piece of work is done, in any thread."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from tests.support.repository import ROOT

_PREFIX = f"{ROOT}/"
_SOURCES = f"{ROOT}/flexd/"


class EnteredFiles:
    """Record the files of functions that are called, directly or not, by the functions in which a way begins.

    Bodies of modules and classes do not count, nor does what dataclasses generate. Make it before the threads whose
    calls are to be seen, and close it in the thread that made it.

    Args:
        starts: by way, the functions that it begins in, one for each thread that takes part.
        others: functions that belong to no way: what they call is left out.

    Attributes:
        found: by way, paths relative to the repository in the order in which they were entered first.
        recorded: ways that are recorded now.
    """

    def __init__(
        self, starts: Mapping[str, Sequence[Callable[..., Any]]], others: Sequence[Callable[..., Any]] = ()
    ) -> None:
        self.found: dict[str, dict[str, None]] = {way: {} for way in starts}
        self.recorded: set[str] = set()
        self._starts = {_code_of(function): way for way, functions in starts.items() for function in functions}
        self._starts |= {_code_of(function): "" for function in others}
        self._inside = threading.local()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def close(self) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        ways = self._inside.__dict__.setdefault("ways", [])
        way = self._starts.get(code)
        if way is not None and event == "call":
            ways.append(way)
        is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_filename.startswith(_SOURCES)
        if event == "call" and is_function and ways and ways[-1]:
            for each in self.recorded.intersection(ways):
                self.found[each].setdefault(code.co_filename.removeprefix(_PREFIX))
        if way is not None and event == "return" and ways and ways[-1] == way:
            ways.pop()


def _code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__  # type: ignore[attr-defined]
    return code
