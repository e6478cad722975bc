"""`lut4tool selftest`: every kernel of this machine against float64 on the host, over shapes that have gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from lut4tool import kernels
from lut4tool.formats import FLOAT_DTYPES, NF4, Lookup4Weight, QmmWeight, decode, decode_qmm

Progress = Callable[[str, int, int], None]

#: |y - exact| <= bound * sum |x||w|, and for halves the final rounding of y besides.
_BOUND = 2.0**-21
_ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_ROWS = (1, 4, 17, 65)
#: rows, cols, block_size: aligned; ragged with blocks that cross rows; one block larger than the weight.
_SHAPES = ((256, 512, 64), (37, 150, 32), (5, 9, 64))


@dataclass(frozen=True)
class Case:
    """One product: its largest error as a part of its bound, and whether it holds it."""

    kernel: str
    case: str
    ratio: float

    @property
    def ok(self) -> bool:
        """Whether every element is inside the bound."""
        return self.ratio <= 1


@dataclass(frozen=True)
class SelfTest:
    """All cases of a machine, and the backends that are not on it with the reason."""

    machine: str
    cases: tuple[Case, ...]
    unavailable: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The document of `selftest --json`."""
        cases = [{"kernel": c.kernel, "case": c.case, "ratio": c.ratio, "ok": c.ok} for c in self.cases]
        return {"machine": self.machine, "cases": cases, "unavailable": dict(self.unavailable)}


def selftest(device: mx.Device, kind: str, progress: Progress | None = None) -> SelfTest:
    """Run every kernel that serves a device of this kind ("metal", "cuda" or "cpu"), the reference included."""
    modules = {name: module for name, module in kernels.backends().items() if name in (kind, "reference")}
    unavailable = dict.fromkeys({kind} - set(modules), "this version has no kernels of its own for it")
    works = {name: module for name, module in modules.items() if module.available()}
    unavailable |= {name: "its kernels do not work here" for name in modules if name not in works}
    todo = [(f"{name}/{kernel}", module, kernel) for name, module in works.items() for kernel in module.KERNELS]
    cases = []
    with mx.stream(device):
        for done, (name, module, kernel) in enumerate(todo):
            for weight, dtype in _weights():
                for count in _ROWS:
                    case = _check(name, module, kernel, weight, dtype, count)
                    cases += [case] if case is not None else []
            if progress is not None:
                progress("kernels", done + 1, len(todo))
    return SelfTest(f"{device} ({kind})", tuple(cases), unavailable)


def _weights() -> Iterator[tuple[Lookup4Weight | QmmWeight, str]]:
    """Weights of every orientation, rounding and shape, with the type of x: seeded, so that two machines agree."""
    random = np.random.default_rng(4)
    for rows, cols, size in _SHAPES:
        blocks = -(-rows * cols // size)
        packed = random.integers(0, 256, blocks * size // 2, dtype=np.uint8)
        scales = random.uniform(0.01, 1, blocks).astype(np.float32)
        for perm in ((0, 1), (1, 0)):
            for rounding, dtype in (
                ("float32", "float32"),
                ("float16", "float32"),
                ("float16", "float16"),
                ("bfloat16", "bfloat16"),
            ):
                yield Lookup4Weight(packed, scales, NF4, rows, cols, size, perm, weight_dtype=rounding), dtype
        grid = (rows, -(-cols // size))
        nibbles = random.integers(0, 256, (*grid, size // 2), dtype=np.uint8)
        zero_points = random.integers(0, 16, grid, dtype=np.uint8)
        for dtype in FLOAT_DTYPES:
            steps = random.uniform(0.01, 1, grid).astype(FLOAT_DTYPES[dtype])
            yield QmmWeight(nibbles, steps, zero_points, cols, rows, size), dtype


def _check(
    name: str, module: Any, kernel: str, weight: Lookup4Weight | QmmWeight, dtype: str, count: int
) -> Case | None:
    """One product against float64, x with a cancelling pair in each row; None where the kernel refuses it."""
    matrix, what = _exact(weight)
    matrix = matrix.astype(FLOAT_DTYPES[dtype]).astype(np.float64)  # [K, N]
    values = np.random.default_rng(count).standard_normal((count, len(matrix))).astype(FLOAT_DTYPES[dtype])
    values[:, 1] = -values[:, 0]
    x = mx.array(values.astype(np.float32)).astype(kernels.MLX_FLOAT[dtype])
    if module.refuses(x, weight) is not None:
        return None
    product = module.lookup4_matmul if isinstance(weight, Lookup4Weight) else module.qmm
    result = np.array(product(x, weight, kernel).astype(mx.float32)).astype(np.float64)
    exact = values.astype(np.float64) @ matrix
    magnitude = np.abs(values.astype(np.float64)) @ np.abs(matrix)
    bound = _BOUND * magnitude + _ROUNDING[dtype] * np.abs(exact)
    ratio = float(np.max(np.abs(result - exact) / bound)) if result.shape == exact.shape else np.inf
    return Case(name, f"{what}, {weight.weight_dtype} weight, {dtype} x, M {count}", ratio)


def _exact(weight: Lookup4Weight | QmmWeight) -> tuple[np.ndarray, str]:
    """The matrix [K, N] that a product multiplies by, decoded on the host, and what it is in words."""
    if isinstance(weight, QmmWeight):
        return decode_qmm(weight).T, f"affine {weight.N} x {weight.K}, block {weight.block_size}"
    what = f"lookup {weight.rows} x {weight.cols}, block {weight.block_size}, perm {list(weight.perm)}"
    return decode(weight).transpose(weight.perm), what
