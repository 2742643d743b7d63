"""Versions and features of the control protocol, and their negotiation. ``docs/upgrading.md`` states the policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flexd.core.errors import IncompatibleError

VERSION = 1
"""Raised when the schema of a message changes in any way; ``tests/control/protocol/wire`` has each version's schema."""
MIN_VERSION = max(1, VERSION - 1)
"""A peer of the previous version is served; a peer of the next one serves this version."""
MOVED_ROWS = "moved_rows"
"""Ranks apply chunks that move rows to other nodes than their homes."""
FEATURES: frozenset[str] = frozenset({MOVED_ROWS})
"""Abilities of this version that a peer of the same version may lack."""
MAX_FEATURES = 32
"""Features of a peer beyond this number are dropped."""


@dataclass(frozen=True)
class Versions:
    """The protocol versions and features that one side offers in the handshake.

    Attributes:
        lowest, highest: versions that it speaks, both inclusive.
        features: names of its abilities; unknown ones are ignored.
    """

    lowest: int = MIN_VERSION
    highest: int = VERSION
    features: frozenset[str] = field(default=FEATURES)

    def __str__(self) -> str:
        return f"version {self.highest}" if self.lowest == self.highest else f"versions {self.lowest} to {self.highest}"


OWN = Versions()


@dataclass(frozen=True)
class Agreement:
    """The result of a negotiation.

    Attributes:
        version: the highest that both sides speak.
        features: those that both sides have.
    """

    version: int
    features: frozenset[str]


def bounded_features(names: Iterable[str]) -> frozenset[str]:
    """Return the first ``MAX_FEATURES`` names in alphabetical order."""
    return frozenset(sorted(names)[:MAX_FEATURES])


def negotiate(trainer: Versions, daemon: Versions) -> Agreement:
    """Return the highest version and the features that both sides have; both sides compute the same.

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
    return Agreement(version, bounded_features(trainer.features & daemon.features))
