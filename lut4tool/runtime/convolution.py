"""Convolutions, pools and chains of elementwise operators on a CPU, float32, in the native library.

A convolution's constant weights are packed once, in the order that its kernels read them. What follows it element by
element (stages) is done to its result while that lies in the cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lut4tool import native

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()
_FLOAT32 = np.dtype(np.float32)


def available() -> bool:
    """Whether the native library serves."""
    return _NATIVE is not None


@dataclass(frozen=True, eq=False)
class Stage:
    """What is done to a value v; native/conv.h lists the names. scale and shift: float32, one a channel or a point."""

    name: str
    a: float = 0.0
    b: float = 0.0
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None


def stages(steps: Sequence[Stage] = ()) -> Any:
    """The native form of stages; None without the library."""
    if _NATIVE is None:
        return None
    program = _NATIVE.Stages()
    for step in steps:
        program.add(step.name, step.a, step.b, step.scale, step.shift)
    return program


NO_STAGES = stages()


class Kernels:
    """Weights w [M, C / group, *kernel] of one or two spatial axes and a bias [M], packed when first used.

    Call it with x [N, C, *size], the geometry (strides, dilations, zeros before, an axis each) and the output's size.
    """

    def __init__(self, w: np.ndarray, bias: np.ndarray | None, group: int) -> None:
        self.w, self.bias, self.group = w, bias, group
        self.shape, self.count = w.shape, w.shape[0]
        self._packed: Any = None

    def __call__(self, x: np.ndarray, geometry: tuple[int, ...], out: tuple[int, ...]) -> np.ndarray:
        """Return y [N, M, *out]."""
        return self.place(x.shape, geometry, out)(x)

    def place(self, shape: tuple[int, ...], geometry: tuple[int, ...], out: tuple[int, ...]) -> Placed:
        """The same for every x of this shape, checked once."""
        if self._packed is None:
            self._packed = self._pack()
        whole, size, kernel = (shape[0], self.count, *out), shape[2:], self.shape[2:]
        if not prod(whole):
            return Placed(whole, None)
        zeros = None
        if not prod(size):  # all that the windows see is zeros, as around x
            size = tuple(max(length, 1) for length in size)
            zeros = np.zeros((*shape[:2], *size), np.float32)
        if len(out) == 1:
            size, kernel, out = (1, *size), (1, *kernel), (1, *out)
            geometry = (1, geometry[0], 1, geometry[1], 0, geometry[2])
        return Placed(whole, self._packed.place((*shape[:2], *size), (*kernel, *geometry), out), zeros)

    @property
    def packed(self) -> bool:
        """Whether w and bias are no longer there, as they were packed."""
        return self._packed is not None

    def _pack(self) -> Any:
        w = np.ascontiguousarray(self.w, np.float32)
        bias = None if self.bias is None else np.ascontiguousarray(self.bias, np.float32)
        del self.w, self.bias  # only the packed ones are kept
        return _NATIVE.pack_weights(w if w.ndim == 4 else w[:, :, None], bias, self.group)


@dataclass(frozen=True, eq=False)
class Placed:
    """Kernels over an x of one shape; shape: of the result. zeros: what is read where x has no elements."""

    shape: tuple[int, ...]
    native: Any
    zeros: np.ndarray | None = None

    def __call__(self, x: np.ndarray, program: Any = NO_STAGES, operands: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Return y after the stages; operands have y's shape, or a value for each of its planes."""
        y = np.empty(self.shape, np.float32)
        if self.native is not None:
            x = np.ascontiguousarray(x) if self.zeros is None else self.zeros
            self.native.run(x, y, program, [np.ascontiguousarray(operand) for operand in operands], _THREADS)
        return y


def packs(w: Any, bias: Any, group: int) -> bool:
    """Whether these are constant weights and a bias that `Kernels` serves."""
    fits = isinstance(w, np.ndarray) and w.ndim in (3, 4) and w.size and group > 0 and w.shape[0] % group == 0
    if _NATIVE is None or not fits or w.dtype != _FLOAT32:
        return False
    return bias is None or (isinstance(bias, np.ndarray) and bias.dtype == _FLOAT32 and bias.shape == w.shape[:1])


def serves(x: np.ndarray, w: np.ndarray) -> bool:
    """Whether the native library convolves these: float32, with one or two spatial axes."""
    return _NATIVE is not None and x.dtype == w.dtype == _FLOAT32 and w.ndim in (3, 4) and bool(x.size and w.size)


def conv(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, geometry: tuple[int, ...], out: tuple[int, ...], group: int
) -> np.ndarray | None:
    """Convolve x [N, C, *size] with w [M, C / group, *kernel], plus bias [M] -> [N, M, *out]; None where NumPy must."""
    if not serves(x, w) or not all(out):
        return None
    return Kernels(w, bias, group)(x, geometry, out)


def apply(program: Any, x: np.ndarray, operands: Sequence[np.ndarray], shape: tuple[int, int, int]) -> np.ndarray:
    """The stages on x, seen as [N, channels, points]; a new array."""
    y = np.empty(x.shape, np.float32)
    given = [np.ascontiguousarray(operand) for operand in operands]
    program.run(np.ascontiguousarray(x).reshape(shape), given, y.reshape(shape), _THREADS)
    return y


def apply_inplace(program: Any, x: np.ndarray, operands: Sequence[np.ndarray], shape: tuple[int, int, int]) -> None:
    """The same, written over a contiguous x."""
    view = x.reshape(shape)
    program.run(view, [np.ascontiguousarray(operand) for operand in operands], view, _THREADS)


def pool(x: np.ndarray, geometry: tuple[int, ...], out: tuple[int, ...], maximum: bool) -> np.ndarray | None:
    """The maximum or the sum of each window of x [N, C, *size] -> [N, C, *out]; None where NumPy must.

    geometry: kernel, strides, dilations and places before x, two of each; those places take no part.
    """
    if _NATIVE is None or x.dtype != _FLOAT32 or x.ndim != 4 or not x.size:
        return None
    y = np.empty((*x.shape[:2], *out), np.float32)
    planes = np.ascontiguousarray(x).reshape(-1, *x.shape[2:])
    _NATIVE.pool(planes, geometry, y.reshape(-1, *out), maximum, _THREADS)
    return y
