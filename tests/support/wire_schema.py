"""The schema of what travels between the parts of flexd: every field of every message, with its type, and what is
optional.

A version's schema is written once, when the version is released, and never changed afterwards; its tests fail when the
source tree differs from it. ``differences`` states what may change from one version to the next (docs/upgrading.md).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flexd.api
from flexd.api.base import CommandRequest
from flexd.control.protocol import handshake, messages, wire
from flexd.control.protocol import report as parts
from flexd.control.protocol.wire import wire_fields
from flexd.core import tap_counts
from flexd.core.model import Model, build_models

FOLDER = Path(__file__).parents[1] / "control" / "protocol" / "wire"
OPTIONAL = " (optional)"
_PARTS = (
    messages.Fence, messages.RankIdentity, parts.TrainerSettings, parts.PlacementState, parts.StepReport,
    parts.SentBytes, parts.BatchReport, parts.UsedExchange, parts.ArmReport, parts.PhasesReport, parts.PhaseReport,
)  # fmt: skip

Fields = dict[str, str]
"""Type by name; optional fields end with ``OPTIONAL``."""
Schema = dict[str, Any]


def schema() -> Schema:
    """Return the schema of this source tree."""
    found = {kind: _message_fields(cls) for kind, cls in messages._KINDS.items()}
    of_parts = {part.__name__: _message_fields(part) for part in _PARTS}
    return {
        "version": handshake.VERSION,
        "fixed": {
            "handshake": [handshake.MAGIC.decode("latin-1"), handshake._HEAD.format, handshake._FIELDS.format],
            "frame": [wire.HEAD.format, wire.TAG_BYTES, {kind.name: kind.value for kind in wire.FrameKind}],
        },
        "formats": {
            "tap counts": {"writes": tap_counts.FORMAT, "reads": [tap_counts.OLDEST_FORMAT, tap_counts.NEWEST_FORMAT]}
        },
        "messages": dict(sorted({**found, **of_parts}.items())),
        "api": {"responses": _models(Model), "commands": _models(CommandRequest)},
    }


def differences(older: Mapping[str, Any], newer: Mapping[str, Any]) -> list[str]:
    """Return what keeps two adjacent versions from working together; empty if they do."""
    found: list[str] = []
    if older["fixed"] != newer["fixed"]:
        found.append("the handshake or the frames differ")
    for name in newer["formats"]:
        for writer, reader in ((older, newer), (newer, older)):
            written, (lowest, highest) = writer["formats"][name]["writes"], reader["formats"][name]["reads"]
            if not lowest <= written <= highest:
                side = "older" if reader is older else "newer"
                found.append(f"{name}: format {written} is written, the {side} version does not read it")
    found += _of_types(older["messages"], newer["messages"])
    for models, removed in (
        ("responses", "is removed from the API"),
        ("commands", "is removed: a command with it is refused"),
    ):
        before, after = older["api"][models], newer["api"][models]
        changes = _of_types(before, after)
        for name in before.keys() & after.keys():
            changes += [f"{name}.{field} {removed}" for field in before[name].keys() - after[name].keys()]
        found += sorted(set(changes))
    return found


def _of_types(older: Mapping[str, Fields], newer: Mapping[str, Fields]) -> list[str]:
    found = [f"{name} is removed" for name in sorted(older.keys() - newer.keys())]
    for name in sorted(older.keys() & newer.keys()):
        before, after = older[name], newer[name]
        for field in sorted(before.keys() | after.keys()):
            was, becomes = before.get(field), after.get(field)
            if becomes is None and was is not None and not was.endswith(OPTIONAL):
                found.append(f"{name}.{field} is removed, the older version needs it")
            elif was is None and becomes is not None and not becomes.endswith(OPTIONAL):
                found.append(f"{name}.{field} is added without a default")
            elif was is not None and becomes is not None:
                if was.removesuffix(OPTIONAL) != becomes.removesuffix(OPTIONAL):
                    found.append(f"{name}.{field} was {was}, is {becomes}")
                elif was.endswith(OPTIONAL) and not becomes.endswith(OPTIONAL):
                    found.append(f"{name}.{field} has no default any more, the older version may leave it out")
    return found


def _message_fields(cls: Any) -> Fields:
    return {name: _text(field.hint) + OPTIONAL * field.optional for name, field in sorted(wire_fields(cls).items())}


def _models(base: Any) -> dict[str, Fields]:
    for module in pkgutil.iter_modules(flexd.api.__path__, "flexd.api."):
        importlib.import_module(module.name)
    build_models()
    return {
        cls.__name__: {
            name: _written(cls, name) + OPTIONAL * (not field.is_required())
            for name, field in sorted(cls.model_fields.items())
        }
        for cls in sorted(_subclasses(base), key=lambda cls: cls.__name__)
    }


def _written(cls: Any, field: str) -> str:
    """Return the annotation of a field as it is written, which names its limits; how it is shown does not travel."""
    written = str(next(found[field] for found in map(inspect.get_annotations, cls.__mro__) if field in found))
    return re.sub(r"^Annotated\[(.*), (?:DETAIL|HIDDEN|ALWAYS|Show\(.*\))\]$", r"\1", written)


def _subclasses(base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        if cls.__module__.startswith(("flexd.api.", "flexd.control.daemon.migration")):
            yield cls
            yield from _subclasses(cls)


def _text(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return name.replace("typing.", "").replace("NoneType", "None")
