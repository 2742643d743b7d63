"""The README's commands, as they stand there, in a clean checkout of what is committed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import newcomer
import pytest

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout with the packages of this interpreter."""
    if not newcomer.is_checkout():
        pytest.skip("the tests do not run in a git checkout")
    target = tmp_path_factory.mktemp("newcomer") / "flexd"
    newcomer.clean_checkout(newcomer.ROOT, target)
    newcomer.borrow_environment(target)
    return target


def test_from_a_clone_to_the_end_of_the_demo(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = newcomer.demo_command(checkout)
    short = {"DEMO": "--steps 60 --batch-size 8", "COLUMNS": "120"}
    went = newcomer.follow(command, checkout, seconds=280, environment=short)
    for strategy in ("row-wise, no dedup", "flexd before the first plan", "flexd after the last plan"):
        assert strategy in went.output
    assert "pip" not in went.output, "nothing was to be installed"
    with capsys.disabled():
        print(f"\n{command.split('#')[0].strip()} (60 steps): {went.seconds:.1f} s")


def test_from_torchrec_types_to_the_first_migration(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("torchrec") is None:
        pytest.skip("TorchRec is not here: make torchrec")
    commands = newcomer.first_migration_commands(checkout)
    went = newcomer.follow(commands, checkout, marker="COMMITTED", seconds=280)
    shown = went.output
    assert re.search(r"^ +ranks +2 = 2 nodes x 1", shown, re.MULTILINE), "flexd status"
    assert re.search(r"^ +rows +HOME [\d,]+, NODE [1-9]", shown, re.MULTILINE), "flexd status"
    assert re.search(r"^20\S+ \S+ +\S+ +\S+ +COMMITTED +[1-9]", shown, re.MULTILINE), "flexd migrations list"
    assert not re.search(r"Traceback|FAILED|ABORTED", shown), shown[-3000:]
    with capsys.disabled():
        print(f"\nto the first migration: {went.seconds:.1f} s")
