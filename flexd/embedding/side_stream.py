"""Device work of a helper thread, on a CUDA stream of its own, and its hand-over to the training thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs a helper thread's work on the device beside training; does nothing on a CPU.

    Without a stream of its own the thread's kernels would go to the default stream, where they and the host's reads of
    their results wait for all that training has queued. Made by the training thread; the work comes after what is
    queued there at that time. Tensors that training makes later must not be given to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Queue the work inside on the stream. The host's reads inside wait for this stream alone."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def finished(self) -> torch.cuda.Event | None:
        """Return an event after all work so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def receive(finished: torch.cuda.Event | None, tensors: Iterable[torch.Tensor]) -> None:
    """Use tensors of a ``SideStream`` on the current stream: it waits for ``finished``, the host does not.

    The allocator gives the memory of a tensor that is dropped to the stream that made it at once; recorded here, the
    memory stays until the current stream has done its work with it.
    """
    if finished is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(finished)
    for tensor in tensors:
        tensor.record_stream(stream)
