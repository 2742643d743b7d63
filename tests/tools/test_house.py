"""``tools/house.py`` finds each fault in a small tree, and none in this one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import house
import pytest

from tests.support.repository import ROOT

TREE = {
    "flexd/__init__.py": "",
    "flexd/first.py": "from flexd import second\n",
    "flexd/second.py": "from flexd.room.third import f\n",
    "flexd/room/__init__.py": "",
    "flexd/room/third.py": "import json\n\ndef f():\n    from .. import first\n",
    "flexd/fourth.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import flexd.fifth\n",
    "flexd/fifth.py": "import flexd.fourth\n" + "x = 1\n" * 60,
    "flexd/sixth.py": "x = 1\n" * 60,
    "tests/test_sixth.py": '"""Plain."""\n\ndef f():\n    """How it is done."""\n\ndef g():\n    """Is it?"""\n',
    "tools/names.py": (
        "class Asked:\n    cut: int\n\nclass RightAsk:\n    pass\n\n"
        "def offsets_set_aside(courier_count, cut):\n    take = cut\n"
        "    return 'way_back', 'the way_back of a row', take.hurry\n"
    ),
    "docs/metrics.md": "| `flexd_up` |\n",
    "docs/decisions/one.md": "two words",
    "configs/a.yaml": "rate: 1\nstream:\n  silent_after_seconds: 2  # stranger\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("tree")
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def found(tree: Path) -> dict[str, Any]:
    return house.report(tree)


def test_each_fault_and_size_is_found(found: dict[str, Any]) -> None:
    assert found["cycles"] == [["flexd.first", "flexd.room.third", "flexd.second"]]
    assert found["summaries"] == ["tests/test_sixth.py:4: How it is done.", "tests/test_sixth.py:7: Is it?"]
    assert [line.removeprefix("tools/names.py:") for line in found["denied"]] == [
        "1: Asked", "1: cut", "7: courier_count", "7: offsets_set_aside", "9: 'way_back'", "9: hurry",
        "configs/a.yaml:3: silent_after_seconds", "configs/a.yaml:3: stranger",
    ]  # fmt: skip
    size = found["size"]
    assert (size["files of flexd"], size["statements of flexd"], size["lines of tools"]) == (8, 129, 9)
    assert (size["words of docs and README"], size["words of decisions"], size["metrics"]) == (3, 2, 1)


def test_the_command_fails_while_there_is_a_cycle(tree: Path, found: dict[str, Any]) -> None:
    command = [sys.executable, house.__file__, "--json", "--root", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout) == found


def test_this_repository_has_no_import_cycle_no_question_as_summary_and_no_denied_name() -> None:
    found = house.report(ROOT)
    assert (found["cycles"], found["summaries"], found["denied"]) == ([], [], [])
    assert None not in found["size"].values()
