"""4-bit products against a float64 oracle written here from NumPy alone; the plan says which kernel served them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from onnx import TensorProto, helper

from lut4tool import formats, kernels, native
from lut4tool.errors import Lut4Error
from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import reference
from lut4tool.runtime import RunError, Runtime
from tests.products import (
    BOUND,
    DTYPES,
    SPECIALS,
    check,
    check_special,
    dense,
    dense_qmm,
    lookup4,
    product_model,
    qmm,
    values,
    with_special,
)

ROOT = Path(__file__).parents[2]


def runtime_of(weight: Lookup4Weight | QmmWeight, dtype: str = "float32") -> Runtime:
    leaves = {"packed": weight.packed, "scales": weight.scales}
    if isinstance(weight, Lookup4Weight):
        leaves["codebook"], name = weight.codebook, "Lookup4MatMul"
    else:
        leaves["zero_points"], name = weight.zero_points, "QMM"
    return Runtime(product_model(name, leaves, weight.attributes(dtype), dtype), device="cpu")


@pytest.fixture(autouse=True)
def _the_reference(monkeypatch: Any) -> None:
    """The tests here hold the reference, which is what remains where no backend serves."""
    monkeypatch.setenv("LUT4TOOL_DISABLE", "cpu")


def run(runtime: Runtime, x: np.ndarray) -> np.ndarray:
    (y,) = runtime.run(None, {"x": x})
    assert {node: choice.name for node, choice in runtime.kernels.items()} == {"product": "reference"}
    assert y.dtype == x.dtype
    return y


@pytest.mark.parametrize("m", [0, 1, 2, 17, 130])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("rows_cols_block", [(96, 64, 64), (33, 50, 16), (7, 3, 4), (1, 1, 2), (5, 9, 4096)], ids=str)
def test_lookup4_of_every_shape(m: int, perm: tuple[int, int], rows_cols_block: tuple[int, int, int]) -> None:
    weight = lookup4(*rows_cols_block, perm=perm)
    x = values("float32", m, weight.shape[0])
    check(run(runtime_of(weight), x), x, dense(weight))


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("panel", [1, 100, 333, 1000])
def test_panels_of_any_size_give_the_same_bytes(perm: tuple[int, int], panel: int, monkeypatch: Any) -> None:
    """Panels that do not begin at a block, hold less than a row, or end in a part of one."""
    weight = lookup4(37, 50, 16, perm=perm)
    x = values("float32", 3, weight.shape[0])
    whole = run(runtime_of(weight), x)
    monkeypatch.setattr(reference, "PANEL", panel)
    check(run(runtime_of(weight), x), x, dense(weight))
    if perm == (1, 0):  # every output is then one sum over K, whatever the panel
        np.testing.assert_array_equal(run(runtime_of(weight), x), whole)


@pytest.mark.parametrize(
    "facts",
    [
        {"high_nibble_first": False},
        {"codebook": formats.FP4},
        {"codebook": formats.NF4.astype(np.float16), "scales_dtype": np.float16},
        {"scales_dtype": ml_dtypes.bfloat16},
        {"weight_dtype": "float16"},
        {"weight_dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_lookup4_of_every_kind(facts: dict[str, Any], perm: tuple[int, int]) -> None:
    weight = lookup4(40, 48, 32, perm=perm, **facts)
    x = values("float32", 5, weight.shape[0])
    check(run(runtime_of(weight), x), x, dense(weight))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 17])
def test_half_products_round_the_weight_as_proved_and_the_sum_once(dtype: str, perm: tuple[int, int], m: int) -> None:
    weight = lookup4(48, 40, 32, perm=perm, weight_dtype=dtype)
    x = values(dtype, m, weight.shape[0])
    check(run(runtime_of(weight, dtype), x), x, dense(weight), dtype)


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 4])
def test_sums_that_cancel_are_within_the_bound(perm: tuple[int, int], m: int) -> None:
    """Many equal terms, then their opposite: a running float32 sum, shown too, leaves the bound far behind."""
    k, n = 8192, 24
    rows, cols = (k, n) if perm == (0, 1) else (n, k)
    scales = np.full(rows * cols // 64, 0.7, np.float32)
    weight = Lookup4Weight(np.full(rows * cols // 2, 255, np.uint8), scales, formats.NF4, rows, cols, 64, perm)
    x = np.full((m, k), 0.1, np.float32)
    x[:, 3 * k // 4 :] = -0.3
    matrix = dense(weight)
    terms = (x[0].astype(np.float64) * matrix[:, 0]).astype(np.float32)
    running = np.cumsum(terms, dtype=np.float32)[-1]
    assert abs(running - x[0].astype(np.float64) @ matrix[:, 0]) > 10 * BOUND * np.abs(terms).sum()
    check(run(runtime_of(weight), x), x, matrix)


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(("where", "special"), SPECIALS)
def test_nan_and_inf_go_through_as_ieee_says(perm: tuple[int, int], m: int, where: str, special: float) -> None:
    x, weight = with_special(lookup4(24, 16, 8, perm=perm), m, where, special)
    check_special(run(runtime_of(weight), x), x, weight)


def test_overflow_of_the_last_rounding_is_inf() -> None:
    weight = lookup4(16, 8, 8, perm=(0, 1))
    x = np.full((1, 16), 3e38, np.float32)
    exact = x.astype(np.float64) @ dense(weight)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run(runtime_of(weight), x), exact.astype(np.float32))


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 0, 3), (2, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", ["lookup4", "qmm"])
def test_leading_dimensions_are_those_of_matmul(leading: tuple[int, ...], name: str) -> None:
    weight = lookup4(32, 24, 16) if name == "lookup4" else qmm(24, 32, 16)
    matrix = dense(weight) if isinstance(weight, Lookup4Weight) else dense_qmm(weight)
    x = values("float32", *leading, 32)
    check(run(runtime_of(weight), x), x, matrix)


def test_weights_that_are_no_constants_are_read_in_every_run() -> None:
    weights = [lookup4(16, 24, 8, seed=seed) for seed in (0, 1)]
    leaves = {"packed": weights[0].packed, "scales": weights[0].scales, "codebook": formats.NF4}
    proto = product_model("Lookup4MatMul", leaves, weights[0].attributes("float32"), "float32")
    for leaf, kind in (("packed", TensorProto.UINT8), ("scales", TensorProto.FLOAT)):
        proto.graph.input.append(helper.make_tensor_value_info(leaf, kind, None))
    runtime, x = Runtime(proto, device="cpu"), values("float32", 2, 16)
    for weight in (weights[1], weights[0], weights[1]):
        (y,) = runtime.run(None, {"x": x, "packed": weight.packed, "scales": weight.scales})
        check(y, x, dense(weight))
    with pytest.raises(RunError, match=r"node 'product' \(Lookup4MatMul\) failed: packed must have 192 to 192 bytes"):
        runtime.run(None, {"x": x, "packed": weights[0].packed[:5], "scales": weights[0].scales})


@pytest.mark.parametrize("points", ["codes", "one", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize("shape", [(24, 64, 32), (5, 33, 16), (1, 1, 2)], ids=str)
def test_qmm(points: str, dtype: str, m: int, shape: tuple[int, int, int]) -> None:
    weight = qmm(*shape, scales_dtype=DTYPES[dtype], points=points)
    x = values(dtype, m, weight.K)
    check(run(runtime_of(weight, dtype), x), x, dense_qmm(weight), dtype)


@pytest.mark.parametrize("most", [0, reference.MOST_BYTES])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_serves_on_a_gpu(dtype: str, perm: tuple[int, int], most: int, monkeypatch: Any) -> None:
    """Sums of 32 terms in a compensated tree, made by MLX on whatever device is here; packed data there, or not."""
    monkeypatch.setattr(reference, "_on_gpu", lambda: True)
    monkeypatch.setattr(reference, "MOST_BYTES", most)
    monkeypatch.setattr(reference, "PANEL", 1000)
    weight = lookup4(77, 150, 16, perm=perm, weight_dtype=dtype)
    x = values(dtype, 3, weight.shape[0])
    y = reference.lookup4_matmul(mx.array(x.astype(np.float32)).astype(kernels.MLX_FLOAT[dtype]), weight)
    check(np.array(y.astype(mx.float32)), x, dense(weight), dtype)
    packed, *_ = reference._ON_DEVICE[weight]
    assert isinstance(packed, np.ndarray if most == 0 else mx.array)


# -- choice


def test_the_choice_says_why_the_others_do_not_serve() -> None:
    choice = runtime_of(lookup4(8, 8)).kernels["product"]
    assert choice.name == "reference"
    assert list(choice.refusals) == ["cpu"]


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("LUT4TOOL_KERNEL", "fast", "LUT4TOOL_KERNEL is 'fast'; it takes gemv, tile, decode, reference"),
        ("LUT4TOOL_KERNEL", "gemv", "'gemv', which LUT4TOOL_KERNEL asks for"),
        ("LUT4TOOL_DISABLE", "cpu,rocm", "LUT4TOOL_DISABLE has 'rocm'; it takes metal, cuda, cpu"),
    ],
)
def test_switches_that_cannot_be_honoured_are_errors(
    variable: str, value: str, sentence: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Lut4Error, match="product.*" + sentence):
        runtime_of(lookup4(8, 8))


class _Backend:
    """A backend that works, for the choice: it counts what it serves."""

    KERNELS = ("gemv", "tile")

    def __init__(self) -> None:
        self.served: list[str | None] = []

    def available(self) -> bool:
        return True

    def refuses(self, x: mx.array, weight: Lookup4Weight) -> str | None:
        return "rows of fewer than 8" if weight.rows < 8 else None

    def lookup4_matmul(self, x: mx.array, weight: Lookup4Weight, kernel: str | None = None) -> mx.array:
        self.served.append(kernel)
        return reference.lookup4_matmul(mx.array(x), weight)


def test_a_backend_is_used_forced_refused_and_turned_off(monkeypatch: Any) -> None:
    backend = _Backend()
    monkeypatch.delenv("LUT4TOOL_DISABLE")
    monkeypatch.setattr(kernels, "backends", lambda: {"cpu": backend, "reference": reference})
    x = values("float32", 1, 8)

    def name(rows: int = 8) -> str:
        runtime = runtime_of(lookup4(rows, 8))
        runtime.run(None, {"x": x[:, :rows]})
        return str(runtime.kernels["product"])

    assert name() == "cpu"
    assert name(rows=4) == "reference; not cpu: rows of fewer than 8"
    monkeypatch.setenv("LUT4TOOL_KERNEL", "tile")
    assert name() == "cpu/tile"
    monkeypatch.setenv("LUT4TOOL_KERNEL", "reference")
    assert name().startswith("reference; not cpu: it has no kernel 'reference'")
    monkeypatch.delenv("LUT4TOOL_KERNEL")
    monkeypatch.setenv("LUT4TOOL_DISABLE", "cpu")
    assert name() == "reference; not cpu: turned off by LUT4TOOL_DISABLE"
    assert backend.served == [None, "tile"]


# -- memory


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_numpy_never_holds_a_dense_weight(perm: tuple[int, int]) -> None:
    weight = lookup4(4096, 4096, perm=perm)  # 8 MB packed, 64 MB in float32
    runtime, x = runtime_of(weight), values("float32", 1, 4096)
    runtime.run(None, {"x": x})
    tracemalloc.start()
    run(runtime, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A panel in float32 and in float64, and NumPy's own temporaries where it is NumPy that decodes.
    assert peak < (16 if native.compiled() else 24) * 2**20
