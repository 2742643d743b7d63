"""Parts of the compiled loops: the prefetch instruction, and the mix of bits that random numbers and hashes share."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from flexd.core.tap_counts import FIRST, GAMMA, SECOND


def _prefetch_code(typing_context: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        insert: Any = cgutils.get_or_insert_function
        function = insert(builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        # For reading, into the second-level cache: measured faster than for writing, and than into the first level,
        # which cannot hold the lines of a whole block.
        builder.call(function, [address, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


# ``prefetch(array, index)``: loads the cache line of the element; an index outside the array does nothing.
prefetch: Any = intrinsic(_prefetch_code)


@numba.njit(cache=True, nogil=True, inline="always")
def finalise(z: Any) -> Any:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*,
    OOPSLA 2014) of a uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return z ^ (z >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
def mix(value: Any) -> Any:
    """Return SplitMix64's output for a uint64: its state's next step, finalised."""
    return finalise(value + np.uint64(GAMMA))
