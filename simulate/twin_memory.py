"""Records and numbers at an address, for compiled code.

The compiled engine is some sixty small functions that share one world.  Handed on as arrays, that world is a hundred
machine words a call and as many reference counts; as addresses it is one.  An address is an integer, the start of a
NumPy array that the caller keeps alive; nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.extending import intrinsic

compiled = njit(error_model="numpy", forceinline=True)
"""Every function inside the engine, built into its entry, which alone is kept on disk."""


def records_at(record: np.dtype[Any]) -> Any:
    """The function ``(address, index)`` to the record in that place, by reference."""
    kind, size = from_dtype(record), record.itemsize

    @intrinsic
    def at(typing_context: Any, address: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(ir.IntType(64), size)))
            return builder.inttoptr(place, context.get_value_type(kind))

        return kind(types.int64, types.int64), build

    return at


def values_at(kind: Any) -> tuple[Any, Any]:
    """The functions ``(address, index)`` to a 64-bit value, and ``(address, index, value)`` that stores one."""

    def pointer(builder: Any, context: Any, args: Any) -> Any:
        start = builder.inttoptr(args[0], context.get_value_type(kind).as_pointer())
        return builder.gep(start, [args[1]])

    @intrinsic
    def load(typing_context: Any, address: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, context, args))

        return kind(types.int64, types.int64), build

    @intrinsic
    def store(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[2], pointer(builder, context, args))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), build

    return load, store


integer_at, put_integer = values_at(types.int64)
number_at, put_number = values_at(types.float64)
word_at, put_word = values_at(types.uint64)
