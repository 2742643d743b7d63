"""``flexd affinity``: the node of each user, from the daemon or from a trace, for loaders and producers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexd.api import routes
from flexd.cli.exit_codes import DaemonRefusedError
from flexd.cli.options import SocketOption, UrlOption, connect
from flexd.core import units

if TYPE_CHECKING:
    from flexd.cli.client import DaemonClient
    from flexd.core.node_map import NodeMap

_ATTEMPTS = 5

affinity = typer.Typer(help="Which node trains whose samples.", no_args_is_help=True)


@affinity.command("users")
def users(
    out: Annotated[Path, typer.Option("--out", "-o", help="Node map to write.", metavar="FILE.npz")],
    url: UrlOption = None,
    socket: SocketOption = None,
) -> None:
    """Write the node of each user that the daemon has seen, by where rows live.

    The stream must carry user_ids, and a plan must have been made since. The file is for flexd.affinity.NodeMap
    and is replaced at once: a reader has the old one or the new one. Printed is the share of the bytes between nodes
    that is left with each user's samples in her node.

    Example: flexd affinity users -o nodes.npz
    """
    node_map, share = _user_nodes(connect(url, socket))
    node_map.save(out)
    typer.echo(f"{len(node_map.ids):,} users in {node_map.nodes} nodes: {out}")
    if share is None:
        typer.echo("too few global batches are sampled to judge it")
    else:
        typer.echo(f"bytes between nodes: {units.share(share)} of those without affinity would be left")


def _user_nodes(client: DaemonClient) -> tuple[NodeMap, float | None]:
    """Return all pages of one learning, and the share of the bytes that is left with them."""
    import numpy as np

    from flexd.core.node_map import NodeMap

    for _ in range(_ATTEMPTS):
        page = first = client.send(routes.USERS)
        pages = [first]
        read = len(first.ids)
        while page.learnt == first.learnt and page.ids and read < first.users:
            page = client.send(routes.USERS, offset=read)
            pages.append(page)
            read += len(page.ids)
        if page.learnt == first.learnt:
            ids, nodes_of = (
                np.concatenate([np.array(getattr(each, name), dtype=np.int64) for each in pages])
                for name in ("ids", "nodes_of")
            )
            share = None if first.by_user is None else first.by_user.expected
            return NodeMap(ids, nodes_of, first.nodes), share
    raise DaemonRefusedError(f"the users were learnt anew {_ATTEMPTS} times while they were read")
