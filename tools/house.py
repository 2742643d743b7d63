#!/usr/bin/env python3
"""Report the order of the source tree: its size, import cycles, docstring summaries and denied names.

"size" counts statements (nodes of the syntax tree), words, keys, metrics, commands, and the files of flexd that
``import flexd`` and one training step of a plain collection load.

Usage: tools/house.py [--root FOLDER] [--json]. Exit status 1 if there is an import cycle or a denied name.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

CODE, TEXT = ("flexd", "tests", "tools", "examples"), ("configs", "deploy", "docs", "helm", "examples")
TEXT_SUFFIXES = {".yaml", ".yml", ".json", ".tpl", ".md", ".txt", ".conf", ".toml", ".html"}
# Words of an identifier (`offsets_set_aside` has `set_aside`) in code, in strings that are one, and in configuration.
DENIED = {
    "in_charge", "news_teller", "epoch_keeper", "migration_about", "way_back", "abort_outlook", "late_rollbacks",
    "told_up", "told_down", "came_up", "came_down", "half_merged", "set_aside", "silent_after", "depositions",
    "takeovers", "stranger", "courier", "hurry", "daemon_figures", "tap_hash", "cell_tap", "ingest_threads",
    "lone_saves", "two_memories", "run_ahead", "hold_off", "home_rule", "home_rules", "distrust", "is_deaf", "acquit",
}  # fmt: skip
# The whole name of a module, class, function or attribute; a variable may have it.
DENIED_DEFINITIONS = {
    "asked", "Asked", "Ending", "parts", "Board", "Reception", "Attendance", "Chain", "Stretch", "Upcoming", "Ahead",
    "Left", "Found", "Pass", "Note", "Figures", "Measured", "land", "parted", "cut", "absorb", "adopt",
    "take", "consume",
}  # fmt: skip
DENIED_STRINGS = {"somebody"}
DENIED_PROSE = re.compile(r"run-ahead|two memories|[Hh]ome rules?|[Ww]hoever|\bis told\b|\blet go\b")
# What has a name or is a string; of the rest of a tree there are three times as many nodes.
NAMING = {
    ast.Name, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias, ast.arg, ast.keyword,
    ast.Constant, ast.ExceptHandler, ast.MatchAs, ast.MatchStar,
}  # fmt: skip
BAD_SUMMARY = re.compile(r"(What|How|Who|Whose|Whether)\b|[^.]*\?$")


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what ``ast.iter_child_nodes`` does, contexts of names aside, in a third of the time."""
    for name, value in node.__dict__.items():
        if type(value) is list:
            for each in value:
                if isinstance(each, ast.AST):
                    yield each
        elif name != "ctx" and isinstance(value, ast.AST):
            yield value


def walk(tree: ast.AST) -> list[ast.AST]:
    nodes = [tree]
    for node in nodes:
        nodes += children(node)
    return nodes


@cache
def has_denied_word(name: str) -> bool:
    words = "_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W", "_", name).lower() + "_"
    return any(f"_{denied}_" in words for denied in DENIED)


def denied_in_code(nodes: list[ast.AST], stem: str) -> Iterator[tuple[int, str]]:
    if stem in DENIED_DEFINITIONS or has_denied_word(stem):
        yield 1, stem
    for node in nodes:
        if type(node) not in NAMING:
            continue
        line = getattr(node, "lineno", 0)
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        defined = [getattr(node, "attr", "") if stored else getattr(node, "name", "")]
        if isinstance(node, ast.ClassDef):
            defined += [getattr(each.target, "id", "") for each in node.body if isinstance(each, ast.AnnAssign)]
        if not isinstance(node, ast.alias):
            yield from ((line, name) for name in defined if name in DENIED_DEFINITIONS)
        names = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "asname")]
        yield from ((line, name) for name in names if isinstance(name, str) and has_denied_word(name))
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text in DENIED_STRINGS or (re.fullmatch(r"[\w.]+", text) and has_denied_word(text)):
            yield line, repr(text)


def denied_in_text(root: Path) -> Iterator[str]:
    for path in sorted(path for folder in TEXT for path in (root / folder).rglob("*") if path.suffix in TEXT_SUFFIXES):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            prose = DENIED_PROSE.findall(line)
            for name in [*filter(has_denied_word, re.findall(r"[A-Za-z_]\w*", line)), *prose]:
                yield f"{path.relative_to(root)}:{number}: {name}"


def imports(tree: ast.Module, name: str, package: bool, modules: set[str]) -> set[str]:
    """Return the modules that ``name`` imports, inside functions too, but not for type checking only."""
    found: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: name.count(".") + 1 - node.level + package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}") in modules else base for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        else:
            pending += children(node)
    return (found & modules) - {name}


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return for each module, given by path, the others that it imports."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in trees}
    return {n: imports(trees[path], n, path.endswith("__init__.py"), set(names.values())) for path, n in names.items()}


