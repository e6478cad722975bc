"""Every kernel of the machine it runs on against float64 on the host: a new machine's first minute."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from lut4tool import formats
from lut4tool.formats import FLOAT_DTYPES, Lookup4Weight, QmmWeight
from lut4tool.kernels import MLX_FLOAT, MOST_OF_A_REASON, backends, named

Weight = Lookup4Weight | QmmWeight

#: What |y - exact| may be, in units of sum |x||w|, and in units of |exact| for the last rounding to a half.
BOUND = 2.0**-21
LAST_ROUNDING: Mapping[str, float] = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}

#: For each kernel that a backend picks by M: a GEMV, a tile, a decode before a dense product.
ROWS_OF_X = (0, 1, 4, 17, 130, 520)


@dataclass(frozen=True)
class Case:
    """One product: the largest error as a part of what is allowed, so that up to 1 is right."""

    kernel: str
    case: str
    ratio: float

    @property
    def ok(self) -> bool:
        """Whether the bound holds (a NaN does not)."""
        return self.ratio <= 1


@dataclass(frozen=True)
class SelfTest:
    """What was tried, and the backends that are not on this machine, with the reason."""

    machine: str
    cases: Sequence[Case]
    unavailable: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The document of `selftest --json`."""
        rows = [{"kernel": c.kernel, "case": c.case, "ratio": c.ratio, "ok": c.ok} for c in self.cases]
        return {"machine": self.machine, "cases": rows, "unavailable": dict(self.unavailable)}


def selftest(device: mx.Device, kind: str, progress: Callable[[str, int, int], None] | None = None) -> SelfTest:
    """Run every kernel of the backends for `kind` ("metal", "cuda", "cpu") and the reference, on `device`."""
    unavailable, ready = {}, []
    for name in dict.fromkeys((kind, "reference")):
        module = backends().get(name)
        if module is not None and module.available():
            ready.append((named(name, module), module))
        else:
            unavailable[name] = (
                "this version has no kernels of its own for it" if module is None else "it does not work"
            )
    weights = list(_weights())
    total, done, cases = len(ready) * len(weights), 0, list[Case]()
    with mx.stream(device):
        for name, module in ready:
            for label, dtype, weight in weights:
                cases += _products(name, module, label, dtype, weight)
                done += 1
                if progress:
                    progress("products", done, total)
    return SelfTest(f"{platform.platform()}, {platform.machine()}, {kind}", cases, unavailable)


def _products(name: str, module: Any, label: str, dtype: str, weight: Weight) -> Iterator[Case]:
    matrix = _dense(weight)
    for m in ROWS_OF_X:
        x = np.random.default_rng(m).standard_normal((m, len(matrix))).astype(FLOAT_DTYPES[dtype])
        given = mx.array(x)
        if refusal := module.refuses(given, weight):
            yield Case(name, f"{label}, M {m}: refused, {refusal}", 0.0)
            continue
        product = module.lookup4_matmul if isinstance(weight, Lookup4Weight) else module.qmm
        what = f"{label}, {dtype}, M {m}"
        try:
            y = np.array(product(given, weight).astype(mx.float32)).astype(np.float64)
        except RuntimeError as error:  # a kernel that does not compile or run here
            yield Case(name, f"{what}: {' '.join(str(error).split())[:MOST_OF_A_REASON]}", float("inf"))
            continue
        yield Case(name, what, _ratio(y, x.astype(np.float64), matrix, dtype))
    if isinstance(weight, Lookup4Weight):
        decoded = np.array(module.lookup4_decode(weight).astype(mx.float32))
        exact = formats.decode(weight).astype(np.float32)
        yield Case(name, f"{label}, {dtype}, decoded", 0.0 if np.array_equal(decoded, exact) else float("inf"))


def _ratio(y: np.ndarray, x: np.ndarray, matrix: np.ndarray, dtype: str) -> float:
    exact, terms = x @ matrix, np.abs(x) @ np.abs(matrix)
    if y.shape != exact.shape:
        return float("inf")
    allowed = BOUND * terms + LAST_ROUNDING[dtype] * np.abs(exact) * (1 + 2.0**-10)
    return float(np.max(np.abs(y - exact) / allowed, initial=0.0))


def _dense(weight: Weight) -> np.ndarray:
    """The matrix [K, N] in float64, by the NumPy decode."""
    if isinstance(weight, Lookup4Weight):
        return formats.decode(weight).astype(np.float64).transpose(weight.perm)
    return formats.decode_qmm(weight).astype(np.float64).T


def _weights() -> Iterator[tuple[str, str, Weight]]:
    """Both orientations, blocks that cross rows, ragged sizes and both nibble orders, in every type."""
    rng = np.random.default_rng(0)
    for rows, cols, block in ((128, 256, 64), (96, 100, 32), (33, 70, 16)):
        packed = rng.integers(0, 256, (rows * cols + 1) // 2, dtype=np.uint8)
        scales = (rng.random(-(-rows * cols // block)) + 0.5).astype(np.float32)
        for perm in ((0, 1), (1, 0)):
            for dtype in MLX_FLOAT:
                high_first, sizes = block != 32, (rows, cols, block)
                weight = Lookup4Weight(packed, scales, formats.NF4, *sizes, perm, high_first, dtype)
                yield f"Lookup4MatMul {rows} x {cols}, block {block}, perm {list(perm)}", dtype, weight
    for n, k, block in ((128, 256, 32), (40, 100, 16)):
        grid = (n, -(-k // block))
        packed = rng.integers(0, 256, (*grid, block // 2), dtype=np.uint8)
        points = rng.integers(0, 16, grid, dtype=np.uint8)
        for dtype in MLX_FLOAT:
            scales = (rng.random(grid) + 0.5).astype(FLOAT_DTYPES[dtype])
            yield f"QMM {n} x {k}, block {block}", dtype, QmmWeight(packed, scales, points, k, n, block)
