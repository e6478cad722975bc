"""The one map between ONNX types, NumPy and MLX, and the conversions, which never narrow a value.

On a CPU every type that MLX has is an mx.array, float64 included. On a GPU MLX has no float64: such values stay NumPy.
int4, uint4, int2, uint2, float8, float4, strings and complex128 have no MLX type anywhere: they stay NumPy, with
ml_dtypes' types (`str` objects in object arrays for strings).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from lut4tool.kernels.transfer import copied
from lut4tool.runtime.backend import mx


@dataclass(frozen=True)
class Type:
    """An ONNX element type: its number, its name in "tensor(name)", its NumPy type and its MLX type, if any."""

    number: int
    name: str
    numpy: np.dtype
    mlx: mx.Dtype | None


def _types() -> tuple[Type, ...]:
    rows: list[tuple[str, str, Any, mx.Dtype | None]] = [
        ("FLOAT", "float", np.float32, mx.float32),
        ("DOUBLE", "double", np.float64, mx.float64),
        ("FLOAT16", "float16", np.float16, mx.float16),
        ("BFLOAT16", "bfloat16", ml_dtypes.bfloat16, mx.bfloat16),
        ("INT8", "int8", np.int8, mx.int8),
        ("INT16", "int16", np.int16, mx.int16),
        ("INT32", "int32", np.int32, mx.int32),
        ("INT64", "int64", np.int64, mx.int64),
        ("UINT8", "uint8", np.uint8, mx.uint8),
        ("UINT16", "uint16", np.uint16, mx.uint16),
        ("UINT32", "uint32", np.uint32, mx.uint32),
        ("UINT64", "uint64", np.uint64, mx.uint64),
        ("BOOL", "bool", np.bool_, mx.bool_),
        ("COMPLEX64", "complex64", np.complex64, mx.complex64),
        ("COMPLEX128", "complex128", np.complex128, None),
        ("STRING", "string", np.object_, None),
        ("INT4", "int4", ml_dtypes.int4, None),
        ("UINT4", "uint4", ml_dtypes.uint4, None),
        ("INT2", "int2", ml_dtypes.int2, None),
        ("UINT2", "uint2", ml_dtypes.uint2, None),
        ("FLOAT8E4M3FN", "float8e4m3fn", ml_dtypes.float8_e4m3fn, None),
        ("FLOAT8E4M3FNUZ", "float8e4m3fnuz", ml_dtypes.float8_e4m3fnuz, None),
        ("FLOAT8E5M2", "float8e5m2", ml_dtypes.float8_e5m2, None),
        ("FLOAT8E5M2FNUZ", "float8e5m2fnuz", ml_dtypes.float8_e5m2fnuz, None),
        ("FLOAT8E8M0", "float8e8m0", ml_dtypes.float8_e8m0fnu, None),
        ("FLOAT4E2M1", "float4e2m1", ml_dtypes.float4_e2m1fn, None),
    ]
    return tuple(Type(TensorProto.DataType.Value(key), name, np.dtype(numpy), mlx) for key, name, numpy, mlx in rows)


TYPES: tuple[Type, ...] = _types()
BY_NUMBER: Mapping[int, Type] = {row.number: row for row in TYPES}
BY_NUMPY: Mapping[np.dtype, Type] = {row.numpy: row for row in TYPES}
BY_MLX: Mapping[mx.Dtype, Type] = {row.mlx: row for row in TYPES if row.mlx is not None}

MLX_OF: Mapping[np.dtype, mx.Dtype] = {row.numpy: row.mlx for row in TYPES if row.mlx is not None}
#: The kind of device whose values are NumPy arrays.
HOST: Any = mx.cpu

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(number: int) -> np.dtype:
    """NumPy type of an onnx.TensorProto.DataType number."""
    return BY_NUMBER[number].numpy


def mlx_dtype(number: int) -> mx.Dtype | None:
    """MLX type of an onnx.TensorProto.DataType number, None where MLX has none."""
    return BY_NUMBER[number].mlx


def type_of(value: Any) -> Type | None:
    """The ONNX element type of an mx.array or a NumPy array, None for any other."""
    if isinstance(value, mx.array):
        return BY_MLX.get(value.dtype)
    if isinstance(value, np.ndarray):
        return BY_NUMPY.get(np.dtype(np.object_) if value.dtype.kind in "UST" else value.dtype)
    return None


def on_host() -> bool:
    """Whether the current device's values are NumPy arrays: on a CPU."""
    # MLX's CPU loops are scalar: 3 to 25 times slower than NumPy's for exp, strided sums, depthwise and 1x1
    # convolutions, measured; a call costs 4 us where NumPy's costs 0.4, and a way back from NumPy copies.
    return mx.default_device().type == HOST


def to_device(value: Any) -> Any:
    """A NumPy or MLX array where the current device has its values: as to_mx on a GPU, as to_numpy on a CPU."""
    return to_numpy(value) if on_host() else to_mx(value)


def to_mx(value: Any) -> Any:
    """An mx.array of a NumPy array's own type on the current device; a value without an MLX type stays as it is."""
    if not isinstance(value, np.ndarray):
        return value
    mlx = MLX_OF.get(value.dtype)
    if mlx is None or (mlx is mx.float64 and mx.default_device().type == mx.gpu):
        return value
    return mx.array(value, dtype=mlx)


def load(value: Any) -> Any:
    """A weight as to_device gives it: on a CPU the view of its file, if it is aligned; elsewhere a copy, evaluated.

    A large one is copied in pieces, and its file's map leaves the memory.
    """
    if on_host():
        return np.require(value, requirements="A") if isinstance(value, np.ndarray) else value
    if (
        isinstance(value, np.ndarray)
        and value.flags.c_contiguous
        and isinstance(to_mx(value.reshape(-1)[:0]), mx.array)
    ):
        return copied(value, MLX_OF[value.dtype])
    copy = to_mx(value)
    mx.eval(*([copy] if isinstance(copy, mx.array) else []))
    return copy


def to_numpy(value: Any) -> Any:
    """A NumPy array of an mx.array's own type (a view on a CPU: free; it waits for the value); others as they are."""
    if not isinstance(value, mx.array):
        return np.asarray(value) if isinstance(value, np.generic) else value
    if not value.size:  # MLX on CUDA may have no memory to view
        return np.empty(value.shape, BY_MLX[value.dtype].numpy)
    if value.dtype == mx.bfloat16:
        return np.array(value.view(mx.uint16), copy=False).view(_BFLOAT16)
    return np.array(value, copy=False)
