"""``flexd affinity learn``: the node of each user from a trace, for loaders and producers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

affinity = typer.Typer(help="Which node trains whose samples.", no_args_is_help=True)


@affinity.command("learn")
def learn(
    trace: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="Events with users (docs/demo.md).", metavar="FILE.npz"),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Node map to write.", metavar="FILE.npz")],
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the job.")],
    local_ranks: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = 8,
    batch: Annotated[int, typer.Option(min=2, help="Samples of a global batch.")] = 1024,
    history: Annotated[int, typer.Option(min=1, help="Events of a user that make a sample.")] = 32,
) -> None:
    """Learn the node of each user from a trace, and say what that saves.

    A user's events are cut into samples that do not overlap. Three quarters of the global batches are learnt from, the
    rest judges: printed are the rows between nodes with each user's samples in her node, over those with users in
    random nodes. The file is for flexd.affinity.NodeMap and is written from the whole trace.

    Example: flexd affinity learn --trace purchases.npz --nodes 2 -o nodes.npz
    """
    from flexd.core.layout import RankLayout
    from flexd.planner.affinity.user_nodes import learn_user_nodes
    from flexd.stream.trace import load_trace

    learnt = learn_user_nodes(load_trace(trace), RankLayout(nodes, local_ranks), batch, history)
    learnt.users.save(out)
    typer.echo(f"{len(learnt.users.ids):,} users of {learnt.samples:,} samples in {nodes} nodes: {out}")
    if learnt.rows_ratio is None:
        typer.echo("too few global batches to judge it: give a longer trace or a smaller --batch")
    else:
        typer.echo(f"rows between nodes: {learnt.rows_ratio:.3f} of those with users in random nodes")
