"""Resize and Upsample: each resized axis is a gather of a few taps with their weights, one axis after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np

from lut4tool.runtime.ops.compute import finish, numpy_type, working
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.ops.window import Ints
from lut4tool.runtime.registry import op


@dataclass(frozen=True)
class Axis:
    """One resized axis: its length, the scale as the model gives it, the new length, and the roi's start and end."""

    length: int
    scale: float
    out: int
    start: float = 0.0
    end: float = 1.0


def _coordinates(axis: Axis, mode: str) -> np.ndarray:
    """Where each output element lies on the input, float64 [out]."""
    at = np.arange(axis.out, dtype=np.float64)
    last = axis.length - 1
    if mode == "align_corners":
        return at * last / (axis.out - 1) if axis.out > 1 else at * 0
    if mode == "asymmetric":
        return at / axis.scale
    if mode == "tf_crop_and_resize":
        span = (axis.end - axis.start) * last
        return axis.start * last + (at * span / (axis.out - 1) if axis.out > 1 else at + span / 2)
    if mode == "tf_half_pixel_for_nn":
        return (at + 0.5) / axis.scale
    if mode == "pytorch_half_pixel" and axis.out == 1:
        return at * 0
    half = (at + 0.5) / axis.scale - 0.5
    if mode == "half_pixel_symmetric":
        return half + axis.length / 2 * (1 - axis.out / (axis.scale * axis.length))
    if mode not in ("half_pixel", "pytorch_half_pixel"):
        raise ValueError(f"coordinate_transformation_mode '{mode}' is not ONNX's")
    return half


def _nearest(x: np.ndarray, mode: str) -> np.ndarray:
    if mode == "round_prefer_floor":
        return np.ceil(x - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(x + 0.5)
    return np.floor(x) if mode == "floor" else np.ceil(x)


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - abs(distance), 0)


def cubic(xp: Any, distance: Any, a: float) -> Any:
    """Weight of a pixel at a signed distance: Keys' cubic convolution with coefficient a."""
    x = abs(distance)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return xp.where(x <= 1, near, xp.where(x < 2, far, 0 * x))


