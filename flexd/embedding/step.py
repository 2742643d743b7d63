"""A training step: its forward passes, and the moments at which what a job has switched on joins it."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flexd.core.errors import EmbeddingError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind
from flexd.embedding import devices
from flexd.embedding.exchange.collectives import Peers
from flexd.embedding.exchange.process_groups import ChainGroups
from flexd.embedding.exchange.route import Route
from flexd.embedding.exchange.router import Router
from flexd.embedding.features import Jagged
from flexd.embedding.replicas.replica_sync import RowGradients
from flexd.embedding.replicas.touched_rows import TouchedRows
from flexd.embedding.row_optimizers import RowUpdate
from flexd.embedding.store.store import GroupStore

if TYPE_CHECKING:
    from flexd.embedding.ids.unbounded_ids import Resolution
    from flexd.embedding.prefetch.pipeline_job import DeferredGradients
    from flexd.embedding.rank_rows import RankRows


class GraphMark:
    """Lives as long as the graph of a forward pass."""


def in_backward_pass() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class ForwardPass:
    """One look-up. If it is for training it waits in ``RowEngine.passes`` until its gradients are pushed.

    Attributes:
        touched: the trained ones of replicated rows that it reads, filled in while it is found and fetched; None if
            there are none.
        grads: per dim-group [rows of the route's first station, dim]; None before its backward pass.
        bag_grads: per dim-group [bags, dim] of the bags that are pooled at the owner; None before its backward pass.
        recomputes: whether a backward pass looks the rows up once more, for activation checkpointing.
        resolution: of its unbounded ids; None: there are none.
        sources: by dim-group int64 [rows], for each row of the route's first station the row whose value it has, as
            ``Resolution.sources``.
        added: shared rows of unbounded ids by dim-group that are looked up behind those of the batch.
        begun: rows of all dim-groups that begin; at least as many as have the value of another one.
        looked_up: for a tap, until the rows are fetched.
    """

    def __init__(
        self,
        route: Route,
        touched: TouchedRows | None,
        trained: Sequence[bool],
        resolution: Resolution | None = None,
    ) -> None:
        self.resolution = resolution
        agreed = not route.agreement.fault and not route.agreement.diverged
        self.begun = 0 if resolution is None else len(resolution.fresh)
        self.added = {} if resolution is None else resolution.added
        self.sources = resolution.sources(route) if resolution is not None and agreed else {}
        self.recomputes = in_backward_pass()
        self.route, self.looked_up = replace(route, looked_up=None), route.looked_up
        self._trained = trained
        self.touched = touched
        self.grads: list[torch.Tensor] | None = None
        self.bag_grads: list[torch.Tensor] | None = None
        self.graph: weakref.ref[GraphMark] | None = None

    @cached_property
    def pushed(self) -> Route:
        """The route of the rows that are trained."""
        return self.route.only(self._trained)

    def with_sources(self, rows: Sequence[torch.Tensor], *, expand: bool) -> list[torch.Tensor]:
        """Return per dim-group [requests, dim], or without ``expand`` [rows of the first station, dim], of such rows
        as they are stored."""
        found = []
        for group, (part, first) in enumerate(zip(rows, self.route.stations[0], strict=True)):
            places, sources = first.expand if expand else None, self.sources.get(group)
            if sources is not None:
                places = sources if places is None else sources.index_select(0, places)
                # The batch did not ask for the shared rows behind its own.
                places = places[: len(places) - self.added.get(group, 0)] if expand else places
            found.append(part if places is None else part.index_select(0, places))
        return found

    def grads_of_sources(self) -> list[torch.Tensor]:
        """Return ``grads``, those of rows that have the value of another one also as that one's."""
        grads = list(self.grads or ())
        for group, sources in self.sources.items():
            if self._trained[group]:
                other = sources != torch.arange(len(sources), device=sources.device)
                if devices.in_host_memory(other):
                    rows = other.nonzero().view(-1)
                    moved = grads[group].index_select(0, rows)
                else:  # the host does not wait to know how many they are
                    most = min(len(sources), self.begun)
                    rows = torch.nonzero_static(other, size=most, fill_value=0).view(-1)
                    known = torch.arange(most, device=rows.device) < other.sum()
                    moved = grads[group].index_select(0, rows).masked_fill_(~known.unsqueeze(1), 0)
                grads[group] = grads[group].index_add(0, sources.index_select(0, rows), moved)
        return grads

    @property
    def is_lost(self) -> bool:
        """True if it has no gradients, and none can come."""
        return self.grads is None and self.bag_grads is None and self.graph is not None and self.graph() is None

    def add(self, grads: list[torch.Tensor], wide: Sequence[torch.dtype]) -> None:
        """Add the gradients of a backward pass, in dtype ``wide`` of each dim-group if there are some already."""
        self.grads = _added(self.grads, grads, wide)

    def add_of_bags(self, grads: list[torch.Tensor], wide: Sequence[torch.dtype]) -> None:
        """Add gradients of bags of a backward pass, as ``add``; an empty list if none are pooled at the owner."""
        if grads:
            self.bag_grads = _added(self.bag_grads, grads, wide)


def _added(
    before: list[torch.Tensor] | None, grads: list[torch.Tensor], wide: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    if before is None:
        return grads
    return [old.to(dtype) + new.to(dtype) for old, new, dtype in zip(before, grads, wide, strict=True)]


@dataclass
class RoutedInput:
    """Checked input of a forward pass whose rows are located on all ranks.

    Attributes:
        order: names of the features, dim-group by dim-group.
        given: the input of the forward pass if its rows were located before it.
        changed: of such an input, to be called once its rows are fetched. None: every rank's input is the one that was
            located. Else all ranks look their inputs up again, and everything here is replaced; the function raises an
            error if this rank's is lost. Local.
    """

    features: Mapping[str, Jagged]
    order: list[str]
    forward_pass: ForwardPass
    given: Any = None
    changed: Callable[[], Callable[[], None] | None] | None = None

    def replace_by(self, other: RoutedInput) -> None:
        """Replace what was located before the forward pass."""
        self.features, self.order, self.forward_pass = other.features, other.order, other.forward_pass
        self.given = self.changed = None

    @property
    def places(self) -> list[torch.Tensor]:
        """int64 [ids] for each dim-group: the place in its distinct rows of each id of ``order``.

        Ids of bags that are added up here, for any rank, may follow.
        """
        return [of_group.row_of_request for of_group in self.forward_pass.route.stations[0]]


class LookupFunction(torch.autograd.Function):
    """Fetches the rows and sums of a forward pass; their gradients wait in the engine for ``optimizer.step``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, engine: Any, forward_pass: ForwardPass, expand: bool
    ) -> tuple[torch.Tensor, ...]:
        del anchor
        ctx.engine, ctx.forward_pass, ctx.expand = engine, forward_pass, expand
        ctx.mark = GraphMark()
        forward_pass.graph = weakref.ref(ctx.mark)
        rows = tuple(engine.fetch(forward_pass, expand=expand))
        if not all(engine.trained):
            # Else autograd would make zeros for rows that are only read.
            ctx.set_materialize_grads(False)
            trained = [*engine.trained] * (len(rows) // len(engine.trained))
            ctx.mark_non_differentiable(*(part for part, trains in zip(rows, trained, strict=True) if not trains))
            likes = [part.new_empty(0) for part in rows]
            shapes = [part.shape if trains else (0, part.shape[1]) for part, trains in zip(rows, trained, strict=True)]
            ctx.missing = lambda number: likes[number].new_zeros(shapes[number])
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        given = [ctx.missing(number) if grad is None else grad for number, grad in enumerate(grads)]
        ctx.engine.reduce(ctx.forward_pass, given, expanded=ctx.expand)
        return None, None, None, None


class StepMoments:
    """Moments of a step, and of its rows between two steps. These do nothing; what joins a step (``RowEngine.joined``)
    overrides those that it needs, and a job that has not switched it on neither imports nor asks it.

    Called at the same points on every rank, by the training thread unless a method says otherwise. Those that exchange
    rows earlier or later than the step are collective.

    Attributes:
        working: objects whose tensors stay between steps, for the memory of the rank.
        held: objects whose tensors stay until a later step.
        fetches_early: rows of a pass may be fetched before it: its fetch carries no rows of a chunk.
        holds_route: a route is held that no forward pass has used: no chunk may be applied.
        deferred: gradients that are pushed later: with some, on all ranks, ``settle`` is collective.
        exchanges: further routers, with their groups, that use the exchange of the engine.
    """

    working: object = None
    held: object = None
    fetches_early = False
    holds_route = False
    deferred: object = None
    exchanges: tuple[tuple[ChainGroups, Router], ...] = ()

    def claim(self, given: object, *, usable: bool, trains: bool) -> RoutedInput | None:
        """Return the input of a forward pass if it was located before; not if it is not ``usable``.

        Args:
            trains: the pass is for training; equal on all ranks.
        """
        del given, usable, trains
        return None

    def check_given(self, given: object) -> None:
        """Run before the input of a forward pass is read; raises EmbeddingError if it is known not to be the batch."""
        del given

    def located(self, look_up: int) -> None:
        """Run when look-up number ``look_up``, from 1, has found its rows on all ranks."""

    def fetch_ahead(self, forward_pass: ForwardPass, *, expand: bool) -> list[torch.Tensor] | None:
        """Return the rows of a pass as ``RowEngine.fetch`` does if some were fetched before, else None."""
        del forward_pass, expand
        return None

    def fetched(self) -> None:
        """Run when a forward pass has its rows."""

    def split_gradients(self, *, defer: bool) -> DeferredGradients | None:
        """Run before the gradients of all open passes are pushed; None: push all of them.

        Args:
            defer: whether gradients may be deferred.
        """
        del defer
        return None

    def changed(self, parts: Sequence[tuple[int, torch.Tensor]], *, all_rows: bool = False) -> None:
        """Run when rows have been changed: by an update, in any thread, by a chunk or by a load.

        Args:
            parts: (dim-group, int64 [n] slots of home rows or replicas, repeats allowed).
            all_rows: other rows may have been changed as well.
        """

    def updated(self, optimizer: RowUpdate, step: int) -> None:
        """Run when a step has updated its rows."""

    def wait(self) -> None:
        """Wait until no other thread changes rows. Deferred gradients stay deferred."""

    def settle(self) -> None:
        """Push gradients that an earlier step deferred."""

    def discard(self) -> None:
        """Settle, and drop rows that were fetched early: the tables are about to be replaced."""

    def regrouped(self, before: RankRows, after: RankRows) -> bool:
        """Run when tables were frozen or unfrozen: the engine has the same rows in other dim-groups and stores. Nothing
        waits. Returns whether it goes on to join the steps."""
        del before, after
        return True

    def ended(self) -> bool:
        """End for good: no step follows, and deferred gradients are dropped. Returns whether all threads ended."""
        return True


logger = logging.getLogger(__name__)

# Functions by which torch and frameworks compute norms of gradients.
_NORMS = frozenset({torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm, torch._foreach_norm})


class RowGate(torch.Tensor):
    """``StepGradients.gate``. It has no norm of the rows, so computing one is noted as a mistake of the trainer."""

    warned = False
    """In this process."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            cls._note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _note(cls) -> None:
        text = "torch computed a norm of the gradient of rows, as in torch.nn.utils.clip_grad_norm_ of param_groups"
        USAGE_WARNINGS.note(UsageWarningKind.CLIPPED_BY_TORCH, text)
        if not RowGate.warned:
            RowGate.warned = True
            logger.warning(
                "%s: the parameter that represents rows has no norm of theirs, so clipping by it is wrong; call "
                "clip_grad_norm_ of the collection or of flexd.JoinedOptimizer instead",
                text,
            )


def sum_by_index(index: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] and [n, dim] -> unique ascending indices and the sums of their gradients."""
    unique, inverse = torch.unique(index, return_inverse=True)
    return unique, grads.new_zeros((len(unique), grads.shape[1])).index_add_(0, inverse, grads)


class StepGradients:
    """Gradients of all rows that this rank holds and any rank touched, before their update. Equal on all holders.

    Attributes:
        clip: factor of the gradients in the update, beside the gate; equal on all ranks.
    """

    def __init__(self, parts: Sequence[RowGradients], stores: Sequence[GroupStore], world: Peers) -> None:
        self._parts = list(parts)
        self._stores = stores
        self._world = world
        self._finite: bool | None = None
        self._gate: torch.Tensor | None = None
        self.clip = 1.0

    def add(self, parts: Sequence[RowGradients]) -> None:
        """Add gradients of the same step; no chunk was applied in between. As in torch, those that are here stay
        clipped and unscaled, and the others are neither."""
        before = self.scaled(self.factor)
        self._finite, self._gate, self.clip = None, None, 1.0
        # A sum of two numbers a row does not depend on the order in which a holder has them.
        self._parts = [
            RowGradients(
                old.group,
                *sum_by_index(torch.cat([old.slots, new.slots]), torch.cat([old.grads, new.grads])),
                sole=old.sole,
            )
            for old, new in zip(before, parts, strict=True)
        ]

    @property
    def factor(self) -> float:
        return self.clip if self._gate is None else self.clip * float(self._gate)

    def scaled(self, factor: float) -> list[RowGradients]:
        """Return the gradients multiplied by ``factor``, whose value the caller has read from the property."""
        if factor == 1.0:
            return self._parts
        return [replace(part, grads=part.grads * factor) for part in self._parts]

    def gate(self) -> torch.Tensor:
        """Collective at the first call. Return float32 []: 1, or inf if gradients of any row are not finite.

        The update multiplies by its value at that time: unscaling the gate unscales all rows, and an overflow shows on
        every rank.
        """
        if self._gate is None:
            value = 1.0 if self.finite() else math.inf
            self._gate = torch.full((), value, device=self._parts[0].grads.device).as_subclass(RowGate)
        return self._gate

    def finite(self) -> bool:
        """Collective at the first call. Return whether the gradients of all rows on all ranks are finite."""
        if self._finite is None:
            mine = torch.stack([part.grads.isfinite().all() for part in self._parts]).all().to(torch.int32)
            self._world.all_reduce(mine.view(1), dist.ReduceOp.MIN)
            self._finite = bool(mine.item())
        return self._finite

    @property
    def overflowed(self) -> bool:
        """True if ``finite`` was False. Equal on all ranks."""
        return self._finite is False

    def norm(self, norm_type: float, dense: float) -> float:
        """Collective. Return the norm of all rows' gradients with ``factor``, each row counted once, and of ``dense``.

        Args:
            norm_type: above 0, or inf.
            dense: norm of other gradients; that of rank 0 is used, so that all ranks get the same bits.

        Raises:
            EmbeddingError: ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise EmbeddingError(f"a norm of type {norm_type}", remedy="a number above 0, or inf")
        dense = dense if self._world.index == 0 else 0.0
        largest = math.isinf(norm_type)
        factor = self.factor
        norms = [self._home_norm(part, norm_type) * factor for part in self._parts]
        both = torch.stack([*norms, torch.tensor(dense, dtype=torch.float64, device=norms[0].device)])
        if largest:  # the result of MAX with NaN is not specified
            total = both.nan_to_num(nan=math.inf, posinf=math.inf).max().view(1)
        else:
            total = both.pow(norm_type).sum().view(1)
        self._world.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        self._world.finish_on_device()
        return float(total.item()) if largest else float(total.item()) ** (1.0 / norm_type)

    def _home_norm(self, part: RowGradients, norm_type: float) -> torch.Tensor:
        """Return float64 [] norm of the rows whose home is here, so that a replicated row counts once, and of those
        that have moved here."""
        grads = part.grads.double()
        if not part.sole:
            grads = grads[part.slots < self._stores[part.group].home_rows]
        if grads.numel() == 0:  # torch has no maximum of an empty tensor
            return grads.new_zeros(())
        norm: torch.Tensor = torch.linalg.vector_norm(grads, norm_type)
        return norm


def clip_grad_norm_(
    summed: Sequence[StepGradients],
    max_norm: float,
    norm_type: float,
    dense: Iterable[torch.Tensor],
    *,
    error_if_nonfinite: bool,
) -> float:
    """Collective. Clip the rows and ``dense`` parameters together as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        summed: of each collection that has gradients.

    Raises:
        EmbeddingError: the norm is not finite and ``error_if_nonfinite``, or ``norm_type`` is not above 0.
    """
    parameters = [parameter for parameter in dense if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    of_dense = torch.nn.utils.get_total_norm(grads, norm_type)
    if hasattr(of_dense, "full_tensor"):  # DTensors: equal on all ranks only as full tensors
        of_dense = of_dense.full_tensor()
    total = float(of_dense)
    for of_collection in summed:  # each adds its rows to the norm of what is before it
        total = of_collection.norm(norm_type, total)
    if error_if_nonfinite and not math.isfinite(total):
        raise EmbeddingError(
            f"the norm of type {norm_type:g} of all gradients is {total}",
            remedy="skip the step with zero_grad(), or pass error_if_nonfinite=False to clip by it anyway",
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, of_dense.new_tensor(total))
    for of_collection in summed:
        of_collection.clip *= min(1.0, max_norm / (total + 1e-6)) if not math.isnan(total) else math.nan
    return total


class AnchorParameter(torch.nn.Parameter):
    """Represents all rows where torch needs a parameter: autograd, ``param_groups``, ``torch.amp.GradScaler``.

    Reading ``grad`` is collective: ``GradScaler.unscale_`` and ``step`` read it, on every rank. It sums the gradients
    that wait for the next step at their rows and returns ``StepGradients.gate``, None if no rank has any.
    """

    gradients: Callable[[], StepGradients | None]
    drop: Callable[[], None]

    @staticmethod
    def of(
        device: torch.device, gradients: Callable[[], StepGradients | None], drop: Callable[[], None]
    ) -> AnchorParameter:
        anchor = AnchorParameter(torch.zeros((), device=device))
        anchor.gradients, anchor.drop = gradients, drop
        return anchor

    @property
    def grad(self) -> torch.Tensor | None:
        summed = self.gradients()
        return None if summed is None else summed.gate()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise EmbeddingError("the gradient of rows cannot be set", remedy="call backward()")
        self.drop()
