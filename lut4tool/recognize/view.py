"""Where the elements of a value lie in the constant that it is moved out of: no element is read to know it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Factor(NamedTuple):
    """A part of a dimension: so many steps of so many elements of the flat constant."""

    size: int
    stride: int


class View(NamedTuple):
    """A value of `shape`, each of whose dimensions counts through its factors, the outermost first.

    The element at some index is that of the flat constant at `start` plus each factor's count times its stride; stride
    0 repeats. A dimension may be cut: then its factors' product is more than the shape has.
    """

    shape: Shape
    dims: tuple[tuple[Factor, ...], ...]
    start: int = 0

    @property
    def whole(self) -> bool:
        """Whether no dimension is cut."""
        return all(size == _product(factors) for size, factors in zip(self.shape, self.dims, strict=True))

    def reshaped(self, shape: Shape) -> View | None:
        """The same elements in order in another shape; None where a dimension of it has none of its own."""
        if not self.whole or math.prod(shape) != math.prod(self.shape):
            return None
        left = list(_merged([factor for factors in self.dims for factor in factors]))[::-1]
        dims = []
        for size in shape:
            own: list[Factor] = []
            while size > 1:
                factor = left.pop()
                if size % factor.size == 0:
                    own.append(factor)
                    size //= factor.size
                elif factor.size % size == 0:
                    own.append(Factor(size, factor.stride * (factor.size // size)))
                    left.append(Factor(factor.size // size, factor.stride))
                    size = 1
                else:
                    return None
            dims.append(_merged(own))
        return View(shape, tuple(dims), self.start)

    def transposed(self, perm: Sequence[int]) -> View:
        """Its dimensions in another order."""
        return View(tuple(self.shape[at] for at in perm), tuple(self.dims[at] for at in perm), self.start)

    def with_axis(self, axis: int) -> View:
        """One more dimension of 1."""
        return View((*self.shape[:axis], 1, *self.shape[axis:]), (*self.dims[:axis], (), *self.dims[axis:]), self.start)

    def expanded(self, shape: Shape) -> View | None:
        """Repeated along dimensions of 1, as ONNX broadcasts; None where it is not to be had of this shape."""
        missing = len(shape) - len(self.shape)
        if missing < 0:
            return None
        dims = []
        for size, own, factors in zip(shape, (1,) * missing + self.shape, ((),) * missing + self.dims, strict=True):
            if own not in (1, size):
                return None
            dims.append((Factor(size, 0),) if own == 1 and size > 1 else factors)
        return View(shape, tuple(dims), self.start)

    def stretched(self, axis: int, times: int, end: int) -> View:
        """The first elements along an axis once each of them is repeated so many times."""
        factors = _merged([*self.dims[axis], Factor(times, 0)])
        shape = (*self.shape[:axis], end, *self.shape[axis + 1 :])
        return View(shape, (*self.dims[:axis], factors, *self.dims[axis + 1 :]), self.start)

    def cut(self, axis: int, end: int) -> View:
        """The first elements along an axis."""
        factors, inner = self.dims[axis], _product(self.dims[axis][1:])
        if factors and end % inner == 0 and self.shape[axis] == _product(factors):
            factors = _merged([Factor(end // inner, factors[0].stride), *factors[1:]])
        shape = (*self.shape[:axis], end, *self.shape[axis + 1 :])
        return View(shape, (*self.dims[:axis], factors, *self.dims[axis + 1 :]), self.start)

    def repeats(self, axis: int) -> bool:
        """Whether all elements along an axis are one and the same."""
        return not any(factor.stride for factor in self.dims[axis])

    def run(self, axis: int) -> int:
        """How many elements in turn along an axis, which does not repeat whole, are one and the same."""
        last = self.dims[axis][-1]
        return last.size if last.stride == 0 else 1

    def first_of_runs(self, axis: int, run: int) -> View:
        """One element of each `run` along an axis, which repeats so many, or that many times more."""
        factors, count = list(self.dims[axis]), -(-self.shape[axis] // run)
        if self.repeats(axis):
            factors = [Factor(count, 0)]
        else:
            last = factors.pop() if run > 1 else Factor(1, 0)
            factors.append(Factor(last.size // run or 1, 0))
        dims = (*self.dims[:axis], _merged(factors), *self.dims[axis + 1 :])
        return View((*self.shape[:axis], count, *self.shape[axis + 1 :]), dims, self.start)

    def of_units(self, axis: int, count: int) -> View:
        """The same view of a constant of which `count` of the entries along an axis of this view are there."""
        (own,) = self.dims[axis]
        span = own.size * own.stride
        dims = [
            tuple(Factor(size, stride if stride < span else stride // own.size * count) for size, stride in factors)
            for factors in self.dims
        ]
        dims[axis] = (Factor(count, own.stride),)
        return View((*self.shape[:axis], count, *self.shape[axis + 1 :]), tuple(dims), self.start)

    def taken(self, array: np.ndarray) -> np.ndarray:
        """The elements of a flat constant that this view shows."""
        sizes = [factor.size for factors in self.dims for factor in factors]
        strides = [factor.stride * array.itemsize for factors in self.dims for factor in factors]
        shown = np.lib.stride_tricks.as_strided(array[self.start :], sizes, strides, writeable=False)
        full = shown.reshape([_product(factors) for factors in self.dims])
        return full[tuple(slice(size) for size in self.shape)]


def view_of(shape: Shape, step: int = 1) -> View:
    """A whole constant of this shape, each of its elements `step` long."""
    sizes: list[tuple[Factor, ...]] = []
    stride = step
    for size in reversed(shape):
        sizes.append((Factor(size, stride),) if size != 1 else ())
        stride *= size
    return View(shape, tuple(sizes[::-1]))


def beside(first: View, second: View, axis: int) -> View | None:
    """Two views of one constant that differ only in where they start, one after the other along an axis."""
    if first.shape != second.shape or first.dims != second.dims or not first.whole:
        return None
    factors = _merged([Factor(2, second.start - first.start), *first.dims[axis]])
    shape = (*first.shape[:axis], 2 * first.shape[axis], *first.shape[axis + 1 :])
    return View(shape, (*first.dims[:axis], factors, *first.dims[axis + 1 :]), first.start)


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape that operands of these have in common; None where they have none."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    common = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    fits = all(size in (1, most) for shape in padded for size, most in zip(shape, common, strict=True))
    return common if fits else None


def _merged(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Factors that step on evenly as one."""
    merged: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        if merged and merged[-1].stride == factor.stride * factor.size:
            merged[-1] = Factor(merged[-1].size * factor.size, factor.stride)
        else:
            merged.append(factor)
    return tuple(merged)


def _product(factors: Sequence[Factor]) -> int:
    return math.prod(_sizes(factors))


def _sizes(factors: Sequence[Factor]) -> Iterator[int]:
    return (factor.size for factor in factors)
