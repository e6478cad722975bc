"""Elementwise arithmetic and activations (onnx/defs/math)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import pi, sqrt
from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.curves import curve
from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.compute import computed, is_float, on_device
from lut4tool.runtime.registry import op

# ONNX name -> (name that NumPy and MLX share, first version without the attribute consumed_inputs).
_EXACT: dict[str, tuple[str, int]] = {
    "Abs": ("abs", 6),
    "Ceil": ("ceil", 6),
    "Floor": ("floor", 6),
    "Neg": ("negative", 6),
    "Round": ("round", 11),
    "Sign": ("sign", 9),
}
_CURVES: dict[str, tuple[str, int]] = {
    "Acos": ("arccos", 7),
    "Acosh": ("arccosh", 9),
    "Asin": ("arcsin", 7),
    "Asinh": ("arcsinh", 9),
    "Atan": ("arctan", 7),
    "Atanh": ("arctanh", 9),
    "Cos": ("cos", 7),
    "Cosh": ("cosh", 9),
    "Exp": ("exp", 6),
    "Log": ("log", 6),
    "Sin": ("sin", 7),
    "Sinh": ("sinh", 9),
    "Sqrt": ("sqrt", 6),
    "Tan": ("tan", 7),
    "Tanh": ("tanh", 6),
}
_BINARY: dict[str, str] = {"Add": "add", "Sub": "subtract", "Mul": "multiply"}
_VARIADIC: dict[str, str] = {"Sum": "add", "Max": "maximum", "Min": "minimum"}


def _exact(function: str, xp: Any, x: Any) -> Any:
    return getattr(xp, function)(x)


def _curve(function: str, xp: Any, x: Any) -> Any:
    return on_device(xp, lambda xp, x: getattr(xp, function)(x), x)


def _binary(function: str, xp: Any, a: Any, b: Any) -> Any:
    return getattr(xp, function)(a, b)


def _variadic(function: str, xp: Any, *data: Any) -> Any:
    return reduce(getattr(xp, function), data)


for _name, (_function, _since) in _EXACT.items():
    op(_name, since=_since, prepare=prepared.function(np.rint if _name == "Round" else getattr(np, _function)))(
        partial(_exact, _function)
    )
for _name, (_function, _since) in _CURVES.items():
    op(_name, since=_since, prepare=prepared.float_function(getattr(np, _function)))(partial(_curve, _function))
for _name, _function in _BINARY.items():
    op(_name, since=7, prepare=prepared.function(getattr(np, _function)))(partial(_binary, _function))
for _name, _function in _VARIADIC.items():
    op(_name, since=6, prepare=prepared.function(getattr(np, _function)))(partial(_variadic, _function))


@op("Mean", since=6)
def mean(xp: Any, *data: Any) -> Any:
    """The mean of tensors broadcast together, in their own type."""
    return reduce(xp.add, data) / len(data)


@op("Reciprocal", since=6)
def reciprocal(xp: Any, x: Any) -> Any:
    """Return 1 / x; a host float8 or bfloat16 has no np.reciprocal."""
    return 1 / x


def divide(xp: Any, a: Any, b: Any) -> Any:
    """Return a / b in the operands' type; integers truncate toward zero, where MLX gives floats and `//` floors."""
    if is_float(a):
        return a / b
    if xp.issubdtype(a.dtype, xp.unsignedinteger):
        return a // b
    plain = xp.where(b == -1, xp.ones_like(b), b)  # the smallest integer divided by -1 stops the process
    quotient = a // plain
    inexact = (quotient * plain != a) & ((a < 0) != (plain < 0)) & (plain != 0)
    return xp.where(b == -1, xp.negative(a), quotient + inexact.astype(a.dtype))


op("Div", since=7, prepare=prepared.divide)(divide)


