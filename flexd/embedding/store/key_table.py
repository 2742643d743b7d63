"""Maps keys to numbers on a device: ``DenseKeyTable`` where keys are few, ``BucketTable`` elsewhere."""

from typing import Protocol

import torch

from flexd.embedding.store.bucket_table import BYTES_PER_KEY, BucketTable

ABSENT = 2**31 - 1
"""No value of a table."""
_SMALL_KEYS = 2**22
# Cells that ``shift_values`` changes at once: its temporaries stay small.
_SHIFTED_CELLS = 2**18


class KeyTable(Protocol):
    """Maps distinct keys to int32 values below ``ABSENT``. Not thread-safe while it changes."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [n] keys -> (bool [n] is in the table, int64 [n] its cell; some cell where it is not)."""
        ...

    def values_of(self, keys: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
        """int64 [n] keys -> int32 [n] values, and int32 [] ``absent``, which no value exceeds, for other keys. The host
        waits for nothing."""
        ...

    def values_at(self, cells: torch.Tensor) -> torch.Tensor:
        """int64 [n] cells -> int32 [n] values."""
        ...

    def set_values(self, cells: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of int64 [n] distinct cells."""
        ...

    def shift_values(self, bounds: torch.Tensor, shifts: torch.Tensor) -> None:
        """Add to all values int32 [b + 1] ``shifts`` by their place among int32 [b] ascending ``bounds``. Linear in the
        table."""
        ...

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 [n] keys and int32 [n] values, in the order of the cells."""
        ...

    def remove(self, cells: torch.Tensor) -> None:
        """Remove the keys at int64 [n] distinct cells, as ``find`` returned them."""
        ...

    def insert(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Insert int64 [n] keys, each once and none of them in the table, with int32 [n] values."""
        ...


def is_dense(capacity: int, max_key: int) -> bool:
    """Return whether ``key_table`` returns a dense table: it is small, or no larger than the other one."""
    return max_key < max(_SMALL_KEYS, capacity * BYTES_PER_KEY // 4)


def key_table(capacity: int, max_key: int, device: torch.device) -> KeyTable:
    """Make a table.

    Args:
        capacity: number of keys for which memory is allocated; with more it may grow.
        max_key: keys lie in [0, max_key].
    """
    kind = DenseKeyTable if is_dense(capacity, max_key) else BucketTable
    return kind(capacity, max_key, device)


class DenseKeyTable:
    """A cell for each key there may be: a look-up is two kernels, and reads one number a key."""

    def __init__(self, capacity: int, max_key: int, device: torch.device) -> None:
        del capacity
        self._values = torch.full((max_key + 1,), ABSENT, dtype=torch.int32, device=device)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values_at(keys) != ABSENT, keys

    def values_of(self, keys: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
        return torch.minimum(self.values_at(keys), absent)

    def values_at(self, cells: torch.Tensor) -> torch.Tensor:
        return self._values.index_select(0, cells)

    def set_values(self, cells: torch.Tensor, values: torch.Tensor) -> None:
        self._values.index_copy_(0, cells, values)

    def shift_values(self, bounds: torch.Tensor, shifts: torch.Tensor) -> None:
        for block in torch.split(self._values, _SHIFTED_CELLS):
            shifted = block + shifts.index_select(0, torch.searchsorted(bounds, block, right=True, out_int32=True))
            block.copy_(torch.where(block == ABSENT, block, shifted))

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys = (self._values != ABSENT).nonzero().view(-1)
        return keys, self.values_at(keys)

    def remove(self, cells: torch.Tensor) -> None:
        self._values.index_fill_(0, cells, ABSENT)
        self._size -= len(cells)

    def insert(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._values.index_copy_(0, keys, values)
        self._size += len(keys)
