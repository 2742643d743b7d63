"""Lists of tables as CSV (the columns of TorchRec's published sharding example) or JSON."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexd.core.errors import ConfigError

SEQUENCE = "sequence"
"""The CSV's output of un-pooled tables."""
DEFAULT_BATCH = 2560
"""Samples of a rank where a line of the CSV gives none."""
MAX_FILE_BYTES = 64 * 2**20
_COLUMNS = ("fqn", "hash_size", "emb_dim", "sum_pooling_factor", "sum_num_poolings", "output", "batch")


@dataclass(frozen=True)
class ListedTable:
    """One line of a table list.

    Attributes:
        lookups: of one sample.
        bags: sum-pooled bags of one sample (features); 0: un-pooled.
        batch: samples of a rank in one step.
        sharding: as TorchRec chose: RW, TW, CW, TWRW or DP; empty if the list has no plan.
        ranks: of the shards, in their order; empty if unknown.
        module: path of the collection in the model.
        dtype: of the rows; None: not stated.
    """

    name: str
    rows: int
    dim: int
    lookups: float
    bags: float
    batch: int
    sharding: str = ""
    ranks: tuple[int, ...] = ()
    module: str = ""
    dtype: str | None = None


def read_tables(path: Path) -> list[ListedTable]:
    """Read a list of tables. A line of a CSV without a batch gets ``DEFAULT_BATCH``, a name that comes again a number.

    Raises:
        ConfigError: the file cannot be read, or a line is not valid; names the file and the line.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes", remedy="give a list of tables")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", remedy="give a CSV or JSON list of tables") from error
    tables = _of_json(path, text) if path.suffix == ".json" else _of_csv(path, text)
    if not tables:
        raise ConfigError(f"{path}: no tables", remedy="give at least one")
    return tables


def _of_csv(path: Path, text: str) -> list[ListedTable]:
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{path}: no column {', '.join(missing)}", remedy=f"give the columns {', '.join(_COLUMNS)}, or a .json list"
        )
    tables: list[ListedTable] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(reader, start=2):
        seen[line["fqn"]] += 1
        again = seen[line["fqn"]]
        batch = (line["batch"] or "").split("*")[0]
        try:
            tables.append(
                _checked(
                    ListedTable(
                        name=line["fqn"] + (f"#{again}" if again > 1 else ""),
                        rows=int(float(line["hash_size"])),
                        dim=int(float(line["emb_dim"])),
                        lookups=float(line["sum_pooling_factor"]),
                        bags=0.0 if line["output"] == SEQUENCE else max(float(line["sum_num_poolings"]), 1.0),
                        batch=int(batch) if batch.isdigit() else DEFAULT_BATCH,
                        sharding=line.get("sharding") or "",
                        ranks=_ranks(line.get("ranks") or ""),
                        module=line["fqn"].rpartition(".")[0],
                    )
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}, line {number}: {error}", remedy="correct the line") from error
    return tables


def _of_json(path: Path, text: str) -> list[ListedTable]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}", remedy="give a JSON list of tables") from error
    entries = document.get("tables") if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: no list of tables", remedy='give [{"name": ..., "rows": ..., "dim": ...}, ...]')
    tables = []
    for number, entry in enumerate(entries):
        try:
            tables.append(_checked(_of_entry(entry)))
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}, table {number}: {what}", remedy="give name, rows and dim at least") from error
    names = Counter((table.module, table.name) for table in tables)
    twice = sorted(f"{module}.{name}".lstrip(".") for (module, name), count in names.items() if count > 1)
    if twice:
        raise ConfigError(f"{path}: tables listed twice: {', '.join(twice)}", remedy="name each table once")
    return tables


def _of_entry(entry: Mapping[str, Any]) -> ListedTable:
    known = {"name", "rows", "dim", "lookups", "bags", "batch", "sharding", "ranks", "module", "dtype"}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}")
    bags = float(entry.get("bags", 1.0))
    ranks = tuple(int(rank) for rank in entry.get("ranks", ()))
    return ListedTable(
        str(entry["name"]), int(entry["rows"]), int(entry["dim"]), float(entry.get("lookups", max(bags, 1.0))), bags,
        int(entry.get("batch", DEFAULT_BATCH)), str(entry.get("sharding", "")), ranks,
        str(entry.get("module", "")), entry.get("dtype"),
    )  # fmt: skip


def _ranks(text: str) -> tuple[int, ...]:
    """Read "0-95" or "3,7" or "3"."""
    ranks: list[int] = []
    for piece in text.replace(";", ",").split(","):
        first, dash, last = piece.strip().partition("-")
        if first:
            ranks.extend(range(int(first), int(last) + 1) if dash else [int(first)])
    return tuple(ranks)


def _checked(table: ListedTable) -> ListedTable:
    for name, value, least in (
        ("rows", table.rows, 1), ("dim", table.dim, 1), ("lookups", table.lookups, 0), ("bags", table.bags, 0),
        ("batch", table.batch, 1),
    ):  # fmt: skip
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"table {table.name!r}: {name} is {value}, not a number from {least} on")
    return table


def unique_names(tables: Sequence[ListedTable]) -> list[str]:
    """Return one name for each table: its own, with the module's path before it where several have it."""
    names = Counter(table.name for table in tables)
    return [table.name if names[table.name] == 1 else f"{table.module}.{table.name}" for table in tables]
