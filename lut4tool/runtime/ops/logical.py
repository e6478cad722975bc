"""Comparisons, logic and bits (onnx/defs/logical)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from lut4tool.runtime.ops import prepared
from lut4tool.runtime.registry import op

# ONNX name -> (name that NumPy and MLX share, first version with free broadcasting).
_BINARY: dict[str, tuple[str, int]] = {
    "And": ("logical_and", 7),
    "Or": ("logical_or", 7),
    "Xor": ("logical_xor", 7),
    "Equal": ("equal", 7),
    "Greater": ("greater", 7),
    "GreaterOrEqual": ("greater_equal", 12),
    "Less": ("less", 7),
    "LessOrEqual": ("less_equal", 12),
    "BitwiseAnd": ("bitwise_and", 18),
    "BitwiseOr": ("bitwise_or", 18),
    "BitwiseXor": ("bitwise_xor", 18),
}


def _binary(function: str, xp: Any, a: Any, b: Any) -> Any:
    return getattr(xp, function)(a, b)


for _name, (_function, _since) in _BINARY.items():
    op(_name, since=_since, prepare=prepared.function(getattr(np, _function)))(partial(_binary, _function))


@op("Not", prepare=prepared.function(np.logical_not))
def logical_not(xp: Any, x: Any) -> Any:
    """Negation of booleans."""
    return xp.logical_not(x)


@op("BitwiseNot")
def bitwise_not(xp: Any, x: Any) -> Any:
    """Every bit inverted."""
    return ~x


@op("BitShift")
def bit_shift(xp: Any, x: Any, y: Any, *, direction: str) -> Any:
    """A shift by the width or more, or by less than 0, leaves 0; a signed right shift copies the sign, leaving -1."""
    bits = 8 * x.dtype.itemsize if hasattr(x.dtype, "itemsize") else 8 * x.dtype.size
    inside = (y >= 0) & (y < bits)
    by = xp.where(inside, y, xp.zeros_like(y))
    if direction == "LEFT":
        return xp.where(inside, xp.left_shift(x, by), xp.zeros_like(x))
    far = xp.where(x < 0, ~xp.zeros_like(x), xp.zeros_like(x))
    return xp.where(inside, xp.right_shift(x, by), far)
