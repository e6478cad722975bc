"""What a lookup's constants become where they do not lie as Lookup4MatMul wants them: exact, units from units."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import helper

from lut4tool.formats import CODEBOOKS, DTYPE_NAME, FLOAT_DTYPES, FormatError

#: Codes of a codebook of 16 that Gather takes: negative ones count from its end.
_LEAST, _MOST = -16, 15


def cast_in_turn(array: np.ndarray, *types: int) -> np.ndarray:
    """Flat elements after Casts to these types of TensorProto."""
    for kind in types:
        array = array.astype(helper.tensor_dtype_to_np_dtype(kind))
    return array.reshape(-1)


def first_scales(scales: np.ndarray, count: int, *types: int) -> np.ndarray:
    """The first scales, cast."""
    return cast_in_turn(scales.reshape(-1)[:count], *types)


def scales_of_columns(scales: np.ndarray, blocks: int, *types: int) -> np.ndarray:
    """Scales [blocks, columns], in the order of the columns."""
    return cast_in_turn(scales.reshape(blocks, -1).T, *types)


def packed_codes(codes: np.ndarray, *types: int) -> np.ndarray:
    """Codes of one element each, cast, flat: two a byte, the first in the high nibble, a last odd one beside a 0."""
    flat = _nibbles(cast_in_turn(codes, *types))
    flat = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return flat[0::2] << 4 | flat[1::2]


def packed_columns(codes: np.ndarray, depth: int, *types: int) -> np.ndarray:
    """Codes [depth, columns] of one element each, cast: the columns one after the other, two codes a byte."""
    return packed_codes(codes.reshape(depth, -1).T, *types)


def repacked_columns(packed: np.ndarray, depth: int, high_first: bool) -> np.ndarray:
    """Codes [depth, columns], flat and two a byte: the columns one after the other, the first in the high nibble."""
    pair = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return packed_columns(np.stack(pair, axis=-1), depth)


def double_quantized(
    codes: np.ndarray, table: np.ndarray, scales: np.ndarray, offset: np.ndarray, group: int, count: int
) -> np.ndarray:
    """The scales that table[codes] * scales[i // group] + offset gives, float32, rounded at each step as it does."""
    flat = codes.reshape(-1)
    values = table[flat] * np.repeat(scales.reshape(-1), group)[: flat.size]
    return (values + offset.reshape(-1))[:count]


def doubly_scaled(codes: np.ndarray, table: np.ndarray, scales: np.ndarray, group: int, count: int) -> np.ndarray:
    """The scales that table[codes] * scales[i // group] gives, float32."""
    flat = codes.reshape(-1)
    return (table[flat] * np.repeat(scales.reshape(-1), group)[: flat.size])[:count]


def one_scale(data_type: int) -> np.ndarray:
    """The scale of a weight that has none."""
    return np.ones(1, FLOAT_DTYPES[DTYPE_NAME[data_type]])


def codebook(name: str) -> np.ndarray:
    """The entries of a table that formats.py knows by name."""
    return CODEBOOKS[name]


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes as uint8 from 0 to 15. Raises FormatError for one that has no entry."""
    if codes.dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        codes = codes.astype(np.int8)
    if codes.size and (codes.min() < _LEAST or codes.max() > _MOST):
        worst = codes.min() if codes.min() < _LEAST else codes.max()
        raise FormatError(f"code {worst} has no entry in a codebook of 16")
    return (codes & 15).astype(np.uint8)
