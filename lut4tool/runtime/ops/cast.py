"""Conversions between element types (onnx/defs/tensor: Cast, CastLike, BitCast)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lut4tool.runtime import dtypes
from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import BY_MLX, BY_NUMBER, MLX_OF, Type, to_device, to_numpy, type_of
from lut4tool.runtime.ops import codes, compute, prepared
from lut4tool.runtime.registry import op

_FLOAT8 = tuple(np.dtype(getattr(ml_dtypes, f"float8_{name}")) for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def _text(value: Any) -> str:
    text = str(value)
    return {"nan": "NaN", "inf": "INF", "-inf": "-INF"}.get(text, text)


def _from_text(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        values: list[Any] = [int(text) if text.lstrip("+-").isdigit() else int(float(text)) for text in x.reshape(-1)]
    else:
        values = [float(text) for text in x.reshape(-1)]
    return np.array(values).astype(dtype).reshape(x.shape)


def _to_e8m0(x: np.ndarray, saturate: int, round_mode: str) -> np.ndarray:
    """A power of two by its float32 exponent, rounded up, down or to nearest; NaN and Inf give NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    exponent, fraction = (bits >> 23 & 0xFF).astype(np.int32), bits & 0x7FFFFF
    half = 0x400000
    ups = {
        "up": fraction > 0,
        "down": np.zeros(x.shape, bool),
        "nearest": (fraction > half) | (fraction == half) & (exponent > 0),
    }
    rounded = exponent + ups[round_mode]
    if saturate:
        rounded = np.minimum(rounded, 0xFE)
    return np.where(exponent == 0xFF, 0xFF, rounded).astype(np.uint8).view(_E8M0)


def convert(x: np.ndarray, dtype: np.dtype, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    """Cast a host array by ONNX's rules: strings, float8 that saturates (Inf too) or not, float8e8m0."""
    with np.errstate(all="ignore"):
        if dtype.kind == "O":
            return np.array([_text(value) for value in x.reshape(-1)], object).reshape(x.shape)
        if x.dtype.kind in "OUST":
            return _from_text(x, dtype)
        if dtype == _E8M0:
            return _to_e8m0(x, saturate, round_mode)
        if dtype in _FLOAT8:
            wide = x if x.dtype == np.float64 else x.astype(np.float32)
            largest = float(ml_dtypes.finfo(dtype).max)
            return (np.clip(wide, -largest, largest) if saturate else wide).astype(dtype)
        return x.astype(dtype)


def _by_codes(x: Any, target: Type) -> bool:
    """Whether MLX converts a type that it lacks: strings and float64 it does not, and float8e8m0 has its own rule."""
    source = x.dtype if isinstance(x, np.ndarray) else BY_MLX[x.dtype].numpy
    if np.float64 in (source, target.numpy) or target.numpy == codes.E8M0:
        return False
    to_codes = codes.known(target.numpy)
    if codes.known(source):
        return to_codes or target.mlx is not None
    return to_codes and isinstance(x, mx.array)


def _cast(xp: Any, x: Any, target: Type, saturate: int, round_mode: str) -> Any:
    if xp is mx and target.mlx is not None and not (target.mlx == mx.float64 and mx.default_device().type == mx.gpu):
        return x.astype(target.mlx)
    if not dtypes.on_host() and _by_codes(x, target):
        values = codes.decode(x) if isinstance(x, np.ndarray) else x
        return compute.finish_as(values, target.numpy) if saturate else codes.encode(values, target.numpy, saturate)
    host = to_numpy(x)
    result = convert(host, target.numpy, saturate, round_mode)
    return result if host.dtype in MLX_OF else to_device(result)  # only what was a host value by choice stays one


@op("Cast", since=6, until=18, codes=True, prepare=prepared.cast)
def cast_saturating(xp: Any, x: Any, *, to: int) -> Any:
    """Before float8: one rule a pair of types, strings included; a host value stays on the host."""
    return _cast(xp, x, BY_NUMBER[to], 1, "up")


@op("Cast", since=19, until=23, codes=True, prepare=prepared.cast)
def cast_saturate(xp: Any, x: Any, *, to: int, saturate: int = 1) -> Any:
    """A float8 saturates, or becomes NaN or Inf."""
    return _cast(xp, x, BY_NUMBER[to], saturate, "up")


@op("Cast", since=24, codes=True, prepare=prepared.cast)
def cast(xp: Any, x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    """To float8e8m0 there is a rounding mode; MLX has no float8, int4, int2 or string: those are made on the host."""
    return _cast(xp, x, BY_NUMBER[to], saturate, round_mode)


def _like(target: Any) -> Type:
    found = type_of(target)
    if found is None:
        raise TypeError(f"CastLike to {getattr(target, 'dtype', type(target).__name__)}, which is not an ONNX type")
    return found


@op("CastLike", until=18, codes=True)
def cast_like_saturating(xp: Any, x: Any, target_type: Any) -> Any:
    """Cast to the type of another value."""
    return _cast(xp, x, _like(target_type), 1, "up")


@op("CastLike", since=19, until=23, codes=True)
def cast_like_saturate(xp: Any, x: Any, target_type: Any, *, saturate: int = 1) -> Any:
    """Cast to the type of another value."""
    return _cast(xp, x, _like(target_type), saturate, "up")


@op("CastLike", since=24, codes=True)
def cast_like(xp: Any, x: Any, target_type: Any, *, saturate: int = 1, round_mode: str = "up") -> Any:
    """Cast to the type of another value."""
    return _cast(xp, x, _like(target_type), saturate, round_mode)


@op("BitCast")
def bit_cast(xp: Any, x: Any, *, to: int) -> Any:
    """The same bits read as another type of the same width."""
    target = BY_NUMBER[to]
    if xp is mx and target.mlx is not None and target.mlx != mx.float64 and target.mlx.size == x.dtype.size:
        return x.view(target.mlx)
    return to_device(to_numpy(x).view(target.numpy))
