"""Operators as they were before version 7, where broadcasting and testing were attributes; as the later ones else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lut4tool.runtime.ops import logical, math, norm, pool, products  # noqa: F401 - they register what is used here
from lut4tool.runtime.registry import find, op

Ints = Sequence[int] | None


def _later(name: str) -> Callable[..., Any]:
    row = find("", name, 7)
    assert row is not None
    return row.run


def _aligned(
    name: str, xp: Any, a: Any, b: Any, *, axis: int | None = None, broadcast: int = 0, consumed_inputs: Ints = None
) -> Any:
    """With broadcast, b stands at `axis` of a; without an axis at the end."""
    if broadcast and axis is not None:
        b = b.reshape(*b.shape, *[1] * (a.ndim - axis % a.ndim - b.ndim))
    elif not broadcast and a.shape != b.shape:
        raise ValueError(f"shapes {list(a.shape)} and {list(b.shape)} differ, and broadcast is 0")
    return _later(name)(xp, a, b)


def _aligned_only(name: str, xp: Any, a: Any, b: Any, *, axis: int | None = None, broadcast: int = 0) -> Any:
    return _aligned(name, xp, a, b, axis=axis, broadcast=broadcast)


for _name in ("Add", "Sub", "Mul", "Div"):
    op(_name, until=6)(partial(_aligned, _name))
for _name in ("Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"):
    op(_name, until=6)(partial(_aligned_only, _name))


@op("PRelu", until=6)
def prelu(xp: Any, x: Any, slope: Any, *, consumed_inputs: Ints = None) -> Any:
    """One slope for all, or one a channel."""
    if slope.size > 1:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    return _later("PRelu")(xp, x, slope)


@op("Gemm", until=6)
def gemm(
    a: Any,
    b: Any,
    c: Any,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    """C broadcasts where `broadcast` says so."""
    return products.gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@op("AveragePool", until=6)
def average_pool(
    x: Any, *, auto_pad: str = "NOTSET", kernel_shape: Sequence[int], pads: Ints = None, strides: Ints = None
) -> Any:
    """The padding never counts."""
    return pool.average_pool(x, auto_pad=auto_pad, kernel_shape=kernel_shape, pads=pads, strides=strides)


@op("BatchNormalization", since=6, until=6)
def batch_normalization(
    x: Any, scale: Any, b: Any, mean: Any, var: Any, *, epsilon: float = 1e-5, is_test: int = 0, momentum: float = 0.9,
    spatial: int = 1, outputs: int = 1,
) -> Any:  # fmt: skip
    """More outputs than one mean training, as later; is_test says the same in another way."""
    return norm.batch_normalization_before_14(
        x, scale, b, mean, var, epsilon=epsilon, momentum=momentum, spatial=spatial, outputs=outputs
    )
