"""One API in front of daemons that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from flexd.api.interface import DaemonApi


class _Verb:
    """A path of attributes that is followed at the moment of the call, on whoever is in charge then."""

    def __init__(self, who: Callable[[], object], path: tuple[str, ...]) -> None:
        self._who = who
        self._path = path

    def __getattr__(self, name: str) -> _Verb:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Verb(self._who, (*self._path, name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        target: Any = self._who()
        for name in self._path:
            target = getattr(target, name)
        return target(*arguments, **options)


class _Refusing:
    """Every verb raises what ``error`` makes."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> _Refusing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self._error()


def whoever_is_in_charge(who: Callable[[], DaemonApi]) -> DaemonApi:
    """The API of ``who()``, asked anew for every call."""
    return cast(DaemonApi, _Verb(who, ()))


def refusing(error: Callable[[], Exception]) -> Any:
    """An object of which every method, and every method of every attribute, raises ``error()``."""
    return _Refusing(error)
