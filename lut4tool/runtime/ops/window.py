"""The geometry of sliding windows: padding, output sizes and the slices that one kernel position reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lut4tool.runtime.ops.sizes import check_size

#: An optional attribute that is a list of integers.
Ints = Sequence[int] | None


@dataclass(frozen=True)
class Window:
    """A window over spatial axes, a value an axis: kernel, strides, dilations, pads before and after, output size.

    `after` covers the last window whole, so with ceil_mode it may exceed the padding that the model asked for
    (`asked`), and where the last windows do not reach the end it does not matter.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    asked: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.size)

    def axis_slice(self, axis: int, position: int) -> slice:
        """What kernel position `position` reads along one padded axis, an element a window."""
        start, stride = position * self.dilations[axis], self.strides[axis]
        return slice(start, start + (self.out[axis] - 1) * stride + 1, stride)

    def positions(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each kernel position and the slices that it reads from the padded input."""
        for position in itertools.product(*map(range, self.kernel)):
            yield position, tuple(self.axis_slice(axis, at) for axis, at in enumerate(position))


def check_geometry(rank: int, kernel: Sequence[int], strides: Ints, dilations: Ints, pads: Ints) -> None:
    """Raise ValueError for what is no window: MLX, the native library and strided views would read anywhere."""
    for name, values, count, least in (
        ("kernel_shape", kernel, rank, 1), ("strides", strides, rank, 1), ("dilations", dilations, rank, 1),
        ("pads", pads, 2 * rank, 0),
    ):  # fmt: skip
        if values is None:
            continue
        if len(values) != count or not all(least <= value < 1 << 31 for value in values):
            raise ValueError(f"{name} must be {count} numbers from {least} on, not {list(values)}")


def window(
    size: Sequence[int],
    kernel: Sequence[int],
    strides: Ints = None,
    dilations: Ints = None,
    pads: Ints = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Window:
    """Resolve ONNX's attributes of Conv and the pools for an input of spatial `size`.

    SAME_UPPER and SAME_LOWER put the odd pixel after or before. With ceil_mode a last window that would start in the
    padding after the input is left out.
    """
    rank = len(size)
    strides, dilations = tuple(strides or (1,) * rank), tuple(dilations or (1,) * rank)
    asked = list(pads or (0,) * (2 * rank)) if auto_pad == "NOTSET" else [0] * (2 * rank)
    check_geometry(rank, kernel, strides, dilations, asked)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    out, after = [], []
    for axis, (length, stride, span) in enumerate(zip(size, strides, spans, strict=True)):
        if auto_pad.startswith("SAME"):
            total = max((-(-length // stride) - 1) * stride + span - length, 0)
            small, large = total // 2, total - total // 2
            asked[axis], asked[axis + rank] = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
        room = length + asked[axis] + asked[axis + rank] - span
        count = -(-room // stride) + 1 if ceil_mode else room // stride + 1
        if ceil_mode and (count - 1) * stride >= length + asked[axis]:
            count -= 1
        if count < 1:
            raise ValueError(f"a window of {span} does not fit {length} elements and {room + span} with padding")
        out.append(count)
        after.append(max(asked[axis + rank], (count - 1) * stride + span - length - asked[axis]))
    before, wanted = tuple(asked[:rank]), tuple(asked[rank:])
    return Window(tuple(size), tuple(kernel), strides, dilations, before, tuple(after), wanted, tuple(out))


def pad(xp: Any, x: Any, grid: Window, value: Any = 0) -> Any:
    """Pad the spatial axes of x [N, C, *size] with a constant, as far as its windows reach."""
    if not any(grid.before + grid.after):
        return x
    check_size([*x.shape[:2], *[n + a + b for n, a, b in zip(grid.size, grid.before, grid.after, strict=True)]], 4)
    return xp.pad(x, [(0, 0), (0, 0), *zip(grid.before, grid.after, strict=True)], constant_values=value)


def views(x: np.ndarray, grid: Window) -> np.ndarray:
    """A view [N, C, *kernel, *out] of a padded NumPy array: what each kernel position of each window reads."""
    spatial = x.strides[2:]
    steps = (
        *(s * d for s, d in zip(spatial, grid.dilations, strict=True)),
        *(s * t for s, t in zip(spatial, grid.strides, strict=True)),
    )
    return np.lib.stride_tricks.as_strided(
        x, (*x.shape[:2], *grid.kernel, *grid.out), (*x.strides[:2], *steps), writeable=False
    )


def fold(xp: Any, columns: Any, grid: Window) -> Any:
    """Add columns [N, C, *kernel, *out] up where each kernel position reads: the transpose of `views`, cropped."""
    padded = [n + a + b for n, a, b in zip(grid.size, grid.before, grid.after, strict=True)]
    check_size([*columns.shape[:2], *padded], 4)
    image = xp.zeros((*columns.shape[:2], *padded), dtype=columns.dtype)
    for position, slices in grid.positions():
        image[(..., *slices)] += columns[(slice(None), slice(None), *position)]
    crop = tuple(slice(b, b + n) for b, n in zip(grid.before, grid.size, strict=True))
    return image[(..., *crop)]
