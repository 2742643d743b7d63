"""The documents are true: their Python runs, their links lead somewhere, their commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from flexd.cli.main import app
from tests.support import forked
from tests.support.forked import Forked
from tests.support.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run_python(page: Path, directory: Path) -> None:
    script = directory / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = Forked(forked.script, str(script), directory=directory).wait()
    assert done.returncode == 0, done.stderr


OWN_TESTS = {ROOT / "README.md", ROOT / "docs" / "tutorial.md"}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and p not in OWN_TESTS], ids=page_name)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run_python(page, tmp_path)


def test_python_of_the_readme_runs_and_publishes_what_the_stream_reads(tmp_path: Path) -> None:
    run_python(ROOT / "README.md", tmp_path)
    from flexd.stream.codec import decode
    from flexd.stream.file_log.log import FileLogSource

    source = FileLogSource(tmp_path / "flexd-data" / "accesses")
    messages = source.poll(5.0)
    batches = [batch for message in messages for batch in decode(message.payload, 2**20)]
    source.close()
    assert [batch.rows.tolist() for batch in batches] == [[7, 7, 123, 9]]


def anchors_of(page: Path) -> set[str]:
    """Anchors of the page's headings, as mkdocs names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [
        re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.+)", text, re.MULTILINE)
    ]
    return {re.sub(r"[-\s]+", "-", heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", prose):
        linked = page.parent / target if target else page
        if not target.startswith("http"):
            assert linked.exists(), f"{page_name(page)} links to {target}"
            if anchor and linked.suffix == ".md":
                assert anchor in anchors_of(linked), f"{page_name(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_paths_in_backticks_exist(page: Path) -> None:
    for path in re.findall(r"`((?:flexd|tests|tools|configs|deploy|helm|docs)/[A-Za-z0-9_./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page_name(page)} names {path}"


DECISIONS = ROOT / "docs" / "decisions"
RECORDS = {page.name: page.read_text() for page in PAGES if page.parent == DECISIONS and page.name != "README.md"}


@pytest.mark.parametrize("name", RECORDS)
def test_decision_records_have_date_status_and_text(name: str) -> None:
    for record in RECORDS[name].split("\n## ")[1:]:
        title, _, text = record.partition("\n")
        found = re.match(r"\n(\d{4}-\d{2}-\d{2}) · (\S.*)\n", text)
        assert found, title
        if superseded := re.search(r'superseded .*by "(.+)"', found[2]):
            assert any(f"\n## {superseded[1]}" in records for records in RECORDS.values()), title
        else:
            assert "\n**What.** " in text, title
            assert "\n**Why.** " in text, title


def test_the_overview_counts_the_decision_records() -> None:
    overview = (DECISIONS / "README.md").read_text()
    counted = {name: int(number) for name, number in re.findall(r"\]\((\S+\.md)\) \| (\d+) \|", overview)}
    assert counted == {name: len(re.findall(r"^## ", text, re.MULTILINE)) for name, text in RECORDS.items()}


def command_words(command: Any) -> set[str]:
    """First words of every command that is not hidden, with the second of those that are groups."""
    words: set[str] = set()
    for name, below in command.commands.items():
        if not below.hidden:
            words |= {f"{name} {inner}" for inner in below.commands} if hasattr(below, "commands") else {name}
    return words


def test_the_command_line_page_lists_what_there_is() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    cells = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    listed = {
        " ".join(re.sub(r" [A-Z]+$", "", name).split()) for cell in cells for name in re.findall(r"`(.+?)`", cell)
    }
    assert listed == command_words(typer.main.get_command(app))
