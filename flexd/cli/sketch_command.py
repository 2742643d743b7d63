"""``sketch export``: what the newest snapshot holds of a table, for tools that read Apache DataSketches."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flexd.core.errors import SnapshotError

app = typer.Typer(
    help="The sketches of the newest snapshot.\n\n"
    "Example: flexd sketch export items lengths.kll --kind lengths -c configs/laptop.yaml",
    no_args_is_help=True,
)


class Kind(StrEnum):
    COUNT_MIN = "count-min"
    DISTINCT = "distinct"
    LENGTHS = "lengths"


@app.command("export")
def export(
    table: Annotated[str, typer.Argument(metavar="TABLE")],
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="Written; replaced if it is there.")],
    config: Annotated[Path, typer.Option("-c", "--config", metavar="CONFIG", help="The daemon's YAML.")],
    kind: Annotated[Kind, typer.Option("--kind", help="Which sketch of the table.")] = Kind.COUNT_MIN,
) -> None:
    """Writes one sketch in the form of Apache DataSketches. Needs no running daemon, and does not disturb one.

    Example: flexd sketch export items lengths.kll --kind lengths -c configs/laptop.yaml
    """
    from flexd.config.load import load_config
    from flexd.daemon.factory import sketch_settings
    from flexd.ingest.counters import restored_set
    from flexd.sketch import interop, snapshot

    checked = load_config(config)
    directory = Path(checked.state.dir) / "snapshots"
    # A store of its own would sweep the daemon's unfinished files away.
    problems = []
    for path in sorted(directory.glob("snapshot-*.flexd"), reverse=True):
        try:
            meta, arrays = snapshot.read(path)
        except SnapshotError as error:
            problems.append(error.message)
            continue
        sketches = restored_set(checked.keyspace().tables, sketch_settings(checked), meta["sketches"], arrays)
        image = interop.export_table(sketches, table, kind.value)
        try:
            file.write_bytes(image)
        except OSError as error:
            raise SnapshotError(f"{file}: {error.strerror}", remedy="give a file that can be written") from error
        print(f"{file}: {kind} of {table}, {len(image)} bytes, from {path.name}")
        return
    raise SnapshotError(
        "; ".join(problems) or f"no snapshot in {directory}", remedy="run the daemon until it has written one"
    )
