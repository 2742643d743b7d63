"""The answer of ``advise --tables``: a job that is known by its list of tables, or by its TorchRec plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexd.cli.advise_ranges import hours, in_range
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.core import units

if TYPE_CHECKING:
    from flexd.simulate.table_advice import TablesAdvice
    from flexd.topology.cluster import Cluster


def answer_on_tables(
    source: str, batch: int, ranks: tuple[int, int], cluster: Cluster, memory_bytes: float, zipf: float,
    profile: Path | None, row_format: tuple[str, str], **measured: Any,
) -> tuple[dict[str, Any], list[Block]]:  # fmt: skip
    """Read the tables and return the answer: (JSON-able, blocks).

    Args:
        source: as of ``tables_of_source``.
        ranks: nodes, and ranks in each.
        row_format: dtype of tables that name none, and optimizer.
        measured: keyword arguments of ``advise_on_tables``.
    """
    from flexd.cli.model_tables import tables_of_source
    from flexd.core.layout import RankLayout
    from flexd.planner.tables.sharding import TableStatistics
    from flexd.simulate.table_advice import advise_on_tables
    from flexd.sketch.profile_file import read_profile

    statistics = TableStatistics(zipf, None if profile is None else read_profile(profile), *row_format)
    listed = tables_of_source(source, batch)
    advice = advise_on_tables(listed, RankLayout(*ranks), cluster, memory_bytes, statistics, **measured)
    return document(advice, cluster.name), blocks(advice, cluster.name)


def document(advice: TablesAdvice, cluster: str) -> dict[str, Any]:
    """Return the answer, JSON-able, with units in the names."""
    return {
        "tables": len(advice.tables),
        "nodes": advice.layout.nodes,
        "local_ranks": advice.layout.local_ranks,
        "cluster": cluster,
        "now": advice.now,
        "step_seconds": advice.step_seconds,
        "embedding_seconds": advice.embedding_seconds,
        "price_correction": advice.price_correction,
        "price_error": advice.price_error,
        "worth": advice.worth,
        "options": {name: asdict(found) | {"pays": found.pays} for name, found in advice.predictions.items()},
        "best": advice.best,
        "words": words(advice),
    }


def words(advice: TablesAdvice) -> list[str]:
    """Return the answer in sentences, the verdict first."""
    share = advice.embedding_seconds / advice.step_seconds
    if not advice.prices_fit:
        said = [
            f"The prices do not fit: they give today's embeddings {units.seconds(advice.embedding_seconds)}, more than "
            f"the whole step of {units.seconds(advice.step_seconds)}. Measure them with flexd probe, give "
            "--computing-ms, check the list's batch and look-ups; until then nothing is advised."
        ]
    elif advice.best is None:
        said = [
            f"Not here: nothing saves {units.share(advice.worth)} of a step for certain. Exchange, look-up and update "
            f"of embeddings are {units.seconds(advice.embedding_seconds)} ({units.share(share)}) of a step of "
            f"{units.seconds(advice.step_seconds)}."
        ]
    else:
        best = advice.predictions[advice.best]
        said = [
            f"Worth it: {best.title} takes {units.seconds(best.step_seconds.expected)} a step instead of "
            f"{units.seconds(advice.step_seconds)}, {in_range(best.saved_share, units.share)} less, which is "
            f"{in_range(best.gpu_hours_per_day, hours)} GPU-hours a day for the job."
        ]
    if advice.price_correction != 1.0:
        said.append(
            f"The prices were multiplied by {advice.price_correction:.2g}, so that today's embeddings take what "
            "computing leaves of the step. Far from 1 they do not describe this job: check the list and the topology."
        )
    said.append(
        "Expectations from the list alone: rows are drawn independently, latencies and run-ahead are left out. Ranges: "
        f"popularity that is more and less skewed, and prices wrong by {units.share(advice.price_error)}."
    )
    return said


def blocks(advice: TablesAdvice, cluster: str) -> list[Block]:
    """Return the verdict, the facts and the options."""
    today = advice.predictions[advice.now]
    facts = Facts(
        "",
        (
            ("tables", f"{len(advice.tables)}, {units.count(sum(table.rows for table in advice.tables))} rows"),
            ("cluster", f"{advice.layout.nodes} nodes x {advice.layout.local_ranks} ranks, priced as {cluster}"),
            (
                "today",
                f"{today.title}: {units.seconds(advice.step_seconds)} a step, of it embeddings "
                f"{units.seconds(advice.embedding_seconds)} by the prices",
            ),
        ),
    )
    columns = ("option", "step", "saved a step", "of a step", "GPU-hours a day", "memory a rank", "inter-node bytes")
    rows = tuple(
        (
            found.title,
            units.seconds(found.step_seconds.expected),
            in_range(found.saved_seconds, units.seconds),
            units.share(found.saved_share.expected),
            hours(found.gpu_hours_per_day.expected),
            units.size(found.memory_bytes),
            units.size(found.inter_node_bytes),
        )
        for name, found in advice.predictions.items()
        if name != advice.now
    )
    spare = ("inter-node bytes", "memory a rank")
    return [
        Sentences("", tuple(words(advice))), facts, Table("predicted", columns, rows, frozenset(columns[1:]), spare)
    ]  # fmt: skip
