"""Which steps on constants run once, while planning: how large a result may be, and what a float weight is from."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import numpy_dtype
from lut4tool.runtime.scope import Constant, Site

#: A step whose constant inputs, and whose results, have at most this many elements is run once, while planning.
FOLDED = 1 << 16
#: Elements of the largest result of a ConstantOfShape that is made once, while planning.
FILLED = 1 << 28
#: On a CPU a chain of these operators on constants is folded where its result takes at most so many bytes for each
#: byte of the file: an int8 weight becomes float32, as its product wants it; one of 4 bits stays as it is.
WIDENED = 4
_WIDENING = ("Cast", "DequantizeLinear", "Mul", "Sub", "Add", "Transpose")
#: And these on floats: a weight that its producer has cut and put together comes out as its operator wants it.
_MOVING = ("Concat", "Reshape", "Slice", "Squeeze", "Unsqueeze")


def quantized(site: Site, constants: Sequence[Constant]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """What DequantizeLinear makes a matrix of: bytes [K, N], scale and zero point, one for all or one a column."""
    if (site.domain, site.node.op_type) != ("", "DequantizeLinear") or site.attributes.get("block_size"):
        return None
    values: list[Any] = [constant.value for constant in constants]
    matrix, scale, zero = (*values, None)[:3]
    if matrix.ndim != 2 or matrix.dtype.name not in ("int8", "uint8") or scale.dtype != np.float32:
        return None
    columns = scale.ndim == 1 and site.attributes.get("axis", 1) in (1, -1) and scale.size == matrix.shape[1]
    return (matrix, scale, zero) if columns or scale.size == 1 else None


def widens(site: Site, constants: Sequence[Constant]) -> bool:
    """Whether a node's result is a float weight of at most WIDENED times the bytes that it is stored in."""
    kind = site.node.op_type if site.domain == "" else ""
    arrays = [constant.value for constant in constants]
    if kind not in (*_WIDENING, *_MOVING) or not all(isinstance(array, np.ndarray) for array in arrays):
        return False
    if kind in _MOVING:
        item = arrays[0].dtype.itemsize if arrays[0].dtype.kind == "f" else 0
        size = sum(array.size for array in arrays) if kind == "Concat" else arrays[0].size
    elif kind == "Cast":
        target = numpy_dtype(site.attributes["to"])
        size, item = arrays[0].size, target.itemsize if target.kind == "f" else 0
    else:
        floats = [array.dtype.itemsize for array in arrays if array.dtype.kind == "f"]
        try:
            size, item = prod(np.broadcast_shapes(*(array.shape for array in arrays))), max(floats, default=0)
        except ValueError:  # scales of an axis or of blocks: the result is as large as the first input
            size, item = arrays[0].size, max(floats, default=0)
    return 0 < size * item <= WIDENED * sum(constant.stored for constant in constants)
