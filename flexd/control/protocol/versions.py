"""Versions of the control protocol, and their negotiation. ``docs/upgrading.md`` states the policy."""

from __future__ import annotations

from dataclasses import dataclass

from flexd.core.errors import IncompatibleError

VERSION = 1
"""Raised when the schema of a message changes in any way; ``tests/control/protocol/wire`` has each version's schema."""
MIN_VERSION = max(1, VERSION - 1)
"""A peer of the previous version is served; a peer of the next one serves this version."""


@dataclass(frozen=True)
class Versions:
    """The protocol versions, lowest and highest inclusive, that one side offers in the handshake."""

    lowest: int = MIN_VERSION
    highest: int = VERSION

    def __str__(self) -> str:
        return f"version {self.highest}" if self.lowest == self.highest else f"versions {self.lowest} to {self.highest}"


OWN = Versions()


def negotiate(trainer: Versions, daemon: Versions) -> int:
    """Return the highest version that both sides speak; both sides compute the same.

    Raises:
        IncompatibleError: no common version. The text names both offers and the side to upgrade.
    """
    version = min(trainer.highest, daemon.highest)
    if version < max(trainer.lowest, daemon.lowest):
        older = "trainer" if trainer.highest < daemon.highest else "daemon"
        raise IncompatibleError(
            f"the trainer speaks {trainer} of the control protocol, the daemon {daemon}",
            remedy=f"upgrade the {older}: only adjacent versions work together (docs/upgrading.md)",
        )
    return version
