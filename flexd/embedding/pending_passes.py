"""Forward passes whose gradients are not pushed yet: those of which none can come any more, those that had none, and
the agreement before they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from flexd.core.errors import EmbeddingError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding.exchange.hop import Agreement, CallSignature

if TYPE_CHECKING:
    from flexd.embedding.engine import RowEngine

logger = logging.getLogger(__name__)

MAX_PENDING_PASSES = 64


def make_room(engine: RowEngine) -> None:
    """Collective. Forget passes that no backward pass can follow where too many wait for a push.

    Raises:
        EmbeddingError: still too many wait.
        TopologyError: the world has grown.
    """
    engine.groups.world.check_world_unchanged()
    if len(engine.passes) < MAX_PENDING_PASSES:
        return
    engine.settle()
    forget_lost(engine)
    if len(engine.passes) >= MAX_PENDING_PASSES:
        raise EmbeddingError(
            f"{MAX_PENDING_PASSES} forward passes without a step",
            remedy="call optimizer.step() after backward(), or evaluate under torch.no_grad()",
        )


def forget_lost(engine: RowEngine) -> None:
    """Collective with passes. Forget those that no backward pass can follow on any rank: their steps were skipped, or
    they were not for training."""
    if not engine.passes:
        return
    with engine.calling(), engine.router.traffic.uncounted():
        lost = torch.tensor([one.is_lost for one in engine.passes], device=engine.stores[0].rows.device)
        everywhere = engine.groups.world.all_gather(lost.long()).view(-1, len(engine.passes)).amin(0).tolist()
    engine.passes[:] = [one for one, is_lost in zip(engine.passes, everywhere, strict=True) if not is_lost]


def warn_of_idle(engine: RowEngine, *, warns: bool) -> bool:
    """Note passes of a step whose rows move although no gradient has come, and warn of them; return whether there are
    any."""
    idle = sum(
        one.grads is None and not one.recomputes and any(rows.rows for rows in one.pushed.stations[0])
        for one in engine.passes
    )
    if not idle:
        return False
    text = f"{idle} of {len(engine.passes)} look-ups of a step had no backward pass; their rows move all the same"
    USAGE_WARNINGS.note(UsageWarningKind.NO_BACKWARD, text)
    if warns:
        logger.warning(
            "rank %d: %s, by momentum or weight decay; look up what is not trained under torch.no_grad()",
            engine.groups.rank, text,
        )  # fmt: skip
    return True


def agree_on_sending(engine: RowEngine, call: int) -> None:
    """Collective on gloo, which ends a process that receives more than it waits for: before gradients are sent, meet
    the other ranks by the first messages of a look-up. On an accelerator it would be one more wait of the host, and
    does nothing: ranks in different calls are named there by the next wait.

    Args:
        call: ``STEPS``, ``CLIPS`` or ``SETTLES``.

    Raises:
        EmbeddingError: on every rank, if ranks make different calls.
    """
    if not engine.groups.on_host or engine.stores[0].world_size == 1:
        return
    mine = CallSignature.of(engine.groups.rank, steps=engine.steps, passes=call)
    with engine.router.traffic.uncounted():
        version, digest = engine.inbox.agreed_version, engine.settings_digest
        agreement = Agreement(version, 0, mine, mine, (digest,) * 2)
        # Look-ups of unbounded ids begin with a message to all ranks; one of no ids tells all that there is to tell.
        met = None if engine.ids is None else engine.ids.meet(agreement, engine.groups.world)
        if met is None or met.diverged:
            met = engine.router.meet(agreement)
        met.check_calls(engine.keyspace.tables)
