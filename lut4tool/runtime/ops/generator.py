"""Tensors made from nothing but a shape, bounds or a seed (onnx/defs/generator)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import BY_NUMBER, Type, to_device, to_mx, type_of
from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.registry import op

#: A result of at most this many integers stays on the host, where it serves shape arithmetic.
_SMALL = 64


def _placed(value: np.ndarray) -> Any:
    return value if value.size <= _SMALL and value.dtype.kind in "iub" else to_device(value)


@op("ConstantOfShape", host=(0,), prepare=prepared.constant_of_shape)
def constant_of_shape(shape: Any, *, value: np.ndarray | None = None) -> Any:
    """Filled with the one element of `value`, float32 0 by default."""
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)
    check_size(shape.tolist(), fill.dtype.itemsize)
    return _placed(np.full(shape.tolist(), fill[0], dtype=fill.dtype))


def _range(start: Any, limit: Any, delta: Any, wide: Any) -> Any:
    first, last, step = (value.reshape(())[()] for value in (start, limit, delta))
    if start.dtype.kind == "i":
        count = max(0, -((int(first) - int(last)) // int(step)))
    else:
        count = max(0, ceil((wide(last) - wide(first)) / wide(step)))
    check_size([count], start.dtype.itemsize)
    return _placed((wide(first) + np.arange(count).astype(wide) * wide(step)).astype(start.dtype))


@op("Range", until=26, host=(0, 1, 2), prepare=prepared.sequence)
def sequence(start: Any, limit: Any, delta: Any) -> Any:
    """Return start + i * delta, in the type of start."""
    return _range(start, limit, delta, start.dtype.type)


@op("Range", since=27, host=(0, 1, 2), prepare=prepared.sequence)
def sequence_stashed(start: Any, limit: Any, delta: Any, *, stash_type: int = 1) -> Any:
    """Halves are computed in float32 unless stash_type says otherwise."""
    half = start.dtype.itemsize == 2 and start.dtype.kind != "i"
    return _range(start, limit, delta, BY_NUMBER[stash_type].numpy.type if half else start.dtype.type)


@op("EyeLike", on_host=True)
def eye_like(x: Any, *, dtype: int | None = None, k: int = 0) -> Any:
    """Ones on diagonal k, of the shape of x and by default of its type."""
    target = _target(dtype, x)
    return to_device(np.eye(x.shape[0], x.shape[1], k=k).astype(target.numpy))


def _target(dtype: int | None, like: Any) -> Type:
    if dtype is not None:
        return BY_NUMBER[dtype]
    found = type_of(like)
    if found is None:
        raise TypeError(f"{like.dtype} is not an ONNX type")
    return found


def _key(seed: float | None) -> Any:
    """A key from the bits of a float seed; None lets MLX go on from its own state."""
    return None if seed is None else mx.random.key(struct.unpack("<I", struct.pack("<f", seed))[0])


def _typed(values: Any, target: Type) -> Any:
    if target.mlx is None or (target.mlx == mx.float64 and mx.default_device().type == mx.gpu):
        return np.array(values).astype(target.numpy)
    return to_device(values.astype(target.mlx))


@op("RandomNormal")
def random_normal(
    *, shape: Sequence[int], dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Any:
    """MLX's own sequence: ONNX does not say which."""
    check_size(shape, 4)
    return _typed(mx.random.normal(shape, loc=mean, scale=scale, key=_key(seed)), BY_NUMBER[dtype])


@op("RandomUniform")
def random_uniform(
    *, shape: Sequence[int], dtype: int = 1, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Any:
    """MLX's own sequence: ONNX does not say which."""
    check_size(shape, 4)
    return _typed(mx.random.uniform(low, high, shape, key=_key(seed)), BY_NUMBER[dtype])


@op("RandomNormalLike")
def random_normal_like(
    x: Any, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Any:
    """The shape, and by default the type, of x."""
    return _typed(mx.random.normal(x.shape, loc=mean, scale=scale, key=_key(seed)), _target(dtype, x))


@op("RandomUniformLike")
def random_uniform_like(
    x: Any, *, dtype: int | None = None, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Any:
    """The shape, and by default the type, of x."""
    return _typed(mx.random.uniform(low, high, x.shape, key=_key(seed)), _target(dtype, x))


@op("Bernoulli")
def bernoulli(x: Any, *, dtype: int | None = None, seed: float | None = None) -> Any:
    """1 with the probability given, in x's type by default."""
    return _typed(mx.random.uniform(shape=x.shape, key=_key(seed)) < to_mx(x), _target(dtype, x))


@op("Multinomial", since=7)
def multinomial(x: Any, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Any:
    """[batch, sample_size] classes drawn by unnormalised log probabilities."""
    return _typed(mx.random.categorical(to_mx(x), num_samples=sample_size, key=_key(seed)), BY_NUMBER[dtype])
