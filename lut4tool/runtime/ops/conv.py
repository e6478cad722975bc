"""Convolutions: MLX's own on a GPU (it wants the channels last), NumPy windows and its BLAS on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lut4tool.runtime import convolution
from lut4tool.runtime.backend import mx
from lut4tool.runtime.convolution import Kernels, Placed
from lut4tool.runtime.ops.compute import finish, working
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.ops.window import Ints, Window, check_geometry, fold, pad, views, window
from lut4tool.runtime.registry import op

if TYPE_CHECKING:
    from lut4tool.runtime.plan import Node

#: Shapes of x that a node remembers.
REMEMBERED = 32
# Elements of the unrolled input that are made at a time on a CPU: 8 MB of float32, or what a core's cache holds.
_PANEL, _CACHED = 1 << 21, 1 << 17


class PreparedConv:
    """A Conv whose constant weights, float32 with one or two spatial axes, are packed for the native library."""

    def __init__(self, kernels: Kernels, attributes: Mapping[str, Any]) -> None:
        self.kernels, self.attributes = kernels, attributes
        self._placed: dict[tuple[int, ...], Placed] = {}

    def with_weights(self, w: np.ndarray, bias: np.ndarray | None) -> PreparedConv:
        """The same with other weights of the same shape."""
        return PreparedConv(Kernels(w, bias, self.kernels.group), self.attributes)

    def over(self, shape: tuple[int, ...]) -> Placed:
        """What convolves an x of this shape; the last few are remembered."""
        found = self._placed.get(shape)
        if found is None:
            check_shapes(shape, self.kernels.shape, None, self.kernels.group)
            strides, dilations, pads = (self.attributes.get(name) for name in ("strides", "dilations", "pads"))
            padding = self.attributes.get("auto_pad", "NOTSET")
            grid = window(shape[2:], self.kernels.shape[2:], strides, dilations, pads, padding)
            check_size((shape[0], self.kernels.count, *grid.out), 4)
            found = self.kernels.place(shape, (*grid.strides, *grid.dilations, *grid.before), grid.out)
            if len(self._placed) >= REMEMBERED:
                self._placed.clear()
            self._placed[shape] = found
        return found

    def __call__(self, x: np.ndarray, *_: Any) -> Any:
        """The node's own inputs: x, and the weights that were packed."""
        return self.over(x.shape)(x)


def prepare_conv(node: Node, _: Any = None) -> PreparedConv | None:
    """What convolves with constant weights; None where the native library does not."""
    w, bias = (*node.constants, None)[1:3]
    dynamic = len(node.given) > 2 and node.given[2] and bias is None
    group = node.attributes.get("group", 1)
    if w is None or dynamic or not convolution.packs(w, bias, group):
        return None
    return PreparedConv(Kernels(w, bias, group), node.attributes)


@op("Conv", prepare=prepare_conv)
def conv(
    x: Any, w: Any, b: Any = None, *, auto_pad: str = "NOTSET", dilations: Ints = None, group: int = 1,
    kernel_shape: Ints = None, pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """Channels first, x [N, C, *size] and w [M, C / group, *kernel], and auto_pad; MLX wants the channels last."""
    check_channels(x, w, b, group)
    xp, data, weight, bias = working(x, w, b)
    grid = window(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    return finish((convolve_host if xp is np else convolve_device)(data, weight, bias, grid, group), x)


def check_channels(x: Any, w: Any, b: Any, group: int) -> None:
    """Raise ValueError where x [N, C, *size], w [M, C / group, *kernel] and b [M] do not belong together."""
    check_shapes(x.shape, w.shape, None if b is None else b.shape, group)


def check_shapes(x: Sequence[int], w: Sequence[int], b: Sequence[int] | None, group: int) -> None:
    """The same for their shapes."""
    fits = group > 0 and len(w) == len(x) > 2 and x[1] == w[1] * group and w[0] % group == 0
    if not fits or (b is not None and tuple(b) != (w[0],)):
        bias = "" if b is None else f" and a bias of {list(b)}"
        raise ValueError(f"x of shape {list(x)}, w of {list(w)}{bias} do not fit group {group}")


def convolve_host(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, grid: Window, group: int) -> np.ndarray:
    """Convolve x [N, C, *size] with w [M, C / group, *kernel], plus bias [M], to [N, M, *out] in their type.

    In the native library, which has float32 and one or two spatial axes, or in NumPy.
    """
    y = convolution.conv(x, w, bias, (*grid.strides, *grid.dilations, *grid.before), grid.out, group)
    return _biased(convolve_numpy(x, w, grid, group), bias) if y is None else y


def _biased(y: Any, bias: Any) -> Any:
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))