def _taps(
    x: np.ndarray, axis: Axis, mode: str, a: float, antialias: bool, exclude: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights [out, taps] of linear or cubic interpolation at x; the kernel widens to antialias."""
    radius, shrink = 1 if mode == "linear" else 2, min(axis.scale, 1.0) if antialias else 1.0
    first = floor(-radius / shrink) + 1
    index = np.floor(x)[:, None] + np.arange(first, 2 - first)
    distance = (index - x[:, None]) * shrink
    weights = _triangle(distance) if mode == "linear" else cubic(np, distance, a)
    if exclude:
        weights = np.where((index < 0) | (index >= axis.length), 0, weights)
    if exclude or antialias:
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(index, 0, axis.length - 1).astype(np.int32), weights


def _gather(xp: Any, x: Any, axis: int, index: np.ndarray, weights: np.ndarray | None) -> Any:
    """Replace one axis by the weighted sum of taps index [out, taps], or by index [out] alone."""
    if weights is None:
        return xp.take(x, xp.array(index), axis=axis)
    shape = [-1 if place == axis else 1 for place in range(x.ndim)]
    dtype = np.float64 if numpy_type(x) == np.float64 else np.float32
    parts = [
        xp.take(x, xp.array(np.ascontiguousarray(index[:, k])), axis=axis)
        * xp.array(weights[:, k].reshape(shape).astype(dtype))
        for k in range(index.shape[1])
    ]
    return sum(parts[1:], parts[0])


def interpolate(
    x: Any, axes: dict[int, Axis], *, mode: str, coordinates: str, nearest_mode: str, a: float, antialias: bool = False,
    exclude: bool = False, extrapolation: float = 0.0,
) -> Any:  # fmt: skip
    """Resize the given axes of x; integers are interpolated in float32 and truncated, as onnxruntime does."""
    xp, y = working(x)
    if mode != "nearest" and numpy_type(y).kind in "iu":
        y = y.astype(xp.float32)
    outside = []
    for place, axis in axes.items():
        where = _coordinates(axis, coordinates)
        if np.isnan(where).any():
            raise ValueError(f"scale {axis.scale} and a region from {axis.start} to {axis.end} give no coordinates")
        if coordinates == "tf_crop_and_resize":
            beyond = (where < 0) | (where > axis.length - 1)
            outside.append(beyond.reshape([-1 if at == place else 1 for at in range(x.ndim)]))
        if axis.out == axis.length and axis.scale == 1 and coordinates != "tf_crop_and_resize":
            continue
        if mode == "nearest":
            index = np.clip(_nearest(where, nearest_mode), 0, axis.length - 1).astype(np.int32)
            y = _gather(xp, y, place, index, None)
        else:
            y = _gather(xp, y, place, *_taps(where, axis, mode, a, antialias, exclude))
    for beyond in outside:
        y = xp.where(xp.array(beyond), xp.array(np.asarray(extrapolation, numpy_type(y))), y)
    return finish(y, x)


def _axes(
    x: Any, places: Sequence[int], roi: Any, scales: Any, sizes: Any, policy: str, crops: bool
) -> dict[int, Axis]:
    """What happens to each axis in `places`, from scales or from sizes; axes that keep their size included."""
    lengths = [x.shape[place] for place in places]
    starts, ends = [0.0] * len(places), [1.0] * len(places)
    if crops and roi is not None and roi.size:
        starts, ends = roi[: len(places)].tolist(), roi[len(places) :].tolist()
    if sizes is not None and sizes.size:
        outs = [int(size) for size in sizes]
        factors = [out / length for out, length in zip(outs, lengths, strict=True)]
        if policy != "stretch":
            factors = [min(factors) if policy == "not_larger" else max(factors)] * len(places)
            outs = [floor(factor * length + 0.5) for factor, length in zip(factors, lengths, strict=True)]
    else:
        factors = [float(scale) for scale in scales]
        spans = [end - start if crops else 1.0 for start, end in zip(starts, ends, strict=True)]
        outs = [floor(np.float32(n * span) * np.float32(f)) for n, span, f in zip(lengths, spans, factors, strict=True)]
    sizes_of = dict(zip([place % x.ndim for place in places], outs, strict=True))
    check_size([sizes_of.get(place, size) for place, size in enumerate(x.shape)], 4)
    rows = zip(lengths, factors, outs, starts, ends, strict=True)
    return {place % x.ndim: Axis(*row) for place, row in zip(places, rows, strict=True)}


@op("Resize", since=11, host=(1, 2, 3))
def resize(
    x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, *, antialias: int = 0, axes: Ints = None,
    coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75, exclude_outside: int = 0,
    extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Any:  # fmt: skip
    """N-D, by scales or sizes, whole or only `axes`; MLX's upsampling is a layer for whole factors."""
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    plan = _axes(x, axes or range(x.ndim), roi, scales, sizes, keep_aspect_ratio_policy, crops)
    return interpolate(
        x, plan, mode=mode, coordinates=coordinate_transformation_mode, nearest_mode=nearest_mode, a=cubic_coeff_a,
        antialias=bool(antialias), exclude=bool(exclude_outside), extrapolation=extrapolation_value,
    )  # fmt: skip


@op("Resize", until=10, host=(1,))
@op("Upsample", since=9, host=(1,))
def upsample(x: Any, scales: Any, *, mode: str = "nearest") -> Any:
    """Coordinates are output index / scale, nearest takes the floor."""
    plan = _axes(x, range(x.ndim), None, scales, None, "stretch", False)
    mode = "linear" if mode == "bilinear" else mode
    return interpolate(x, plan, mode=mode, coordinates="asymmetric", nearest_mode="floor", a=-0.75)


@op("Upsample", since=7, until=8)
def upsample_attribute(x: Any, *, mode: str = "nearest", scales: Sequence[float]) -> Any:
    """The same with the scales as an attribute."""
    return upsample(x, np.asarray(scales, np.float32), mode=mode)
