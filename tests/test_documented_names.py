"""Every command line, make target, metric, setting and variable that docs and deployment files name exists."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import gen_metrics_docs
import pytest
import typer
import yaml

from flexd.cli.main import app
from flexd.config.model import Config
from tests.support.deployed import known_metrics
from tests.support.repository import ROOT
from tools.bench.harness import parser_of

SUFFIXES = {".md", ".yaml", ".yml", ".json", ".tpl", ".txt", ".toml"}
FOLDERS = ("docs", "configs", "deploy", "helm", "examples")
# Decision records may name what was removed, but no command of a bench that does not run.
FOUND = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
FILES = [ROOT / "README.md", *(path for path in FOUND if "decisions" not in path.parts)]
COMMANDED = [*FILES, *(path for path in FOUND if "decisions" in path.parts)]
CHART_README = ROOT / "helm" / "flexd" / "README.md"
"""Generated from the chart's values, whose paths it names."""
NO_METRICS = {"flexd_torchrec"}
PLACEHOLDER = re.compile(r"[A-Z_.…\[\]<>|]+|\.\.\.")
SCHEMA = Config.model_json_schema()


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(path: Path) -> Iterator[str]:
    """The inline code and the lines of code blocks."""
    text = path.read_text(errors="replace")
    yield from re.findall(r"`([^`\n]+)`", text)
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines())
    if path.suffix != ".md":
        # Commands in comments stand after two spaces or more, those of a container after two dashes.
        yield from re.findall(r"(?:^ *#  +|-- )((?:[A-Z_]+=\S+ )*(?:flexd|make|python) [^\"\n]+)", text, re.MULTILINE)


