"""Fast memory for hot rows, host memory for the rest: the bandwidths and capacities that placements of tables have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TwoMemories:
    """Memories of a rank.

    Attributes:
        fast_bytes_per_second: A100 40 GB data sheet, 1,555 GB/s.
        slow_bytes_per_second: PCIe 4.0 x16, one direction, 32 GB/s by its specification.
        host_bytes: host memory of each rank for rows.
    """

    fast_bytes_per_second: float = 1.555e12
    slow_bytes_per_second: float = 32e9
    host_bytes: float = 128e9

    def reading_seconds(self, read_bytes: Float64Array, fast_share: Float64Array) -> Float64Array:
        """Return the time to read these bytes, of which ``fast_share`` are in fast memory."""
        seconds: Float64Array = read_bytes * (
            fast_share / self.fast_bytes_per_second + (1 - fast_share) / self.slow_bytes_per_second
        )
        return seconds
