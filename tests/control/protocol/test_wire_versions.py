"""Each version's schema is recorded, neighbouring ones work together, and every incompatible change is found."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexd.control.protocol.handshake import VERSION
from tests.support.repository import ROOT, child_environment
from tests.support.second_tree import ADDED, write_second_tree
from tests.support.wire_schema import FOLDER, OPTIONAL, Schema, differences, schema

_HOW = (
    "what travels differs from the schema of version {0}. If version {0} is not released yet, run this test with "
    "RECORD_GOLDEN=1. Otherwise raise VERSION in flexd/control/protocol/handshake.py, do so, and add the version and "
    "its changes to docs/upgrading.md"
)


def recorded(version: int) -> Schema:
    found: Schema = json.loads((FOLDER / f"version-{version}.json").read_text())
    return found


def test_the_schema_of_this_version_is_recorded() -> None:
    if os.environ.get("RECORD_GOLDEN"):
        text = json.dumps(schema(), indent=1, sort_keys=True)
        (FOLDER / f"version-{VERSION}.json").write_text(f"{text}\n")
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
    code = "import json; from tests.support.wire_schema import schema; print(json.dumps(schema()))"
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
    "change",
    [
        lambda s: s["messages"]["hello"].update(more=f"int{OPTIONAL}"),
        lambda s: s["messages"]["hello"].pop("tables"),
        lambda s: s["messages"].update(greeting={"rank": "int"}),
        lambda s: s["messages"]["hello"].update(rank=f"int{OPTIONAL}"),
        lambda s: s["formats"].update({"tap counts": {"writes": 1, "reads": [1, 2]}}),
        lambda s: s["api"]["responses"]["Status"].update(more=f"int{OPTIONAL}"),
        lambda s: s["api"]["commands"].update(MoreRequest={"reason": "str"}),
        lambda s: s["api"]["commands"]["AbortRequest"].update(more=f"int{OPTIONAL}"),
    ],
    ids=["added", "optional removed", "kind", "made optional", "reads newer", "response", "command", "command field"],
)
def test_what_the_policy_permits_passes(change: Callable[[Any], Any]) -> None:
    newer = copy.deepcopy(SMALL)
    change(newer)
    assert differences(SMALL, newer) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
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
    newer = copy.deepcopy(SMALL)
    change(newer)
    assert any(words in line for line in differences(SMALL, newer)), differences(SMALL, newer)
