"""Normalizations, Dropout, and the small operators of onnx/defs/nn; halves are summed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lut4tool.runtime.dtypes import numpy_dtype, to_device, to_numpy
from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.compute import finish, finish_as, numpy_type, working
from lut4tool.runtime.registry import op


def _channel(value: Any, rank: int) -> Any:
    """A vector [C] shaped to multiply x [N, C, ...] of `rank`."""
    return value.reshape(-1, *[1] * (rank - 2))


def standard(xp: Any, x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """Return (x - mean) / sqrt(variance + epsilon) over axes, the mean and the inverse deviation."""
    mean = xp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    inverse = 1 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + epsilon)
    centred *= inverse
    return centred, mean, inverse


@op("BatchNormalization", since=14)
def batch_normalization(
    x: Any, scale: Any, b: Any, input_mean: Any, input_var: Any, *, epsilon: float = 1e-5, momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:  # fmt: skip
    """Training returns the running mean and variance too, of the whole population; MLX has it as a layer only."""
    xp, data, s, bias, mean, var = working(x, scale, b, input_mean, input_var)
    if not training_mode:
        factor = s / xp.sqrt(var + epsilon)
        y = data * _channel(factor, x.ndim)
        y += _channel(bias - mean * factor, x.ndim)
        return finish(y, x)
    y, now_mean, now_var = _batch(xp, data, s, bias, epsilon)
    running_mean, running_var = mean * momentum + now_mean * (1 - momentum), var * momentum + now_var * (1 - momentum)
    return finish(y, x), finish(running_mean, input_mean), finish(running_var, input_var)


@op("BatchNormalization", since=7, until=13)
def batch_normalization_before_14(
    x: Any, scale: Any, b: Any, mean: Any, var: Any, *, epsilon: float = 1e-5, momentum: float = 0.9, spatial: int = 1,
    outputs: int = 1,
) -> Any:  # fmt: skip
    """More outputs mean training, the batch's own statistics last; spatial 0 (version 7) has one an element."""
    if outputs == 1 and spatial:
        return batch_normalization(x, scale, b, mean, var, epsilon=epsilon, momentum=momentum)
    xp, data, s, bias, old_mean, old_var = working(x, scale, b, mean, var)
    if outputs == 1:
        return finish((data - old_mean) * (s / xp.sqrt(old_var + epsilon)) + bias, x)
    y, now_mean, now_var = _batch(xp, data, s, bias, epsilon)
    running = old_mean * momentum + now_mean * (1 - momentum), old_var * momentum + now_var * (1 - momentum)
    return tuple(finish(value, x) for value in (y, *running, now_mean, now_var))


