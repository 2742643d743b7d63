"""CUDA tensors without a GPU: torch's ``FakeTensorMode``, with the values of each tensor kept in host memory.

``FakeTensorMode`` runs every operator as the CPU build knows it for ``cuda`` tensors: an operator over tensors of two
devices and ``numpy()`` of a device's tensor raise as they do on a GPU. It has no values, so a size that the host reads
would be unknown. Here each tensor has a twin in host memory that the same operators change; where the host reads, it
reads the twin, and the read is counted.

Autograd aborts the process for such tensors on the CPU build. ``backward`` of ``LookupFunction`` is called directly.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from flexd.embedding import collection as collection_module
from flexd.embedding.step import LookupFunction
from tools.bench import mirror_ranks

DEVICE = torch.device("cuda:0")
_SIZED_BY_VALUES = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}


class PretendedCuda(FakeTensorMode):
    """A ``FakeTensorMode`` with values.

    Attributes:
        waits: reads for which the host waits for the device, by operator.
        lines: lines of flexd that read.
        queued: operators by thread and current stream.
        largest_bytes: of the largest tensor that was made on the device.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.streams = RecordedStreams()
        self.queued: Counter[tuple[str, str]] = Counter()
        self.largest_bytes = 0
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:  # an operator that FakeTensorMode runs as several
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        self.queued[threading.current_thread().name, str(self.streams.current())] += 1
        result = func(*_twins(args), **_twins(kwargs))
        if name == "_local_scalar_dense":
            self._read(name, args[0])
            return result
        boolean = name == "index" and any(part is not None and part.dtype == torch.bool for part in args[1])
        if name in _SIZED_BY_VALUES or boolean or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            given = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, torch.Tensor)]
            if len({part.device for part in given if part.dim()}) > 1:
                raise RuntimeError(f"{name} over tensors on {', '.join(str(part.device) for part in given)}")
            self._read(name, given[0])
            return tree_map(lambda part: self._fake_of(part, given[0].device), result)
        if name == "index_put_" and any(part is not None and part.dtype == torch.bool for part in args[1]):
            self._read(name, args[0])
        if name in ("_to_copy", "copy_"):
            target = kwargs.get("device") if name == "_to_copy" else args[0].device
            source = args[0] if name == "_to_copy" else args[1]
            if target is not None and torch.device(target).type == "cpu":
                self._read("to the host", source)
        self._inside = True
        try:
            fake = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
        for place, (made, values) in enumerate(zip(tree_flatten(fake)[0], tree_flatten(result)[0], strict=True)):
            if isinstance(made, FakeTensor):
                # Only CPUs have more results than the first.
                known = made.shape == values.shape or (place and name == "_embedding_bag_forward_only")
                both = f"{name}: {made} on a GPU, {values} on a CPU"
                assert known, both
                assert made.dtype == values.dtype, both
                made.twin = values  # type: ignore[attr-defined]
                if made.device.type == "cuda" and all(one.alias_info is None for one in func._schema.returns):
                    self.largest_bytes = max(self.largest_bytes, values.nbytes)
        return fake

    @contextmanager
    def running(self) -> Iterator[PretendedCuda]:
        """Make ``cuda`` the pretended device inside; ``LookupFunction`` runs without autograd."""
        with ExitStack() as stack:
            tolist = self._tolist(torch.Tensor.tolist)
            for owner, method, function in (
                (torch.Tensor, "tolist", tolist), (FakeTensor, "tolist", tolist),
                (torch.Tensor, "numpy", _numpy(torch.Tensor.numpy)),
                # torch's own set the CUDA device of the thread, which the CPU build cannot.
                (FakeTensor, "__getitem__", _getitem), (FakeTensor, "__setitem__", _setitem),
                (FakeTensor, "__invert__", _operator("bitwise_not")), (FakeTensor, "nonzero", _operator("nonzero")),
                (torch, "nonzero", _operator("nonzero")), (FakeTensor, "copy_", _operator("copy_")),
                (FakeTensor, "contiguous", _contiguous),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, method, function, create=True))
            stack.enter_context(mock.patch.object(collection_module, "LookupFunction", LookupWithoutAutograd))
            # Mirrors work on pretended tensors too.
            stack.enter_context(mock.patch.object(mirror_ranks, "_disable_current_modes", nullcontext))
            stack.enter_context(self.streams.running())
            stack.enter_context(self)
            yield self

    def _tolist(self, of_real: Any) -> Any:
        def tolist(tensor: torch.Tensor) -> Any:
            self._read("tolist", tensor)
            with _disable_current_modes():
                return of_real(twin(tensor))

        return tolist

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda" or mirror_ranks.INSIDE[0]:
            return
        self.waits[name] += 1
        frames = [frame for frame in traceback.extract_stack() if "/flexd/" in frame.filename]
        place = frames[-1] if frames else traceback.extract_stack(limit=4)[0]
        self.lines[f"{place.filename.split('/flexd/')[-1]}:{place.lineno}"] += 1

    def _fake_of(self, twin: Any, device: torch.device) -> Any:
        if not isinstance(twin, torch.Tensor):
            return twin
        with _disable_current_modes():
            meta = torch.empty_strided(twin.shape, twin.stride(), dtype=twin.dtype, device="meta")
        fake = FakeTensor(self, meta, device)
        fake.twin = twin  # type: ignore[attr-defined]
        return fake


