"""Which steps on constants run once, while planning: how large a result may be, and what a float weight is from."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from onnx import TensorProto

from lut4tool.runtime.dtypes import numpy_dtype
from lut4tool.runtime.quantized import Quantized
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


def quantized(site: Site, constants: Sequence[Constant]) -> Quantized | None:
    """The float32 matrix that DequantizeLinear, or Cast and then Mul, makes of constant bytes; None for other nodes."""
    kind = site.node.op_type if site.domain == "" and len(site.outputs) == 1 else ""
    if any(constant.quantized is None and not isinstance(constant.value, np.ndarray) for constant in constants):
        return None
    if kind == "Mul" and len(constants) == 2:
        for bytes_, scale in (constants, constants[::-1]):
            plain = bytes_.quantized is not None and bytes_.quantized.scale is None and bytes_.quantized.zero is None
            if bytes_.quantized is not None and plain and scale.quantized is None:
                return _scaled(bytes_.quantized.matrix, scale.value)
        return None
    if kind not in ("Cast", "DequantizeLinear") or any(constant.quantized for constant in constants):
        return None
    values: list[Any] = [constant.value for constant in constants]
    matrix, scale, zero = (*values, None, None)[:3]
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype not in (np.int8, np.uint8):
        return None
    if kind == "Cast":
        return Quantized(matrix) if site.attributes.get("to") == TensorProto.FLOAT else None
    axis, fits = site.attributes.get("axis", 1), zero is None or zero.shape == scale.shape
    if site.attributes.get("block_size") or site.attributes.get("output_dtype", 0) not in (0, TensorProto.FLOAT):
        return None
    if scale.ndim > 1 or not -2 <= axis < 2 or not fits:
        return None
    shape = (1, -1) if axis % 2 else (-1, 1)
    return _scaled(matrix, scale.reshape(shape), None if zero is None else zero.reshape(shape))


def _scaled(matrix: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> Quantized | None:
    """The matrix where its scale is float32 and one number, one a column or one a row."""
    (rows, columns), shape = matrix.shape, (1,) * (2 - scale.ndim) + scale.shape
    fits = scale.dtype == np.float32 and shape in ((1, 1), (1, columns), (rows, 1))
    return Quantized(matrix, scale.reshape(shape), zero) if fits else None


def widens(site: Site, constants: Sequence[Constant]) -> bool:
    """Whether a node's result is a float weight of at most WIDENED times the bytes that it is stored in."""
    kind = site.node.op_type if site.domain == "" else ""
    arrays = [constant.value for constant in constants]
    if kind not in (*_WIDENING, *_MOVING) or {isinstance(array, np.ndarray) for array in arrays} != {True}:
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
