"""Maps keys to numbers on a device: with a cell for each key where keys are few, in buckets elsewhere."""

from typing import Protocol

import torch

from flexd.embedding import devices

BUCKET_CELLS = 8
MAX_LOAD = 0.8
"""Share of the cells that ``capacity`` keys fill. With two choices of 8 cells hardly a key finds both buckets full."""
_FREE = -1
_HASH_BITS = 31
_HASH_SHIFT = 64 - _HASH_BITS
# Odd 64-bit constants with well mixed bits, as signed numbers.
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)
# Keys moved to their other bucket for one key that finds both buckets full, before the table grows.
_MAX_MOVES = 500
# 2 generates every residue but 0, so the places 2**(8 c) and 2**(8 c + 1) of one set bit have distinct residues.
_MODULUS = 37
BYTES_PER_KEY = 10
"""Of a ``BucketTable`` filled to its capacity, with keys of 31 bits."""
ABSENT = 2**31 - 1
"""No value of a table."""
_SMALL_KEYS = 2**20
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
    return capacity > 0 and max_key < max(_SMALL_KEYS, capacity * BYTES_PER_KEY // 4)


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


class BucketTable:
    """A hash table whose changes cost what they change, for any device.

    Open addressing in buckets of 8 cells. A key is in one of two buckets, so a look-up reads two short runs of memory
    and takes the same kernels for every key; the host reads nothing from the device. Changes are vectorised over their
    keys, and the host does read the device then.

    Args:
        capacity: number of keys for which memory is allocated; with more the table grows, which takes time in
            proportion to its size.
        max_key: keys lie in [0, max_key].
    """

    def __init__(self, capacity: int, max_key: int, device: torch.device) -> None:
        self._dtype = torch.int32 if max_key < 2**31 else torch.int64
        self._device = device
        places = torch.zeros(_MODULUS, dtype=torch.int64)
        for choice in (0, 1):
            for cell in range(BUCKET_CELLS):
                places[pow(2, 8 * cell + choice, _MODULUS)] = choice * BUCKET_CELLS + cell
        self._places = places.to(device)
        self._multipliers = torch.tensor(_MULTIPLIERS, device=device)
        self._size = 0
        self._keys = self._values = torch.empty(0, dtype=torch.int32, device=device)
        self._allocate(capacity)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        held = (self._keys, self._values, self._places, self._multipliers, self._bases)
        return sum(tensor.nbytes for tensor in held)

    def find(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buckets = self._buckets_of(keys)
        # One byte a cell: as one number, a bucket without the key is 0, and one with it a power of two.
        words = self._matches(keys, buckets).view(torch.int64)
        either = torch.add(words[:, 0], words[:, 1], alpha=2)
        found = either.ne(0)
        place = self._places.index_select(0, either.remainder_(_MODULUS))
        bucket = torch.where(place < BUCKET_CELLS, buckets[:, 0], buckets[:, 1])
        return found, torch.add(place.bitwise_and_(BUCKET_CELLS - 1), bucket, alpha=BUCKET_CELLS)

    def values_of(self, keys: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
        if devices.in_host_memory(keys):  # half the time, with twice the kernels
            found, cells = self.find(keys)
            return torch.where(found, self.values_at(cells), absent)
        buckets = self._buckets_of(keys)
        values = self._values.index_select(0, buckets.view(-1)).view(-1, 2 * BUCKET_CELLS)
        return torch.where(self._matches(keys, buckets), values, absent).amin(dim=1)

    def _matches(self, keys: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        """int64 [n] keys and [n, 2] buckets -> bool [n, cells of both]: the cell has the key."""
        held = self._keys.index_select(0, buckets.view(-1)).view(-1, 2 * BUCKET_CELLS)
        return held == keys.to(self._dtype).unsqueeze(1)

    def values_at(self, cells: torch.Tensor) -> torch.Tensor:
        return self._values.view(-1).index_select(0, cells)

    def set_values(self, cells: torch.Tensor, values: torch.Tensor) -> None:
        self._values.view(-1).index_copy_(0, cells, values)

    def shift_values(self, bounds: torch.Tensor, shifts: torch.Tensor) -> None:
        for block in torch.split(self._values.view(-1), _SHIFTED_CELLS):
            block += shifts.index_select(0, torch.searchsorted(bounds, block, right=True, out_int32=True))

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        used = (self._keys.view(-1) != _FREE).nonzero().view(-1)
        return self._keys.view(-1).index_select(0, used).to(torch.int64), self.values_at(used)

    def remove(self, cells: torch.Tensor) -> None:
        self._keys.view(-1).index_fill_(0, cells, _FREE)
        self._size -= len(cells)

    def insert(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if len(keys) == 0:
            return
        if self._size + len(keys) > self._capacity:
            self._grow(self._size + len(keys))
        # Keys of one batch choose between buckets by the same numbers: a batch is a small part of the table.
        batch = max(64, self._half)
        for some, of_some in zip(torch.split(keys, batch), torch.split(values, batch), strict=True):
            self._insert(some, of_some)

    def _insert(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Insert keys, round by round; the host waits for the device once a round."""
        self._size += len(keys)
        nowhere = 2 * self._half * BUCKET_CELLS
        stuck = 0
        while stuck < 2:
            buckets = self._buckets_of(keys)
            used = (self._keys.index_select(0, buckets.view(-1)) != _FREE).sum(dim=1).view(-1, 2)
            emptier = torch.where(used[:, 1] < used[:, 0], buckets[:, 1], buckets[:, 0])
            ordered, order = torch.sort(emptier, stable=True)
            turn = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ordered, ordered)
            free = self._keys.index_select(0, ordered) == _FREE
            # The cell of the bucket's free cell number ``turn``; none if the bucket has fewer.
            here = free & (free.cumsum(1) == turn.unsqueeze(1) + 1)
            fits = here.any(dim=1)
            cells = torch.where(fits, ordered * BUCKET_CELLS + here.to(torch.uint8).argmax(dim=1), nowhere)
            placed = torch.where(fits, keys.index_select(0, order), _FREE).to(self._dtype)
            self._keys.view(-1).index_copy_(0, cells, placed)
            self.set_values(cells, values.index_select(0, order))
            left = order[~fits].sort().values
            stuck = stuck + 1 if len(left) == len(keys) else 0
            keys, values = keys.index_select(0, left), values.index_select(0, left)
            if len(left) == 0:
                return
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            self._insert_by_moving(key, value)

    def _insert_by_moving(self, key: int, value: int) -> None:
        """Insert a key whose buckets are full: another moves to its other bucket, and so on; or the table grows."""
        keys, values = self._keys.view(-1), self._values.view(-1)
        bucket = -1
        for move in range(_MAX_MOVES):
            both = self._buckets_of(torch.tensor([key], device=self._device)).view(2).tolist()
            for one in both:
                free = (self._keys[one] == _FREE).nonzero().view(-1)
                if len(free):
                    cell = one * BUCKET_CELLS + int(free[0])
                    keys[cell], values[cell] = key, value
                    return
            bucket = both[1] if both[0] == bucket else both[0]
            cell = bucket * BUCKET_CELLS + move * 5 % BUCKET_CELLS
            moved = int(keys[cell]), int(values[cell])
            keys[cell], values[cell] = key, value
            key, value = moved
        self._size -= 1
        self._grow(2 * self._capacity)
        self.insert(
            torch.tensor([key], device=self._device), torch.tensor([value], dtype=torch.int32, device=self._device)
        )

    def _allocate(self, capacity: int) -> None:
        half = self._half = -(-int(capacity / MAX_LOAD + 1) // (2 * BUCKET_CELLS))
        self._capacity = capacity
        # A hash is a signed number of 31 bits.
        self._bases = torch.tensor([half << (_HASH_BITS - 1), 3 * half << (_HASH_BITS - 1)], device=self._device)
        # One bucket more, which stays empty, for keys that find no cell in a round.
        self._keys = torch.full((2 * half + 1, BUCKET_CELLS), _FREE, dtype=self._dtype, device=self._device)
        self._values = torch.zeros((2 * half + 1, BUCKET_CELLS), dtype=torch.int32, device=self._device)

    def _grow(self, capacity: int) -> None:
        keys, values = self.items()
        self._allocate(max(capacity, self._capacity + self._capacity // 2))
        self._size = 0
        self.insert(keys, values)

    def _buckets_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Return int64 [n, 2], the two buckets of each key: one in either half of the table."""
        hashes = (keys.unsqueeze(1) * self._multipliers) >> _HASH_SHIFT
        return torch.add(self._bases, hashes, alpha=self._half) >> _HASH_BITS