class LookupWithoutAutograd:
    """``LookupFunction`` as a function; ``backward`` runs the backward passes."""

    contexts: ClassVar[list[SimpleNamespace]] = []

    @classmethod
    def apply(cls, *args: Any) -> tuple[torch.Tensor, ...]:
        context = SimpleNamespace()
        cls.contexts.append(context)
        context.rows = LookupFunction.forward(context, *args)
        return context.rows

    @classmethod
    def backward(cls) -> None:
        """Run the backward passes of all forward passes since the last call; the gradients are the rows."""
        for context in cls.contexts:
            LookupFunction.backward(context, *[rows.clone() for rows in context.rows])
        cls.contexts.clear()


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a pretended tensor."""
    return tensor.twin if isinstance(tensor, FakeTensor) else tensor  # type: ignore[attr-defined]


def _twins(given: Any) -> Any:
    def convert(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return twin(part)
        return torch.device("cpu") if isinstance(part, torch.device) and part.type == "cuda" else part

    return tree_map(convert, given)


def _numpy(of_real: Any) -> Any:
    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        with _disable_current_modes():
            return of_real(twin(tensor), *args, **kwargs)

    return numpy


def _operator(name: str) -> Any:
    return lambda *given: getattr(torch.ops.aten, name)(*given)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)


def _getitem(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    view, indices = _indexed(tensor, key)
    return torch.ops.aten.index(view, indices) if indices else view


def _setitem(tensor: torch.Tensor, key: Any, value: Any) -> None:
    view, indices = _indexed(tensor, key)
    if indices:
        given = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=view.dtype)
        torch.ops.aten.index_put_(view, indices, given)
    elif isinstance(value, torch.Tensor):
        view.copy_(value)
    else:
        view.fill_(value)


def _indexed(view: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the view that numbers, slices and None of a key select, and its indices by tensors."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [part for part in keys if not isinstance(part, torch.Tensor)]:
        at = next(i for i, part in enumerate(keys) if part is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (view.dim() - sum(part is not None for part in keys) + 1)
    dim = 0
    indices: list[torch.Tensor | None] = []
    for part in keys:
        if isinstance(part, int):
            view = view.select(dim, part)
            continue
        if part is None:
            view = view.unsqueeze(dim)
        elif isinstance(part, slice):
            start, stop, step = part.indices(view.shape[dim])
            view = torch.ops.aten.slice(view, dim, start, max(start, stop), step)
        else:
            indices += [None] * (dim - len(indices)) + [part]
        dim += 1
    return view, indices


class RecordedStreams:
    """Stands in for ``torch.cuda``'s streams and events.

    Attributes:
        calls: (thread, operation, stream or event it is called on, argument), in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, str]] = []
        self._numbers = count(1)
        self._current = threading.local()

    def record(self, operation: str, on: object, argument: object = "") -> None:
        self.calls.append((threading.current_thread().name, operation, str(on), str(argument)))

    def of(self, operation: str) -> list[tuple[str, str, str]]:
        """Return (thread, stream or event, argument) of the calls of one operation."""
        return [(thread, on, argument) for thread, name, on, argument in self.calls if name == operation]

    def current(self, device: object = None) -> Recorded:
        del device
        return getattr(self._current, "stream", None) or Recorded(self, "default")

    @contextmanager
    def use(self, stream: Recorded | None) -> Iterator[None]:
        before = self.current()
        self._current.stream = stream or before
        yield
        self._current.stream = before

    def new(self, kind: str) -> Callable[..., Recorded]:
        """Return the constructor of streams or events, which are numbered."""
        return lambda *_, **__: Recorded(self, f"{kind} {next(self._numbers)}")

    @contextmanager
    def running(self) -> Iterator[RecordedStreams]:
        def record_stream(tensor: torch.Tensor, stream: object) -> None:
            self.record("record_stream", tuple(tensor.shape), stream)

        with ExitStack() as stack:
            for name, function in (
                ("Stream", self.new("stream")), ("Event", self.new("event")), ("stream", self.use),
                ("current_stream", self.current),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", record_stream))
            yield self


class Recorded:
    """A stream or an event: calls of its methods are recorded, by default of the current stream; all return True."""

    def __init__(self, streams: RecordedStreams, name: str) -> None:
        self._streams, self._name = streams, name

    def __str__(self) -> str:
        return self._name

    def __getattr__(self, operation: str) -> Callable[..., bool]:
        def recorded(argument: object = None) -> bool:
            self._streams.record(operation, self, argument or self._streams.current())
            return True

        return recorded