def _batch(xp: Any, x: Any, scale: Any, bias: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """Normalize by the batch's own statistics: the result, and the mean and variance [C]."""
    axes = (0, *range(2, x.ndim))
    y, mean, _ = standard(xp, x, axes, epsilon)
    return y * _channel(scale, x.ndim) + _channel(bias, x.ndim), mean.reshape(-1), xp.var(x, axis=axes)


@op("InstanceNormalization", since=6)
def instance_normalization(x: Any, scale: Any, b: Any, *, epsilon: float = 1e-5) -> Any:
    """Each channel of each sample by its own statistics."""
    xp, data, s, bias = working(x, scale, b)
    y, _, _ = standard(xp, data, tuple(range(2, x.ndim)), epsilon)
    return finish(y * _channel(s, x.ndim) + _channel(bias, x.ndim), x)


@op("LayerNormalization", prepare=prepared.layer_normalization)
def layer_normalization(
    x: Any, scale: Any, b: Any = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    """Over all axes from `axis` on; Mean and InvStdDev come out in stash_type."""
    xp, data, s, bias = working(x, scale, b)
    y, mean, inverse = standard(xp, data, tuple(range(axis % x.ndim, x.ndim)), epsilon)
    y = y * s if bias is None else y * s + bias
    stash = numpy_dtype(stash_type)
    return finish(y, x), finish_as(mean, stash), finish_as(inverse, stash)


@op("RMSNormalization")
def rms_normalization(x: Any, scale: Any, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Any:
    """Over all axes from `axis` on, where mx.fast.rms_norm takes the last; the result has the scale's type."""
    xp, data, s = working(x, scale)
    squares = xp.mean(data * data, axis=tuple(range(axis % x.ndim, x.ndim)), keepdims=True)
    return finish(data / xp.sqrt(squares + epsilon) * s, scale)


@op("GroupNormalization", since=18)
def group_normalization(
    x: Any, scale: Any, bias: Any, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Any:
    """Scale and bias are [C] from version 21 on and [num_groups] in 18: told apart by their size."""
    xp, data, s, b = working(x, scale, bias)
    groups = data.reshape(x.shape[0], num_groups, -1)
    y, _, _ = standard(xp, groups, (2,), epsilon)
    if scale.shape[0] == num_groups != x.shape[1]:
        s, b = (xp.repeat(value, x.shape[1] // num_groups) for value in (s, b))
    return finish(y.reshape(x.shape) * _channel(s, x.ndim) + _channel(b, x.ndim), x)


@op("LRN")
def lrn(x: Any, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int) -> Any:
    """Squares summed over `size` channels around each, the odd one after; alpha is divided by size."""
    xp, data = working(x)
    before = (size - 1) // 2
    squares = xp.pad(data * data, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
    total = sum(squares[:, at : at + x.shape[1]] for at in range(size))
    return finish(data / (bias + alpha / size * total) ** beta, x)


@op("LpNormalization")
def lp_normalization(x: Any, *, axis: int = -1, p: int = 2) -> Any:
    """Divide by the 1- or 2-norm along an axis; where that is 0 the result is 0."""
    xp, data = working(x)
    norm = (
        xp.sum(abs(data), axis=axis, keepdims=True)
        if p == 1
        else xp.sqrt(xp.sum(data * data, axis=axis, keepdims=True))
    )
    return finish(xp.where(norm == 0, 0 * norm, data / xp.where(norm == 0, 1 + norm, norm)), x)


@op("MeanVarianceNormalization")
def mean_variance_normalization(x: Any, *, axes: Sequence[int] = (0, 2, 3)) -> Any:
    """(x - mean) / (deviation + 1e-9): the standard adds its epsilon outside the root."""
    xp, data = working(x)
    centred = data - xp.mean(data, axis=tuple(axes), keepdims=True)
    return finish(centred / (xp.sqrt(xp.mean(centred * centred, axis=tuple(axes), keepdims=True)) + 1e-9), x)


@op("Dropout", since=12, host=(1, 2))
def dropout(data: Any, ratio: Any = None, training_mode: Any = None, *, seed: int | None = None) -> Any:
    """Identity with a mask of true unless training; there NumPy's generator makes a seeded mask the same everywhere."""
    rate = 0.5 if ratio is None else float(ratio)
    if training_mode is None or not bool(training_mode) or rate == 0:
        return data, to_device(np.ones(data.shape, np.bool_))
    mask = np.random.RandomState(seed).uniform(0, 1, data.shape) >= rate
    return finish(to_numpy(data) * mask / np.asarray(1 - rate, np.float32), data), to_device(mask)


@op("Dropout", since=10, until=11)
def dropout_inference(data: Any, *, ratio: float = 0.5) -> Any:
    """Identity, and a mask of true."""
    return data, to_device(np.ones(data.shape, np.bool_))


@op("Dropout", since=7, until=9)
def dropout_inference_before_10(data: Any, *, ratio: float = 0.5) -> Any:
    """Identity, and a mask of ones in the data's own type."""
    return data, to_device(np.ones(data.shape, numpy_type(data)))


@op("Flatten")
def flatten(xp: Any, x: Any, *, axis: int = 1) -> Any:
    """To [axes before `axis`, the others]; 0 gives one row, where MLX's flatten merges a range of axes."""
    axis = axis + x.ndim if axis < 0 else axis
    return xp.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))


@op("Shrink")
def shrink(x: Any, *, bias: float = 0.0, lambd: float = 0.5) -> Any:
    """Adds bias under -lambd, takes it off over lambd, 0 between; integers stay integers."""
    xp, data = working(x)
    return finish(xp.where(data < -lambd, data + bias, xp.where(data > lambd, data - bias, 0 * data)), x)
