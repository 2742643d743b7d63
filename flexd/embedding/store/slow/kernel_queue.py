"""Many calls of a file in flight without threads: Linux's asynchronous I/O (``io_submit(2)``), where there is one.

A thread for every call in flight costs a switch and a turn of the interpreter's lock each. One system call here hands
over a hundred.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

import numpy as np
import numpy.typing as npt

QUEUE_CALLS = 128
"""In flight at once: below the 256 that block devices take by default, so that handing over does not wait."""
_WAIT_SECONDS = 1.0
_SYSTEM_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit."""
_CALL = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("file", "<u4"),
        ("address", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u8"),
    ]
)  # fmt: skip
"""struct iocb of linux/aio_abi.h."""
_EVENT = np.dtype([("data", "<u8"), ("call", "<u8"), ("result", "<i8"), ("second", "<i8")])
_READS, _WRITES = 0, 1

Int64Array = npt.NDArray[np.int64]


class KernelQueue:
    """Queue of calls in the kernel. Calls come from one thread at a time; ``make`` returns None where there is none."""

    def __init__(self, context: int, numbers: tuple[int, int, int, int]) -> None:
        self._context, self._numbers = context, numbers
        self._library = ctypes.CDLL(None, use_errno=True)

    @classmethod
    def make(cls) -> KernelQueue | None:
        numbers = _SYSTEM_CALLS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            return None
        context = ctypes.c_ulong(0)
        library = ctypes.CDLL(None, use_errno=True)
        # Refused by some sandboxes, and where fs.aio-max-nr is used up.
        if library.syscall(ctypes.c_long(numbers[0]), ctypes.c_long(QUEUE_CALLS), ctypes.byref(context)) != 0:
            return None
        return cls(context.value, numbers)

    def run(
        self, file: int, offsets: Int64Array, addresses: Int64Array, sizes: Int64Array, *, writes: bool, seconds: float
    ) -> Int64Array | None:
        """Make the calls, and wait for them.

        Args:
            file: descriptor, opened for direct I/O.
            offsets, addresses, sizes: int64 [n], in the file, in memory, and of each call.

        Returns:
            int64 [n]: bytes moved, or minus the number of the error, of each call; -EAGAIN (11) of calls that the
            kernel refused to queue. None: not all have ended within ``seconds``; they still use the memory.
        """
        count = len(offsets)
        calls = np.zeros(count, _CALL)
        calls["data"], calls["opcode"], calls["file"] = np.arange(count), _WRITES if writes else _READS, file
        calls["address"], calls["size"], calls["offset"] = addresses, sizes, offsets
        pointers = calls.ctypes.data + _CALL.itemsize * np.arange(count, dtype=np.int64)
        events, results = np.zeros(QUEUE_CALLS, _EVENT), np.full(count, -11, dtype=np.int64)
        end = time.monotonic() + seconds
        given = ended = 0
        while ended < count:
            if given < count and given - ended < QUEUE_CALLS:
                taken = self._submit(min(QUEUE_CALLS - (given - ended), count - given), pointers[given:])
                given += max(0, taken)
                if taken <= 0 and given == ended:
                    break
            some = self._wait(max(1, (given - ended) // 2), events)
            results[events["data"][:some].astype(np.int64)] = events["result"][:some]
            ended += some
            if ended < count and time.monotonic() > end:
                return None
        return results

    def close(self) -> None:
        """Waits for calls that have not ended."""
        self._library.syscall(ctypes.c_long(self._numbers[1]), ctypes.c_ulong(self._context))

    def _submit(self, count: int, pointers: Int64Array) -> int:
        """Return how many calls the kernel has taken; -1 for none."""
        return int(
            self._library.syscall(
                ctypes.c_long(self._numbers[3]), ctypes.c_ulong(self._context), ctypes.c_long(count),
                ctypes.c_void_p(pointers.ctypes.data),
            )
        )  # fmt: skip

    def _wait(self, least: int, events: npt.NDArray[np.void]) -> int:
        """Return how many calls ended: at least so many, or those of a second."""
        whole = int(_WAIT_SECONDS)
        until = (ctypes.c_long * 2)(whole, int((_WAIT_SECONDS - whole) * 1e9))
        ended = self._library.syscall(
            ctypes.c_long(self._numbers[2]), ctypes.c_ulong(self._context), ctypes.c_long(least),
            ctypes.c_long(len(events)), ctypes.c_void_p(events.ctypes.data), until,
        )  # fmt: skip
        return max(0, int(ended))
