"""Numbers that look random and are equal on every rank and device: hashes of a row and a step.

Initial values are a function of (seed, table, row, column) alone. So every sharding over any number of ranks starts
from the same table, and no rank holds more than its share. They are computed on the device of the rows, with integers
and float64, so that every device computes the same.

Stochastic rounding of float32 numbers to half precision is repeatable on every holder of a row. A number between two
neighbours a < b of the narrow dtype becomes b with probability (x - a) / (b - a), so that updates below half a unit in
the last place are kept on average (Gupta et al., Deep Learning with Limited Numerical Precision, arXiv 1502.02551). The
random bits are a hash of (key of the row, number of the step, column): no generator has a state, and neither the place
of a row nor the rows beside it matter.
"""

import zlib

import torch

from flexd.core.keyspace import SCALE_BYTES
from flexd.embedding import devices
from flexd.embedding.store.quantized_rows import as_stored

_BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR = 1 << 16, 1 << 22
"""Numbers that are drawn at once: as many as the caches of a processor hold, or enough to occupy an accelerator."""


def _signed(number: int, bits: int) -> int:
    """Return the number that has the same lowest bits in two's complement."""
    number %= 1 << bits
    return number - (1 << bits) if number >= 1 << (bits - 1) else number


GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)), (31, 1))


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), finaliser. In place."""
    x.add_(GOLDEN)
    shifted = torch.empty_like(x)
    for shift, factor in _ROUNDS:
        # torch shifts in copies of the sign bit.
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            x.mul_(factor)
    return x


def fill_initial_rows(out: torch.Tensor, table: str, rows: range | torch.Tensor, *, scale: float, seed: int) -> None:
    """Fill [n, width] ``out`` with the initial values of the given rows of a table, uniform in [-scale, scale).

    Args:
        rows: n rows; a tensor is int64 and on the device of ``out``.
    """
    if scale == 0:
        out.zero_()
        return
    # Without mixing, the tables of two consecutive seeds would be the same rows shifted by one.
    salt = int(splitmix64(torch.tensor([_signed(zlib.crc32(table.encode()) << 32 | (seed & 0xFFFFFFFF), 64)])))
    dim, device = out.shape[1] - (SCALE_BYTES if out.dtype == torch.int8 else 0), out.device
    step = devices.block_rows(out, _BLOCK_NUMBERS, _BLOCK_NUMBERS_OF_ACCELERATOR)
    columns = torch.arange(dim, device=device)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if isinstance(part, range):
            part = torch.arange(part.start, part.stop, part.step, device=device)
        bits = splitmix64(splitmix64(part + salt).unsqueeze(1) + columns)
        bits.bitwise_right_shift_(11).bitwise_and_(2**53 - 1)
        out[start : start + len(part)] = as_stored(
            bits.to(torch.float64).mul_(2.0**-52).sub_(1.0).mul_(scale), out.dtype
        )


_SMALLEST_NORMAL, _LARGEST = 2.0**-14, 65504.0
"""Of float16."""


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, keys: torch.Tensor, step: int) -> torch.Tensor:
    """Round float32 [n, dim] to bfloat16 or float16. Exact numbers stay, infinities and NaN too.

    Args:
        keys: int64 [n], the same on every rank that holds the row.
        step: of the job; another step has other random bits.
    """
    random = random_bits(keys, step, values.shape[1])
    bits = values.contiguous().view(torch.int32)
    if dtype == torch.bfloat16:
        # bfloat16 is the upper half of float32; a carry out of the lower half rounds up.
        rounded = (random.add_(bits) >> 16).to(torch.int16).view(torch.bfloat16)
        return rounded.masked_fill_(values != values, torch.nan)  # a carry may leave the range of NaN
    size = values.abs()
    fixed = (values * 2.0**24).add_(random * 2.0**-16).floor_().mul_(2.0**-24)
    normal = (random.bitwise_and_(0x1FFF).add_(bits) & ~0x1FFF).view(torch.float32)
    rounded = torch.where(size < _SMALLEST_NORMAL, fixed, normal).to(dtype)
    return torch.where(size < _LARGEST, rounded, values.to(dtype))


def random_bits(keys: torch.Tensor, step: int, columns: int) -> torch.Tensor:
    """Return int32 [n, columns] of 16 random bits: a hash of int64 [n] keys, the step and the column."""
    seeds = splitmix64(keys + _signed((step - 1) * GOLDEN, 64)).view(torch.int32).view(-1, 2)
    # One hash of 32 bits serves two columns.
    pairs = torch.arange(-(-columns // 2), dtype=torch.int32, device=keys.device).mul_(_signed(0x9E3779B9, 32))
    mixed = seeds[:, :1] + pairs
    # Rounds of multiplication and shift (Wellons, hash-prospector), with the second word of the seed between them.
    mixed.bitwise_xor_(_shifted(mixed, 16)).mul_(0x21F0AAAD)
    mixed.bitwise_xor_(_shifted(mixed, 15)).add_(seeds[:, 1:]).mul_(_signed(0xD35A2D97, 32))
    mixed.bitwise_xor_(_shifted(mixed, 15))
    return mixed.view(torch.int16)[:, :columns].to(torch.int32).bitwise_and_(0xFFFF)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right, with zeros instead of copies of the sign."""
    return (words >> by).bitwise_and_((1 << (8 * words.element_size() - by)) - 1)