@op("Mod", since=10)
def mod(xp: Any, a: Any, b: Any, *, fmod: int = 0) -> Any:
    """The divisor's sign (fmod 0, Python's %) or the dividend's (fmod 1), which MLX has no function for."""
    if not fmod:
        rest = xp.remainder(a, b)
        if not is_float(a):
            return rest
        rest = xp.where(rest == 0, xp.where(b < 0, -xp.zeros_like(rest), xp.zeros_like(rest)), rest)
        return xp.where(xp.isinf(b) & ~xp.isinf(a), xp.where((a < 0) == (b < 0), a, xp.where(a == 0, rest, b)), rest)
    if xp.issubdtype(a.dtype, xp.unsignedinteger):
        return xp.remainder(a, b)
    rest = xp.remainder(xp.abs(a), xp.abs(b))
    return xp.where(a < 0, xp.negative(rest), rest)


@op("Pow", since=7, prepare=prepared.power)
def power(xp: Any, x: Any, y: Any) -> Any:
    """Return x ** y in x's type, any type of y since 12; a negative power of an integer truncates to 0, 1 or -1."""
    if is_float(x):
        y = y.astype(x.dtype)
        return _float_power(x, y) if xp is np else computed(lambda xp, x, y: x**y, x, y)
    if is_float(y):
        return xp.power(x.astype(y.dtype), y).astype(x.dtype)
    powers = xp.power(x, xp.maximum(y, 0).astype(x.dtype))
    if xp.issubdtype(y.dtype, xp.unsignedinteger):
        return powers
    ones = xp.where(y % 2 == 0, x * x, x)
    return xp.where(y < 0, xp.where(x * x == 1, ones, xp.zeros_like(x)), powers)


def _float_power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x ** y; a square, a cube and a root as products, which NumPy's general power is 50 times slower than."""
    exponent = y.item() if y.size == 1 and y.ndim <= x.ndim else 0.0
    if exponent == 2:
        return np.square(x)
    if exponent == 3:
        return x * x * x
    return np.asarray(x**y)


_LARGEST = 3.4028234663852886e38


@op("Clip", since=6, until=10)
def clip_attributes(xp: Any, x: Any, *, min: float = -_LARGEST, max: float = _LARGEST) -> Any:
    """Bounds are attributes before 11; by default they are float32's finite ones, which cut infinity too."""
    return clip(xp, x, xp.array(min, dtype=x.dtype), xp.array(max, dtype=x.dtype))


