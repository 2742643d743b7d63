"""Learned costs of look-ups and updates on the devices of the running job."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from flexd.planner.tables.kernel_costs import KernelCosts

if TYPE_CHECKING:
    from flexd.topology.kernel_file import KernelMeasurements


class LiveKernels:
    """Thread-safe. Costs are learned when a plan needs them first: that takes seconds, which no start waits for.

    Args:
        measurements: of the kernels that the ranks run; checked (``kernel_costs.check_measurements``).
    """

    def __init__(self, measurements: KernelMeasurements) -> None:
        self._measurements = measurements
        self._lock = threading.Lock()
        self._learned: KernelCosts | None = None

    def costs(self) -> KernelCosts:
        """Return the costs that plans are priced with."""
        with self._lock:
            if self._learned is None:
                self._learned = KernelCosts.learned(self._measurements)
            return self._learned