def convolve_numpy(x: np.ndarray, w: np.ndarray, grid: Window, group: int) -> np.ndarray:
    """Convolve in NumPy, any type and rank, without a bias.

    A product of unrolled windows, made in panels of some groups or some output rows; a 1x1 kernel reads x itself.
    """
    if not x.size:  # no batch, or zeros alone
        return np.zeros((x.shape[0], w.shape[0], *grid.out), np.result_type(x, w))
    windows = views(pad(np, x, grid), grid)
    batch, depth, points = x.shape[0], x.shape[1] // group * prod(grid.kernel), prod(grid.out)
    kernels = w.reshape(group, w.shape[0] // group, depth)
    if prod(grid.kernel) == 1:
        return np.matmul(kernels, windows.reshape(batch, group, depth, points)).reshape(batch, -1, *grid.out)
    windows = windows.reshape(batch, group, -1, *windows.shape[2:]) if group > 1 else windows[:, None]
    y = np.empty((batch, group, w.shape[0] // group, *grid.out), np.result_type(x, w))
    # Measured: a panel that stays in the cache makes a depthwise 5x5 kernel over 240x12x80 take 1.4 ms, MLX 18.
    groups = max(1, (_CACHED if group > 1 else _PANEL) // max(1, batch * depth * points))
    rows = grid.out[0] if groups > 1 else max(1, _PANEL * grid.out[0] // max(1, batch * depth * points))
    whole = (slice(None),) * (1 + grid.rank)
    for first in range(0, group, groups):
        for start in range(0, grid.out[0], rows):
            part = windows[(*whole[:1], slice(first, first + groups), *whole, slice(start, start + rows))]
            product = np.matmul(kernels[first : first + groups], part.reshape(*part.shape[:2], depth, -1))
            target = y[:, first : first + groups, :, start : start + rows]
            target[...] = product.reshape(target.shape)
    return y.reshape(batch, -1, *grid.out)


def convolve_device(x: mx.array, w: mx.array, bias: Any, grid: Window, group: int) -> mx.array:
    """The same with mx.conv_general, group by group where it has no groups (3-D)."""
    if group > 1 and grid.rank > 2:
        pairs = zip(mx.split(x, group, axis=1), mx.split(w, group, axis=0), strict=True)
        parts = [convolve_device(part, kernel, None, grid, 1) for part, kernel in pairs]
        return _biased(mx.concatenate(parts, axis=1), bias)
    y = mx.conv_general(
        mx.moveaxis(x, 1, -1),
        mx.moveaxis(w, 1, -1),
        grid.strides,
        (grid.before, grid.asked),
        grid.dilations,
        groups=group,
    )
    return mx.moveaxis(y if bias is None else y + bias, -1, 1)  # what adds the bias leaves the channels last


class PreparedTranspose:
    """A ConvTranspose whose constant weights are those of a convolution that makes each stride phase of y at once.

    Along an axis, y[q * s + r - before] is the sum over t of x[q - t] w[r + t * s]: for each of the s remainders r one
    kernel of ceil(k / s) taps, in reverse. Their results are side by side in the channels and are interleaved.
    """

    def __init__(self, w: np.ndarray, bias: np.ndarray | None, attributes: Mapping[str, Any]) -> None:
        self.attributes, self.shape = attributes, w.shape
        group, rank = attributes.get("group", 1), w.ndim - 2
        self.group, self.strides = group, tuple(attributes.get("strides") or (1,) * rank)
        self.taps = tuple(-(-k // s) for k, s in zip(w.shape[2:], self.strides, strict=True))
        ends = [(0, t * s - k) for k, s, t in zip(w.shape[2:], self.strides, self.taps, strict=True)]
        self.padded = any(after for _, after in ends)
        parts = np.pad(w, [(0, 0), (0, 0), *ends])
        for axis, (taps, stride) in enumerate(zip(self.taps, self.strides, strict=True)):
            parts = parts.reshape(*parts.shape[: 2 + 2 * axis], taps, stride, *parts.shape[3 + 2 * axis :])
            parts = np.flip(parts, 2 + 2 * axis)
        depth, count, kinds = w.shape[0] // group, w.shape[1], prod(self.strides)
        order = (0, 2, *range(4, 4 + 2 * rank, 2), 1, *range(3, 3 + 2 * rank, 2))  # [G, M / G, *r, C / G, *t]
        parts = parts.reshape(group, depth, count, *parts.shape[2:]).transpose(order)
        wide = np.ascontiguousarray(parts).reshape(group * count * kinds, depth, *self.taps)
        self.kernels = Kernels(wide, None if bias is None else np.repeat(bias, kinds), group)

    def __call__(self, x: np.ndarray, *weights: Any) -> Any:
        """The node's own inputs: x [N, C, *in], and the weights that were taken apart."""
        if self.padded and not np.isfinite(x.sum()):  # a padded tap would make NaN of it where no tap reaches
            return conv_transpose(x, *weights, **self.attributes)
        a, rank = self.attributes, len(self.taps)
        check_transposed(x.shape, self.shape, self.group)
        grid = _transposed_window(
            x.shape[2:], self.shape[2:], self.strides, None, a.get("pads"), a.get("auto_pad", "NOTSET"),
            a.get("output_padding"), a.get("output_shape"),
        )  # fmt: skip
        check_size((x.shape[0], self.kernels.count, *grid.size), 4)
        starts = tuple(min(b // s, t - 1) for b, s, t in zip(grid.before, self.strides, self.taps, strict=True))
        most = zip(grid.size, grid.before, self.strides, starts, strict=True)
        out = tuple((n - 1 + b) // s + 1 - start for n, b, s, start in most)
        zeros = tuple(t - 1 - start for t, start in zip(self.taps, starts, strict=True))
        z = self.kernels(x, (*(1,) * 2 * rank, *zeros), out)
        z = z.reshape(x.shape[0], self.shape[1] * self.group, *self.strides, *out)
        order = (0, 1, *(axis for place in range(rank) for axis in (2 + rank + place, 2 + place)))
        y = z.transpose(order).reshape(*z.shape[:2], *(n * s for n, s in zip(out, self.strides, strict=True)))
        first = [b - start * s for b, start, s in zip(grid.before, starts, self.strides, strict=True)]
        cut: tuple[Any, ...] = tuple(slice(b, b + n) for b, n in zip(first, grid.size, strict=True))
        return np.ascontiguousarray(y[(..., *cut)])


def check_transposed(x: Sequence[int], w: Sequence[int], group: int) -> None:
    """Raise ValueError where shapes x [N, C, *in] and w [C, M / group, *kernel] do not belong together."""
    if group < 1 or len(w) != len(x) or len(x) < 3 or x[1] != w[0] or x[1] % group:
        raise ValueError(f"x of shape {list(x)} and w of {list(w)} do not fit group {group}")


def prepare_transpose(node: Node, _: Any = None) -> PreparedTranspose | None:
    """What convolves with constant weights; None where the native library does not, or kernels have gaps."""
    w, bias = (*node.constants, None)[1:3]
    group, a = node.attributes.get("group", 1), node.attributes
    dynamic = len(node.given) > 2 and node.given[2] and bias is None
    gaps = max(a.get("dilations") or [1]) > 1
    if w is None or dynamic or gaps or w.ndim not in (3, 4) or group < 1 or w.shape[0] % group:
        return None
    strides = a.get("strides") or (1,) * (w.ndim - 2)
    count = w.shape[1] * group
    known = bias is None or bias.shape == (count,)
    if len(strides) != w.ndim - 2 or min(strides) < 1 or not known or not convolution.packs(w, None, 1):
        return None
    return PreparedTranspose(w, bias, a) if np.isfinite(w).all() else None  # inf times a zero around x would be NaN


@op("ConvTranspose", prepare=prepare_transpose)
def conv_transpose(
    x: Any, w: Any, b: Any = None, *, auto_pad: str = "NOTSET", dilations: Ints = None, group: int = 1,
    kernel_shape: Ints = None, output_padding: Ints = None,
    output_shape: Ints = None, pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """One product of x [N, C, *in] and w [C, M / group, *kernel], then each kernel position is added where it writes.

    `output_shape` wins over pads, which it determines; SAME_* makes it stride times the input.
    """
    check_transposed(x.shape, w.shape, group)
    xp, data, weight, bias = working(x, w, b)
    rank, batch = x.ndim - 2, x.shape[0]
    grid = _transposed_window(
        x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad, output_padding, output_shape
    )
    kernels = xp.swapaxes(weight.reshape(group, w.shape[0] // group, -1), 1, 2)  # [G, M / G * kernel, C / G]
    columns = xp.matmul(kernels, data.reshape(batch, group, w.shape[0] // group, prod(x.shape[2:])))
    y = fold(xp, columns.reshape(batch, group * w.shape[1], *w.shape[2:], *x.shape[2:]), grid)
    return finish(y if bias is None else y + bias.reshape(-1, *[1] * rank), x)


def _transposed_window(
    size: Sequence[int], kernel: Sequence[int], strides: Ints, dilations: Ints, pads: Ints, auto_pad: str,
    output_padding: Ints, output_shape: Ints,
) -> Window:  # fmt: skip
    """The window over ConvTranspose's output whose `out` is its input."""
    rank = len(size)
    strides, dilations = tuple(strides or (1,) * rank), tuple(dilations or (1,) * rank)
    check_geometry(rank, kernel, strides, dilations, pads)
    extra, shape = output_padding or (0,) * rank, (output_shape or ())[-rank:]
    begin, end = list((pads or (0,) * 2 * rank)[:rank]), list((pads or (0,) * 2 * rank)[rank:])
    full = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in zip(size, kernel, strides, dilations, strict=True)]
    if not shape and auto_pad.startswith("SAME"):
        shape = [n * s for n, s in zip(size, strides, strict=True)]
    elif auto_pad == "VALID":
        begin, end = [0] * rank, [0] * rank
    for axis, wanted in enumerate(shape):
        total = max(full[axis] + extra[axis] - wanted, 0)
        small, large = total // 2, total - total // 2
        begin[axis], end[axis] = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    out = tuple(shape or [f + e - b - a for f, e, b, a in zip(full, extra, begin, end, strict=True)])
    after = tuple(f - o - b if f > o + b else 0 for f, o, b in zip(full, out, begin, strict=True))
    return Window(out, tuple(kernel), strides, dilations, tuple(begin), after, after, tuple(size))
