"""The node of each user: written by ``flexd affinity``, read by producers and loaders."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexd.core.arrays import Int64Array, matches, read_arrays
from flexd.core.errors import ConfigError

_FORMAT = "flexd node map 1"


@dataclass(frozen=True)
class NodeMap:
    """Users and the nodes in which their samples are best trained.

    Attributes:
        ids: int64 [users], ascending.
        nodes_of: int64 [users].
        nodes: number of nodes.

    Raises:
        ConfigError: the arrays do not fit one another, or name a node that there is not.
    """

    ids: Int64Array
    nodes_of: Int64Array
    nodes: int

    def __post_init__(self) -> None:
        fits = self.ids.ndim == 1 and self.ids.shape == self.nodes_of.shape and self.nodes >= 1
        if not fits or (np.diff(self.ids) <= 0).any():
            raise ConfigError(
                f"a node map of ids {self.ids.shape} and nodes {self.nodes_of.shape}, or ids that do not ascend",
                remedy="write it with flexd affinity users",
            )
        if len(self.nodes_of) and not 0 <= self.nodes_of.min() <= self.nodes_of.max() < self.nodes:
            raise ConfigError(
                f"a node map of {self.nodes} nodes names nodes {self.nodes_of.min()} to {self.nodes_of.max()}",
                remedy="write it with flexd affinity users",
            )

    def node_of(self, ids: npt.ArrayLike) -> Int64Array:
        """Return int64 [n]: the node of each user of any integers [n]; of an unknown one ``id % nodes``."""
        wanted = np.asarray(ids).astype(np.int64)
        nodes = wanted % self.nodes
        found, at = matches(self.ids, wanted)
        nodes[found] = self.nodes_of[at]
        return nodes

    def save(self, path: str | Path) -> None:
        """Write an npz file. A file of that name is replaced at once: a reader has the old one or the new one.

        Raises:
            ConfigError: it cannot be written; the file of that name is unchanged.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                np.savez_compressed(
                    file, format=np.array(_FORMAT), ids=self.ids, nodes_of=self.nodes_of.astype(np.uint16),
                    nodes=np.array(self.nodes),
                )  # fmt: skip
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"{path} cannot be written: {error.strerror or error}",
                remedy="give a file in a directory you may write",
            ) from error

    @staticmethod
    def load(path: str | Path) -> NodeMap:
        """Read a file of ``save``.

        Raises:
            ConfigError: it cannot be read, or is another kind of file.
        """
        try:
            file = read_arrays(path)
            if str(file["format"]) != _FORMAT:
                raise KeyError(str(file["format"]))
            return NodeMap(file["ids"], file["nodes_of"].astype(np.int64), int(file["nodes"]))
        except (OSError, KeyError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"{path} is no node map: {error}", remedy="write one with flexd affinity users"
            ) from error
