"""Each version's schema is recorded, neighbouring ones work together, and every incompatible change is found."""

import ast
import copy
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import flexd.api
from flexd.api.base import CommandRequest
from flexd.control.protocol import handshake, messages, wire
from flexd.control.protocol import report as parts
from flexd.control.protocol.handshake import VERSION
from flexd.control.protocol.wire import wire_fields
from flexd.core import tap_counts
from flexd.core.model import Model, build_models
from tests.support.repository import ROOT, child_environment
from tests.support.second_tree import ADDED, write_second_tree

FOLDER = Path(__file__).parent / "wire"
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
    hints, known = typing.get_type_hints(cls), sorted(wire_fields(cls).items())
    return {name: _text(hints[name]) + OPTIONAL * type_.optional for name, type_ in known}


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
    written = next(
        ast.unparse(item.annotation)
        for base in cls.__mro__
        for item in ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
        if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == field
    )
    return re.sub(r"^Annotated\[(.*), (?:DETAIL|HIDDEN|ALWAYS|Show\(.*\))\]$", r"\1", written)


def _subclasses(base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        if cls.__module__.startswith(("flexd.api.", "flexd.control.daemon.migration")):
            yield cls
            yield from _subclasses(cls)


def _text(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return name.replace("typing.", "").replace("NoneType", "None")


_HOW = (
    "what travels differs from the schema of version {0}. If version {0} is not released yet, run this test with "
    "RECORD_GOLDEN=1. Otherwise raise VERSION in flexd/control/protocol/handshake.py, do so, and add the version and "
    "its changes to docs/upgrading.md"
)


def recorded(version: int) -> Schema:
    return json.loads((FOLDER / f"version-{version}.json").read_text())  # type: ignore[no-any-return]


def test_the_schema_of_this_version_is_recorded() -> None:
    if os.environ.get("RECORD_GOLDEN"):
        (FOLDER / f"version-{VERSION}.json").write_text(f"{json.dumps(schema(), indent=1, sort_keys=True)}\n")
    assert json.loads(json.dumps(schema())) == recorded(VERSION), _HOW.format(VERSION)


def test_neighbouring_versions_work_together() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == [f"version-{at}.json" for at in range(1, VERSION + 1)]
    for version in range(2, VERSION + 1):
        assert differences(recorded(version - 1), recorded(version)) == []
        assert recorded(version) != recorded(version - 1)


def test_every_version_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "upgrading.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(version) for version in range(1, VERSION + 1)]


def test_the_second_version_of_the_upgrade_tests_follows_the_policy(tmp_path: Path) -> None:
    tree = write_second_tree(tmp_path)
    code = "import json; from tests.control.protocol.test_wire_versions import schema; print(json.dumps(schema()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, cwd=tree, env=child_environment(tree=tree), check=True,
    )  # fmt: skip
    following = json.loads(done.stdout)
    assert following["version"] == VERSION + 1
    assert ADDED in following["messages"]["hello"]
    assert differences(json.loads(json.dumps(schema())), following) == []


SMALL: Schema = {
    "version": 1, "fixed": {"frame": [">I"]}, "formats": {"tap counts": {"writes": 1, "reads": [1, 1]}},
    "messages": {"hello": {"rank": "int", "tables": f"tuple[str, ...]{OPTIONAL}"}, "go": {}},
    "api": {
        "responses": {"Status": {"job": "str", "ready": f"bool{OPTIONAL}"}},
        "commands": {"AbortRequest": {"reason": f"str{OPTIONAL}"}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["messages"]["hello"].update(more=f"int{OPTIONAL}"), ""),
        (lambda s: s["messages"]["hello"].pop("tables"), ""),
        (lambda s: s["messages"].update(greeting={"rank": "int"}), ""),
        (lambda s: s["messages"]["hello"].update(rank=f"int{OPTIONAL}"), ""),
        (lambda s: s["formats"].update({"tap counts": {"writes": 1, "reads": [1, 2]}}), ""),
        (lambda s: s["api"]["responses"]["Status"].update(more=f"int{OPTIONAL}"), ""),
        (lambda s: s["api"]["commands"].update(MoreRequest={"reason": "str"}), ""),
        (lambda s: s["api"]["commands"]["AbortRequest"].update(more=f"int{OPTIONAL}"), ""),
        (lambda s: s["messages"]["hello"].update(more="int"), "hello.more is added without a default"),
        (lambda s: s["messages"]["hello"].pop("rank"), "hello.rank is removed"),
        (lambda s: s["messages"]["hello"].update(rank="str"), "hello.rank was int, is str"),
        (lambda s: s["messages"]["hello"].update(tables="tuple[str, ...]"), "hello.tables has no default any more"),
        (lambda s: s["messages"].pop("go"), "go is removed"),
        (lambda s: s["fixed"].update(frame=[">Q"]), "the handshake or the frames differ"),
        (lambda s: s["formats"].update({"tap counts": {"writes": 2, "reads": [1, 2]}}), "format 2 is written, the old"),
        (lambda s: s["formats"].update({"tap counts": {"writes": 1, "reads": [2, 2]}}), "format 1 is written, the new"),
        (lambda s: s["api"]["responses"]["Status"].pop("ready"), "Status.ready is removed from the API"),
        (lambda s: s["api"]["responses"]["Status"].update(more="int"), "Status.more is added without a default"),
        (lambda s: s["api"]["commands"]["AbortRequest"].pop("reason"), "AbortRequest.reason is removed"),
    ],
)  # fmt: skip
def test_what_the_policy_does_not_permit_is_found(change: Callable[[Any], Any], words: str) -> None:
    """Changes that the policy permits give no line."""
    newer = copy.deepcopy(SMALL)
    change(newer)
    found = differences(SMALL, newer)
    assert any(words in line for line in found) if words else not found, found