@op("Clip", since=11)
def clip(xp: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    """`max` wins where it is below `min`."""
    if min is None or max is None or xp is mx:
        x = x if min is None else xp.maximum(x, min)
        return x if max is None else xp.minimum(x, max)
    y = np.asarray(np.maximum(x, min))
    return np.minimum(y, max, out=y)


@op("Relu", since=6, prepare=prepared.relu)
def relu(xp: Any, x: Any) -> Any:
    """Return max(x, 0), for integers too since 14."""
    return xp.maximum(x, xp.zeros((), dtype=x.dtype))


@op("PRelu", since=7)
def prelu(xp: Any, x: Any, slope: Any) -> Any:
    """`slope` broadcasts to x from the right, integers too since 9."""
    return xp.where(x < 0, x * slope, x)


@op("Sigmoid", since=6, prepare=prepared.curve("sigmoid"))
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return computed(_sigmoid, x)


def _sigmoid(xp: Any, x: Any) -> Any:
    found = curve("sigmoid", x) if xp is np else None
    return 1 / (1 + xp.exp(-x)) if found is None else found


# -log(1 - erf(x)) / x on 0..4, in powers of x: a least-squares fit, 4e-9 off at most; beyond 4 float32's erf is 1.
_ERF = (
    1.128379205238522, 0.6366187545414632, 0.1027780714902541, -0.01913301678685868, -0.00024301272164948694,
    0.001811537903650398, -0.0007665504925702181, 0.00018657196839362575, -2.848554975553369e-05,
    2.5351787111705965e-06, -1.0052351786022468e-07,
)  # fmt: skip
_CHUNK = 1 << 15  # elements that stay in a core's cache from one pass to the next


def _erf(xp: Any, x: Any) -> Any:
    """The error function of floats; on a CPU within 2 units in the last place of float32, where mx.erf is 4e-4 off."""
    if xp is mx:
        return mx.erf(x)
    if x.dtype != np.float32:
        return np.vectorize(math.erf, otypes=[np.float64])(x)
    result = np.empty_like(x, order="C")
    flat, values = result.reshape(-1), x.reshape(-1)
    for start in range(0, x.size, _CHUNK):
        part = values[start : start + _CHUNK]
        size = np.minimum(np.abs(part), 4)
        power = np.full_like(size, _ERF[-1])
        for coefficient in _ERF[-2::-1]:
            power *= size
            power += coefficient
        power *= size
        np.copysign(np.expm1(np.negative(power, out=power), out=power), part, out=flat[start : start + _CHUNK])
    return result


@op("Erf", since=9, prepare=prepared.curve("erf"))
def erf(x: Any) -> Any:
    """The error function, for integers too, in x's type."""
    return computed(_erf, x)


@op("LeakyRelu", since=6)
def leaky_relu(xp: Any, x: Any, *, alpha: float = 0.01) -> Any:
    """Return alpha * x below zero."""
    if xp is np and x.dtype == np.float32 and 0 <= alpha <= 1:  # a third of the time
        y = np.asarray(x * np.float32(alpha))
        return np.maximum(x, y, out=y)
    return xp.where(x < 0, alpha * x, x)


@op("ThresholdedRelu")
def thresholded_relu(xp: Any, x: Any, *, alpha: float = 1.0) -> Any:
    """Return x above alpha, else 0."""
    return xp.where(x > alpha, x, xp.zeros_like(x))


@op("Elu", since=6)
def elu(x: Any, *, alpha: float = 1.0) -> Any:
    """Return alpha * (exp(x) - 1) below zero."""
    return computed(lambda xp, x: xp.where(x < 0, alpha * xp.expm1(x), x), x)


@op("Selu", since=6)
def selu(x: Any, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Any:
    """Elu times gamma, with ONNX's own constants."""
    return computed(lambda xp, x: gamma * xp.where(x <= 0, alpha * xp.expm1(x), x), x)


@op("Celu")
def celu(x: Any, *, alpha: float = 1.0) -> Any:
    """Return max(0, x) + min(0, alpha * (exp(x / alpha) - 1))."""
    return computed(lambda xp, x: xp.maximum(x, 0) + xp.minimum(alpha * xp.expm1(x / alpha), 0), x)


@op("HardSigmoid", since=6)
def hard_sigmoid(xp: Any, x: Any, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    """Return alpha * x + beta between 0 and 1."""
    return xp.clip(alpha * x + beta, 0, 1)


@op("HardSwish")
def hard_swish(xp: Any, x: Any) -> Any:
    """Return x times HardSigmoid with alpha 1/6."""
    return x * xp.clip(x / 6 + 0.5, 0, 1)


@op("Softplus")
def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)), without overflow."""
    return computed(lambda xp, x: xp.logaddexp(x, xp.zeros_like(x)), x)


@op("Softsign")
def softsign(xp: Any, x: Any) -> Any:
    """Return x / (1 + |x|)."""
    return x / (1 + xp.abs(x))


@op("Mish")
def mish(x: Any) -> Any:
    """Return x * tanh(softplus(x))."""
    return computed(lambda xp, x: x * xp.tanh(xp.logaddexp(x, xp.zeros_like(x))), x)


@op("Swish")
def swish(x: Any, *, alpha: float = 1.0) -> Any:
    """Return x * sigmoid(alpha * x)."""
    return computed(lambda xp, x: x / (1 + xp.exp(-alpha * x)), x)


@op("SwiGLU")
def swiglu(a: Any, b: Any, *, alpha: float = 1.0) -> Any:
    """Swish of the gate `a` times `b`."""
    return computed(lambda xp, a, b: a / (1 + xp.exp(-alpha * a)) * b, a, b)


@op("Gelu", prepare=prepared.gelu)
def gelu(x: Any, *, approximate: str = "none") -> Any:
    """Return x times the normal distribution function, exact or by tanh."""
    if approximate == "none":
        return computed(lambda xp, x: 0.5 * x * (1 + _erf(xp, x * sqrt(0.5))), x)
    return computed(lambda xp, x: 0.5 * x * (1 + xp.tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x))), x)


def coerced(x: Any, axis: int) -> Any:
    """Return x as a matrix [product of the dimensions before `axis`, product of the rest]: Softmax before 13."""
    axis += x.ndim if axis < 0 else 0
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, -1 if x.size else 0)


def _softmax(x: Any, axis: int) -> Any:
    def rows(xp: Any, x: Any) -> Any:
        shifted = x - x.max(axis=axis, keepdims=True)
        powers = np.exp(shifted, out=shifted) if xp is np else xp.exp(shifted)
        powers /= powers.sum(axis=axis, keepdims=True)
        return powers

    return computed(rows, x) if x.size else x


def log_softmax(x: Any, axis: int) -> Any:
    """Return x less the logarithm of its summed exponentials along an axis."""

    def rows(xp: Any, x: Any) -> Any:
        shifted = x - x.max(axis=axis, keepdims=True)
        return shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))

    return computed(rows, x) if x.size else x


def _hardmax(x: Any, axis: int) -> Any:
    def rows(xp: Any, x: Any) -> Any:
        best = xp.expand_dims(xp.argmax(x, axis=axis), axis)
        shape = [-1 if place == axis % x.ndim else 1 for place in range(x.ndim)]
        return xp.arange(x.shape[axis], dtype=best.dtype).reshape(shape) == best

    return computed(rows, x) if x.size else x


def _along_axis(function: Callable[[Any, int], Any], x: Any, *, axis: int = -1) -> Any:
    return function(x, axis)


def _coerced(function: Callable[[Any, int], Any], x: Any, *, axis: int = 1) -> Any:
    return function(coerced(x, axis), -1).reshape(x.shape)


_NORMALIZED: Sequence[tuple[str, Callable[[Any, int], Any], prepared.Prepare | None]] = (
    ("Softmax", _softmax, prepared.softmax(logarithm=False)),
    ("LogSoftmax", log_softmax, prepared.softmax(logarithm=True)),
    ("Hardmax", _hardmax, None),
)
for _name, _rows, _prepare in _NORMALIZED:
    op(_name, until=12)(partial(_coerced, _rows))
    op(_name, since=13, prepare=_prepare)(partial(_along_axis, _rows))


def _running(function: str, xp: Any, x: Any, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Any:
    """Running sums or products along an axis given as an input; exclusive ones leave the element itself out."""
    at = int(axis.reshape(-1)[0])
    if xp is mx:
        return getattr(mx, function)(x, axis=at, reverse=bool(reverse), inclusive=not exclusive)
    moved = np.moveaxis(np.flip(x, at) if reverse else x, at, 0)
    total = getattr(np, function)(moved, axis=0, dtype=x.dtype)
    if exclusive:
        total = np.concatenate([np.full_like(total[:1], function == "cumprod"), total[:-1]])
    total = np.moveaxis(total, 0, at)
    return np.flip(total, at) if reverse else total


for _name, _function in (("CumSum", "cumsum"), ("CumProd", "cumprod")):
    op(_name, host=(1,))(partial(_running, _function))


def _top(xp: Any, x: Any, k: int, axis: int, largest: int) -> tuple[Any, Any]:
    """The k first of a stable sort: of equal values the lower index comes first, which mx.topk does not promise."""
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"k is {k}, but axis {axis} has {x.shape[axis]} elements")
    key = x
    if largest:
        key = -x if is_float(x) else ~x
    axis += x.ndim if axis < 0 else 0
    first = tuple(slice(k) if place == axis else slice(None) for place in range(x.ndim))
    index = (np.argsort(key, axis=axis, kind="stable") if xp is np else mx.argsort(key, axis=axis))[first]
    return xp.take_along_axis(x, index, axis=axis), index.astype(xp.int64)


@op("TopK", until=9)
def top_k_attribute(xp: Any, x: Any, *, k: int, axis: int = -1) -> Any:
    """Takes k as an attribute."""
    return _top(xp, x, k, axis, 1)


@op("TopK", since=10, until=10, host=(1,))
def top_k_largest(xp: Any, x: Any, k: Any, *, axis: int = -1) -> Any:
    """Takes k as an input."""
    return _top(xp, x, int(k.reshape(-1)[0]), axis, 1)


@op("TopK", since=11, host=(1,))
def top_k(xp: Any, x: Any, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    """The largest or smallest; always sorted, which `sorted` 0 allows too."""
    return _top(xp, x, int(k.reshape(-1)[0]), axis, largest)
