"""4-bit products and what they must be: weights, their matrices in float64 from NumPy alone, data that is hard to sum.

What every backend's tests are held against; nothing here calls a kernel, a decode of ours or a BLAS where it matters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lut4tool import formats
from lut4tool.formats import DOMAIN, Lookup4Weight, QmmWeight

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ONNX = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
#: What |y - exact| may be, in units of sum |x||w|; a half also has its own last rounding.
BOUND = 2.0**-21
ULP = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Half the step of subnormal numbers.
LEAST = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}


def lookup4(rows: int, cols: int, block: int = 64, seed: int = 0, **facts: Any) -> Lookup4Weight:
    rng = np.random.default_rng(seed)
    blocks = -(-rows * cols // block)
    packed = rng.integers(0, 256, (rows * cols + 1) // 2, dtype=np.uint8)
    scales = (rng.random(blocks) + 0.5).astype(facts.pop("scales_dtype", np.float32))
    return Lookup4Weight(packed, scales, facts.pop("codebook", formats.NF4), rows, cols, block, **facts)


def dense(weight: Lookup4Weight) -> np.ndarray:
    """The matrix [K, N] in float64, from the definition alone."""
    high, low = weight.packed >> 4, weight.packed & 15
    codes = np.stack((high, low) if weight.high_nibble_first else (low, high), 1).reshape(-1)[
        : weight.rows * weight.cols
    ]
    scales = np.repeat(weight.scales.astype(np.float32), weight.block_size)[: codes.size]
    with np.errstate(all="ignore"):
        values = (weight.codebook.astype(np.float32)[codes] * scales).astype(DTYPES[weight.weight_dtype])
    return values.astype(np.float64).reshape(weight.rows, weight.cols).transpose(weight.perm)


def product_model(name: str, leaves: dict[str, np.ndarray], attributes: dict[str, Any], dtype: str) -> onnx.ModelProto:
    node = helper.make_node(name, ["x", *leaves], ["y"], "product", domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", ONNX[dtype], None)],
        [helper.make_tensor_value_info("y", ONNX[dtype], None)],
        [numpy_helper.from_array(array, leaf) for leaf, array in leaves.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def forward_and_adjoint(weights: list[Lookup4Weight], dtype: str = "float32") -> onnx.ModelProto:
    """x times each weight, then that times it transposed; weights of the same arrays are the same initializers."""
    nodes, leaves, value = [], {}, "x"
    for place, weight in enumerate(weights):
        names = []
        for leaf in ("packed", "scales", "codebook"):
            array = getattr(weight, leaf)
            names.append(leaf + str(id(array)))
            leaves[names[-1]] = array
        for perm in (weight.perm, weight.perm[::-1]):
            facts = dataclasses.replace(weight, perm=perm).attributes(dtype)
            result = f"y{place}{perm[0]}"
            nodes.append(helper.make_node("Lookup4MatMul", [value, *names], [result], result, domain=DOMAIN, **facts))
            value = result
    ends = [helper.make_tensor_value_info(name, ONNX[dtype], [None, None]) for name in ("x", value)]
    arrays = [numpy_helper.from_array(array, name) for name, array in leaves.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], arrays)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def qmm(n: int, k: int, block: int, scales_dtype: Any = np.float32, points: str = "codes", seed: int = 0) -> QmmWeight:
    rng = np.random.default_rng(seed)
    grid = (n, -(-k // block))
    zero_points = {
        "codes": rng.integers(0, 16, grid, dtype=np.uint8),
        "one": np.full((1, 1), 8, np.uint8),
        "float": (15 * rng.random(grid)).astype(scales_dtype),
    }[points]
    packed = rng.integers(0, 256, (*grid, block // 2), dtype=np.uint8)
    return QmmWeight(packed, (rng.random(grid) + 0.1).astype(scales_dtype), zero_points, k, n, block)


def dense_qmm(weight: QmmWeight) -> np.ndarray:
    """The matrix [K, N] in float64, from the definition alone."""
    codes = np.stack((weight.packed & 15, weight.packed >> 4), -1).reshape(*weight.scales.shape, weight.block_size)
    steps = (codes.astype(np.float32) - weight.zero_points.astype(np.float32)[..., None]).astype(weight.scales.dtype)
    product = steps.astype(np.float64) * weight.scales.astype(np.float64)[..., None]  # exact: 2 x 24 bits
    return product.astype(weight.scales.dtype).astype(np.float64).reshape(weight.N, -1)[:, : weight.K].T


def check(y: np.ndarray, x: np.ndarray, matrix: np.ndarray, dtype: str = "float32") -> None:
    """Every element within the bound of its own terms, and of its type's last rounding."""
    wide = x.astype(np.float64)
    exact, terms = wide @ matrix, np.abs(wide) @ np.abs(matrix)
    assert y.shape == exact.shape
    bound = BOUND * terms + ULP[dtype] * np.abs(exact) * (1 + 2.0**-10) + LEAST[dtype]
    assert np.all(np.abs(y.astype(np.float64) - exact) <= bound)


def values(dtype: str, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


# -- data that is hard to sum


def adversary(name: str, m: int, k: int, seed: int) -> np.ndarray:
    """Rows of x that make running float32 sums err in one direction, cancel, or lose what is small."""
    rng = np.random.default_rng(seed)
    if name == "equal":
        return np.broadcast_to((0.1 + rng.random((m, 1))).astype(np.float32), (m, k)).copy()
    if name == "positive":
        return rng.random((m, k), np.float32)
    if name == "cancelling":
        half = rng.standard_normal((m, k // 2), np.float32)
        return np.concatenate([half, -half], axis=1)
    if name == "mixed":
        return (rng.standard_normal((m, k)) * 10.0 ** rng.uniform(-8, 8, (m, k))).astype(np.float32)
    # One large term a run, then terms a little over half its last place: each addition rounds up by nearly as much.
    run, period = (int(part) for part in name.split("/"))
    large = np.arange(k) // run % period == 0
    return np.tile(np.where(large, 1, 2.0**-24 * (1 + 2.0**-9)).astype(np.float32), (m, 1))


ADVERSARIES = ["equal", "positive", "cancelling", "mixed"]
ADVERSARIES += [f"{run}/{period}" for run in (1, 2, 16, 32, 64, 128) for period in (4, 32)]


# -- NaN and Inf

SPECIALS = [(where, special) for where in ("x", "codebook", "scales") for special in (np.nan, np.inf, -np.inf)]


def with_special(
    weight: Lookup4Weight, m: int, where: str, special: float, dtype: str = "float32"
) -> tuple[np.ndarray, Lookup4Weight]:
    """Rows of x and the weight, one of which has one NaN or Inf; x has a zero too, as 0 * Inf is NaN."""
    x = values(dtype, m, weight.shape[0])
    x[0, 3] = 0
    if where == "x":
        x[-1, 5] = special
        return x, weight
    leaf = getattr(weight, where).copy()
    leaf[2] = special
    return x, dataclasses.replace(weight, **{where: leaf})


def check_special(y: np.ndarray, x: np.ndarray, weight: Lookup4Weight, tolerance: float = 1e-4) -> None:
    """NaN, Inf and -Inf where IEEE 754 has them, and the other values about right; no BLAS in the oracle."""
    with np.errstate(all="ignore"):
        exact = (x.astype(np.float64)[:, :, None] * dense(weight)).sum(axis=1)  # [M, K, N] before the sum
    assert not np.isfinite(exact).all()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=tolerance, atol=tolerance)