def reachable(graph: dict[str, set[str]], starts: Iterable[str]) -> set[str]:
    reached: set[str] = set()
    pending = list(starts)
    while pending:
        if (node := pending.pop()) not in reached:
            reached.add(node)
            pending += graph[node]
    return reached


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules of which each reaches every other."""
    reached = {start: reachable(graph, graph[start]) for start in graph}
    return sorted(map(sorted, {frozenset(m for m in reached[n] if n in reached[m]) for n in graph if n in reached[n]}))


# Prints the number of commands, and of files of flexd that one training step loads: two processes.
COMMANDS = """
import typer.main
from flexd.cli.main import app
pending, leaves = [typer.main.get_command(app)], 0
while pending:
    inner = getattr(pending.pop(), "commands", None)
    leaves += inner is None
    pending += (inner or {}).values()
print(leaves)
"""
TRAINING = """
import sys, torch, flexd
torch.set_num_threads(1)
tables, rows = [flexd.EmbeddingTable("item", 10, 4)], flexd.Jagged(torch.arange(4), torch.tensor([4]))
collection = flexd.EmbeddingCollection(tables, optimizer=flexd.SGD(lr=0.1))
collection({"item": rows})["item"].values.sum().backward()
collection.optimizer.step()
print(len({m.__file__ for n, m in list(sys.modules.items()) if n.split(".")[0] == "flexd"}))
"""


class PrintedNumber:
    """The number that a script prints that imports flexd of this tree; it runs beside what is done here."""

    def __init__(self, root: Path, script: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def result(self) -> int | None:
        """Return None if the script fails."""
        printed, _ = self._process.communicate()
        return int(printed) if self._process.returncode == 0 else None


def size_of(root: Path, statements: dict[str, int], lines: dict[str, int]) -> dict[str, int]:
    """Return the figures of the files that are to stay small."""

    def statements_of(folder: str) -> int:
        return sum(count for path, count in statements.items() if path.startswith(folder))

    def words(paths: Iterable[Path]) -> int:
        return sum(len(path.read_text().split()) for path in paths if path.exists())

    def rows(page: str) -> int:
        path = root / "docs" / page
        return len(re.findall(r"^\| `", path.read_text(), re.MULTILINE)) if path.exists() else 0

    docs = [path for path in (root / "docs").rglob("*.md") if "decisions" not in path.relative_to(root).parts]
    return {
        "statements of flexd": statements_of("flexd/"),
        "files of flexd": sum(path.startswith("flexd/") for path in statements),
        "statements of tests": statements_of("tests/"),
        "statements of tests/support": statements_of("tests/support/"),
        "lines of tools": sum(count for path, count in lines.items() if path.startswith("tools/")),
        "words of docs and README": words([*docs, root / "README.md"]),
        "words of decisions": words((root / "docs" / "decisions").rglob("*.md")),
        "configuration keys": rows("configuration.md"),
        "metrics": rows("metrics.md"),
    }


def report(root: Path) -> dict[str, Any]:
    commands, loaded = PrintedNumber(root, COMMANDS), PrintedNumber(root, TRAINING)
    texts = {path: path.read_text() for folder in CODE for path in sorted((root / folder).rglob("*.py"))}
    trees = {str(path.relative_to(root)): ast.parse(text) for path, text in texts.items()}
    nodes = {path: walk(tree) for path, tree in trees.items()}
    lines = {str(path.relative_to(root)): len(text.splitlines()) for path, text in texts.items()}
    graph = import_graph({path: tree for path, tree in trees.items() if path.startswith("flexd/")})
    docs = [
        (f"{path}:{node.lineno}", node.value.value.strip().split("\n")[0])
        for path in trees for node in nodes[path]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]  # fmt: skip
    code = {
        f"{path}:{line}: {name}" for path in trees if path != "tools/house.py"
        for line, name in denied_in_code(nodes[path], Path(path).stem)
    }  # fmt: skip
    statements = {path: sum(isinstance(node, ast.stmt) for node in nodes[path]) for path in nodes}
    return {
        "size": {
            **size_of(root, statements, lines),
            "commands": commands.result(),
            "files of flexd that a training step loads": loaded.result(),
        },
        "cycles": cycles(graph),
        "summaries": [f"{where}: {summary}" for where, summary in docs if BAD_SUMMARY.match(summary)],
        "denied": sorted(code) + list(denied_in_text(root)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true")
    gc.disable()  # It would scan a growing forest of syntax trees again and again.
    house = report((options := parser.parse_args()).root.resolve())
    if options.json:
        print(json.dumps(house, indent=1))
    else:
        print(*(f"{'-' if n is None else n:>7}  {name}" for name, n in house["size"].items()), "", sep="\n")
        for title in ("cycles", "summaries", "denied"):
            print(f"\n{title}: {len(house[title])}", *house[title], sep="\n  ")
    return 1 if house["cycles"] or house["denied"] else 0


if __name__ == "__main__":
    sys.exit(main())