def command_lines(path: Path) -> Iterator[list[str]]:
    """The words after ``flexd`` of every command line, without what follows a pipe or a comment."""
    for code in code_of(path):
        found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*bin/|python -m )?flexd (?=[a-z-])([^|;&>#`]*)", code)
        if found:
            yield [word.strip("[](),.") for word in found[1].split()]


@functools.cache
def the_command() -> Any:
    return typer.main.get_command(app)


@functools.cache
def variables_of_the_source() -> frozenset[str]:
    return frozenset(
        name for file in (ROOT / "flexd").rglob("*.py") for name in re.findall(r"\bFLEXD_[A-Z_]+\b", file.read_text())
    )


@functools.cache
def documented_metrics() -> frozenset[str]:
    return frozenset(known_metrics() | set(re.findall(r"`(flexd_\w+)", gen_metrics_docs.render())))


def problem_of(words: list[str], path: Path) -> str:
    command = the_command()
    known = set(command.get_help_option_names(click.Context(command)))
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if hasattr(command, "commands") and not word.startswith("-"):
            if PLACEHOLDER.fullmatch(word) or "|" in word:
                return ""
            if word not in command.commands:
                return f"no command {word!r}"
            command = command.commands[word]
            options |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        elif re.match(r"--?[a-zA-Z]", word) and word.split("=")[0] not in options | known:
            return f"no option {word}"
    return ""


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_command_lines_exist(path: Path) -> None:
    wrong = {" ".join(words): problem_of(words, path) for words in command_lines(path)}
    assert {line: problem for line, problem in wrong.items() if problem} == {}


def test_commands_in_alert_texts_exist() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "flexd.rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    for alert in alerts:
        text = " ".join(alert["annotations"].values())
        for words in re.findall(r"\bflexd ([a-z-]+(?: --[a-z-]+)*)", text):
            assert words.split()[0] == "on" or problem_of(words.split(), ROOT) == "", f"{alert['alert']}: flexd {words}"


@pytest.mark.parametrize("path", COMMANDED, ids=ids)
def test_commands_of_benches_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``make bench CASE=cluster BENCH="--quick"`` and ``python -m tools.bench cluster --quick``."""
    for code in code_of(path):
        if found := re.match(r"(?:\$ )?make bench CASE=(\w+)(?: BENCH=\"(.*)\")?", code):
            words = (found[2] or "").split()
        elif found := re.match(r"(?:\$ )?python -m tools\.bench (\w+)([^#]*)", code):
            words = found[2].split()
        else:
            continue
        _, parser = parser_of(found[1])
        try:
            # A placeholder in capitals stands for a number or a path.
            parser.parse_args(["1" if re.fullmatch("[A-Z]", word) else word for word in words])
        except SystemExit:
            pytest.fail(f"{code}: {capsys.readouterr().err}")


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_make_targets_and_options_of_tools_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for code in code_of(path):
        if found := re.match(r"(?:\$ )?make ([a-z][a-z-]*)(.*)", code):
            assert re.search(rf"^{found[1]}:", makefile, re.MULTILINE), code
            for name in re.findall(r"\b([A-Z]+)=", found[2].split("#")[0]):
                assert re.search(rf"\$\({name}\)|ifdef {name}\b", makefile), code
        if found := re.match(r"(?:\$ )?(?:python3? )?(tools/\w+\.py)(.*)", code):
            tool = (ROOT / found[1]).read_text()
            for option in re.findall(r"(?<=\s)(--[a-z][a-z-]+)", found[2].split("#")[0]):
                assert option in tool or found[1] == "tools/demo_kafka.py", code


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_metrics_exist(path: Path) -> None:
    known = documented_metrics()
    for name in set(
        re.findall(r"(?<![\w./-])flexd_[a-z_]+(?![\w/]*\.(?:py|md|yaml))", path.read_text(errors="replace"))
    ):
        if name.endswith("_"):
            assert any(each.startswith(name) for each in known), name
        else:
            assert name in known | NO_METRICS, name


def below(schema: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The schemas that a key of ``schema`` may have; the schema itself where keys are free."""
    found: list[dict[str, Any]] = []
    for each in alternatives(schema):
        if key in each.get("properties", {}):
            found.append(each["properties"][key])
        elif isinstance(each.get("additionalProperties"), dict):
            found.append(each["additionalProperties"])
        elif each.get("additionalProperties") is True or not {"properties", "type"} & set(each):
            found.append({})
    return found


def alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        yield from alternatives(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    elif inner := [*schema.get("anyOf", []), *schema.get("oneOf", []), *schema.get("allOf", [])]:
        for each in inner:
            yield from alternatives(each)
    elif schema.get("type") == "array":
        yield from alternatives(schema.get("items", {}))
    else:
        yield schema


def is_setting(keys: list[str]) -> bool:
    found = [SCHEMA]
    for key in keys:
        found = [inner for each in found for inner in below(each, key)]
    return bool(found)


def settings_of(path: Path) -> Iterator[str]:
    """Inline code that is a path into the configuration: its first key is a section."""
    for code in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", path.read_text(errors="replace")):
        if code.split(".")[0] in SCHEMA["properties"] and not code.startswith("state.sqlite"):  # a file
            yield code


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".md" and path != CHART_README], ids=ids)
def test_settings_exist(path: Path) -> None:
    assert [name for name in settings_of(path) if not is_setting(name.split("."))] == []


def key_paths(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from key_paths(inner, (*above, str(key)))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for each in value:
            yield from key_paths(each, above)
    else:
        yield above


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".md"], ids=ids)
def test_keys_of_configurations_exist(path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        document = yaml.safe_load(block)
        if isinstance(document, dict) and set(document) & set(SCHEMA["properties"]):
            assert [".".join(keys) for keys in key_paths(document) if not is_setting(list(keys))] == []


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_variables_exist(path: Path) -> None:
    for name in set(re.findall(r"\bFLEXD_[A-Z_]+", path.read_text(errors="replace"))) - {"FLEXD__SECTION__KEY"}:
        if name.startswith("FLEXD__"):
            assert is_setting(name.lower().split("__")[1:]), name
        else:
            assert name in variables_of_the_source(), name


def test_the_checks_find_what_does_not_exist() -> None:
    assert problem_of(["status", "--url", "x"], ROOT) == ""
    assert problem_of(["stats"], ROOT) == "no command 'stats'"
    assert problem_of(["state", "lst"], ROOT) == "no command 'lst'"
    assert problem_of(["status", "--uri=x"], ROOT) == "no option --uri=x"
    assert is_setting(["planner", "min_coverage"])
    assert is_setting(["stream", "source", "kind"])
    assert not is_setting(["planner", "min_coverages"])
    assert not is_setting(["stream", "source", "kinds"])
