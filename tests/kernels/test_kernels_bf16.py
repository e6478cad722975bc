"""Products in bfloat16 on the matrix unit (native/product_bf16.cpp) against float64; what it leaves to others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import runtime_of

from lut4tool import formats, native
from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import cpu, thresholds
from tests.products import (
    ADVERSARIES,
    DTYPES,
    SPECIALS,
    adversary,
    check_special,
    dense,
    dense_qmm,
    lookup4,
    qmm,
    values,
    with_special,
)

BFLOAT16 = DTYPES["bfloat16"]
HERE = native.compiled() and native.Matrix(lookup4(32, 32, 32, weight_dtype="bfloat16")).serves_bf16
pytestmark = pytest.mark.skipif(not HERE, reason="this machine has no matrix unit for bfloat16 (AMX)")
PERMS = [(1, 0), (0, 1)]


def weight_of(*shape: int, outputs_first: bool = True, **facts: object) -> Lookup4Weight:
    """A weight [outputs, depth] of these sizes along K, [depth, outputs] along N, that is rounded to bfloat16."""
    return lookup4(*shape, perm=(1, 0) if outputs_first else (0, 1), weight_dtype="bfloat16", **facts)


def product(x: np.ndarray, weight: Lookup4Weight | QmmWeight, threads: int = 2, made: bool = True) -> np.ndarray:
    """The product by the unit, which made it (or did not, where so told)."""
    y = np.full((len(x), weight.shape[1] if isinstance(weight, Lookup4Weight) else weight.N), np.nan, BFLOAT16)
    assert native.Matrix(weight).multiply_bf16(x, y, threads) is made
    return y


def check(y: np.ndarray, x: np.ndarray, matrix: np.ndarray) -> None:
    """Within the unit's chains of float32 sums, and the last rounding."""
    wide = x.astype(np.float64)
    exact, terms = wide @ matrix, np.abs(wide) @ np.abs(matrix)
    summed = (len(matrix) / 32 + 17) * 2.0**-24 * terms
    assert y.dtype == BFLOAT16
    assert y.shape == exact.shape
    assert np.all(np.abs(y.astype(np.float64) - exact) <= summed + 2.0**-8 * (np.abs(exact) + summed))


#: rows, cols, block: of a run, of several, of parts; across rows; tails of a panel, of a unit of outputs, of a pair.
SHAPES = [(64, 256, 64), (32, 32, 32), (37, 96, 32), (100, 640, 128), (48, 4128, 32), (259, 352, 64), (70, 96, 8192),
          (160, 96, 96), (1, 32, 32), (513, 160, 64)]  # fmt: skip


@pytest.mark.parametrize("m", [1, 2, 16, 17, 33, 50])
@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lookup4_of_every_shape(shape: tuple[int, int, int], perm: tuple[int, int], m: int) -> None:
    weight = weight_of(*shape, outputs_first=perm == (1, 0), high_nibble_first=m % 2 == 0)
    x = values("bfloat16", m, weight.shape[0])
    check(product(x, weight), x, dense(weight))


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("codebook", [formats.NF4, formats.FP4, formats.NF4.astype(np.float16)])
@pytest.mark.parametrize("perm", PERMS)
def test_lookup4_of_every_kind(scales: str, codebook: np.ndarray, perm: tuple[int, int]) -> None:
    weight = weight_of(96, 192, 32, outputs_first=perm == (1, 0), scales_dtype=DTYPES[scales], codebook=codebook)
    x = values("bfloat16", 5, weight.shape[0])
    check(product(x, weight), x, dense(weight))


@pytest.mark.parametrize("points", ["codes", "one", "float"])
@pytest.mark.parametrize("m", [1, 7, 33])
@pytest.mark.parametrize(
    "shape", [(40, 256, 32), (24, 640, 128), (5, 333, 32), (70, 100, 64), (5, 33, 32), (200, 1001, 96)]
)
def test_qmm(points: str, m: int, shape: tuple[int, int, int]) -> None:
    weight = qmm(*shape, scales_dtype=BFLOAT16, points=points)
    x = values("bfloat16", m, weight.K)
    check(product(x, weight), x, dense_qmm(weight))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    outputs_first = data.draw(st.booleans(), "outputs first")
    rows, cols = data.draw(st.integers(1, 600), "rows"), 32 * data.draw(st.integers(1, 20), "cols / 32")
    block = data.draw(st.sampled_from([32, 64, 96, 128, 256, 1 << 15]), "block")
    m, threads = data.draw(st.integers(1, 70), "m"), data.draw(st.integers(1, 3), "threads")
    weight = weight_of(rows, cols, block, outputs_first=outputs_first, seed=m)
    weight = dataclasses.replace(weight, high_nibble_first=data.draw(st.booleans(), "high first"))
    x = values("bfloat16", m, weight.shape[0])
    check(product(x, weight, threads), x, dense(weight))


@pytest.mark.parametrize("perm", PERMS)
def test_more_rows_than_are_packed_at_a_time(perm: tuple[int, int]) -> None:
    weight = weight_of(96, 160, 32, outputs_first=perm == (1, 0))
    x = values("bfloat16", 1100, weight.shape[0])
    check(product(x, weight), x, dense(weight))
    assert product(x[:0], weight).shape == (0, weight.shape[1])


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("m", [3, 40])
def test_the_bytes_do_not_depend_on_threads(perm: tuple[int, int], m: int) -> None:
    """Nor on the outputs of a unit, which do."""
    weight = weight_of(*((4608, 352) if perm == (1, 0) else (352, 4608)), 32, outputs_first=perm == (1, 0))
    x = values("bfloat16", m, weight.shape[0])
    one = product(x, weight, 1)
    check(one, x, dense(weight))
    np.testing.assert_array_equal(product(x, weight, 2), one)


# -- exactness


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("k", [14336, 65536])
def test_the_bound_holds_for_adversaries(perm: tuple[int, int], k: int) -> None:
    n = 32
    sizes = (n, k) if perm == (1, 0) else (k, n)
    packed = np.full(n * k // 2, 0xFF, np.uint8)  # the codebook's last entry, 1
    for seed, name in enumerate(ADVERSARIES):
        scales = np.full(n * k // 32, 0.7 if name in ADVERSARIES[:4] else 1, np.float32)
        weight = Lookup4Weight(packed, scales, formats.NF4, *sizes, 32, perm, weight_dtype="bfloat16")
        x = adversary(name, 3, k, seed).astype(BFLOAT16)
        check(product(x, weight), x, dense(weight))


def test_weights_are_rounded_as_proved() -> None:
    """x of one 1 a row gives the weight itself, bit for bit; scales that make ties and both ways of rounding."""
    weight = weight_of(64, 128, 32)
    scales = np.random.default_rng(3).random(weight.scales.shape).astype(np.float32)
    scales[:16] = 1 + 2.0**-8 * np.arange(16)
    weight = dataclasses.replace(weight, scales=scales, codebook=np.arange(-8, 8, dtype=np.float32))
    y = product(np.eye(128, dtype=np.float32).astype(BFLOAT16), weight)
    np.testing.assert_array_equal(y.astype(np.float64), dense(weight))


# -- what the unit would take for zero


def small(exponent: int, perm: tuple[int, int]) -> tuple[np.ndarray, Lookup4Weight]:
    """Products that are multiples of 2^exponent, no better: the smallest x and w have all their digits."""
    weight = weight_of(64, 96, 32, outputs_first=perm == (1, 0))
    codebook = (1 + np.arange(16) / 128).astype(np.float32)
    scales = np.full(weight.scales.shape, 2.0**-50, np.float32)
    weight = dataclasses.replace(weight, codebook=codebook, scales=scales)
    x = np.full((5, weight.shape[0]), 2.0**60, np.float32)
    x[:, ::7] = (1 + 2.0**-7) * 2.0 ** (exponent + 50 + 14)
    x[2] = 0
    return x.astype(BFLOAT16), weight


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize(("exponent", "made"), [(-126, True), (-127, False), (-140, False)])
def test_products_that_may_be_subnormal_are_left_to_others(exponent: int, made: bool, perm: tuple[int, int]) -> None:
    x, weight = small(exponent, perm)
    product(x, weight, made=made)
    x[:, np.arange(x.shape[1]) % 7 != 0] = 0  # only the small ones
    y = product(x, weight, made=made) if made else cpu.lookup4_matmul(x, weight)
    exact = x.astype(np.float64) @ dense(weight)
    assert np.all(y.astype(np.float64)[[0, 1, 3, 4]] > 0)
    assert np.all(np.abs(y.astype(np.float64) - exact) <= 2.0**-8 * exact + 2.0**-134)


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("where", ["x", "weight"])
def test_operands_that_are_subnormal_are_left_to_others(where: str, perm: tuple[int, int]) -> None:
    """One of them, times something large: a product that counts."""
    weight = weight_of(64, 96, 32, outputs_first=perm == (1, 0))
    x = np.zeros((3, weight.shape[0]), BFLOAT16)
    x[1, 5] = 2.0**-130 if where == "x" else 2.0**120
    scales = np.full(weight.scales.shape, 2.0**120 if where == "x" else 2.0**-130, np.float32)
    weight = dataclasses.replace(weight, scales=scales, codebook=np.ones(16, np.float32))
    product(x, weight, made=False)
    want = np.zeros((3, weight.shape[1]))
    want[1] = 2.0**-10
    np.testing.assert_array_equal(cpu.lookup4_matmul(x, weight).astype(np.float64), want)


# -- IEEE


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("m", [1, 3, 30])
@pytest.mark.parametrize(("where", "special"), SPECIALS)
def test_nan_and_inf_go_through_as_ieee_says(perm: tuple[int, int], m: int, where: str, special: float) -> None:
    x, weight = with_special(weight_of(96, 64, 32, outputs_first=perm == (1, 0)), m, where, special, "bfloat16")
    if where == "x":
        check_special(product(x, weight), x, weight, 2e-2)
    check_special(cpu.lookup4_matmul(x, weight), x, weight, 2e-2)


@pytest.mark.parametrize("perm", PERMS)
def test_a_sum_that_overflows_only_on_the_way_is_right(perm: tuple[int, int]) -> None:
    weight = weight_of(64, 64, 32, outputs_first=perm == (1, 0))
    x = np.full((3, 64), 2e38, np.float32).astype(BFLOAT16)
    product(x, weight, made=False)
    with np.errstate(over="ignore"):
        want = (x.astype(np.float64) @ dense(weight)).astype(BFLOAT16).astype(np.float64)
    assert np.isinf(want).any()
    assert np.isfinite(want).any()
    np.testing.assert_allclose(cpu.lookup4_matmul(x, weight).astype(np.float64), want, rtol=1e-2)


def test_padding_of_a_qmm_row_is_not_multiplied() -> None:
    """K ends inside a block whose scale is Inf: the codes behind it would make NaN of it. x is Inf, so y may be."""
    weight = qmm(6, 72, 32, scales_dtype=BFLOAT16)
    scales = weight.scales.copy()
    scales[:, -1] = np.inf
    packed = np.full_like(weight.packed, 0xFF)
    packed[:, -1, 4:] = 0x00
    weight = QmmWeight(packed, scales, np.zeros_like(weight.zero_points), 72, 6, 32)
    x = np.ones((1, 72), BFLOAT16)
    x[0, 3] = np.inf
    assert np.all(product(x, weight) == np.inf)


# -- choice


@pytest.fixture
def without_the_unit() -> Iterator[None]:
    """Force AVX-512 for one test."""
    native._native.use_instruction_set("avx512")
    yield
    native._native.use_instruction_set("amx")


@pytest.mark.parametrize("perm", PERMS)
def test_a_run_is_made_by_it(monkeypatch: pytest.MonkeyPatch, perm: tuple[int, int]) -> None:
    made, multiply = [], native.Matrix.multiply_bf16
    monkeypatch.setattr(native.Matrix, "multiply_bf16", lambda *given: made.append(multiply(*given)) or made[-1])
    weight = weight_of(96, 640, 32, outputs_first=perm == (1, 0))
    x = values("bfloat16", 60, weight.shape[0])
    runtime = runtime_of(weight, "bfloat16")
    made.clear()  # the probe's
    check(runtime.run(None, {"x": x})[0], x, dense(weight))
    assert made == [True]
    assert runtime.kernels["product"].name == "cpu amx"


def test_mlx_arrays_give_mlx_arrays() -> None:
    weight, x = weight_of(64, 96, 32), values("bfloat16", 3, 96)
    y = cpu.lookup4_matmul(mx.array(x.astype(np.float32)).astype(mx.bfloat16), weight)
    assert y.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(y.astype(mx.float32)), product(x, weight).astype(np.float32))


@pytest.mark.parametrize(("perm", "layout"), [((1, 0), "W [N, K]"), ((0, 1), "W [K, N]")])
def test_what_it_is_picked_for(perm: tuple[int, int], layout: str) -> None:
    weight = weight_of(64, 96, 32, outputs_first=perm == (1, 0))
    most = thresholds.MOST_ROWS["cpu"][f"{layout}, bfloat16, amx"]["gemv"]
    assert {cpu.pick(rows, weight, "bfloat16") for rows in range(1, most + 1)} == {"gemv"}
    assert {cpu.pick(rows, weight, "bfloat16") for rows in (most + 1, 16, 128, 5000)} == {"bf16"}


@pytest.mark.parametrize("perm", PERMS)
def test_one_row_is_right_by_either(perm: tuple[int, int]) -> None:
    weight = weight_of(128, 96, 32, outputs_first=perm == (1, 0))
    x = values("bfloat16", 1, weight.shape[0])
    for kernel in ("gemv", "bf16"):
        check(cpu.lookup4_matmul(x, weight, kernel), x, dense(weight))


def test_other_weights_and_types_are_not_for_it() -> None:
    aligned = weight_of(64, 96, 32)
    assert cpu.pick(20, aligned, "bfloat16") == "bf16"
    assert cpu.pick(20, aligned) != "bf16"  # x in float32
    for other in (weight_of(64, 90, 32), weight_of(64, 96, 48), dataclasses.replace(aligned, weight_dtype="float32")):
        assert cpu.pick(20, other, "bfloat16") != "bf16"
        product(values("bfloat16", 2, other.shape[0]), other, made=False)


def test_another_instruction_set_multiplies_floats(without_the_unit: None) -> None:
    weight, x = weight_of(64, 96, 32), values("bfloat16", 20, 96)
    product(x, weight, made=False)
    assert cpu.pick(20, weight, "bfloat16") == "tile"
    check(cpu.lookup4_matmul(x, weight), x, dense(weight))


def test_shapes_are_checked_before_they_are_read() -> None:
    matrix = native.Matrix(weight_of(64, 32, 32))
    for x, y in (((2, 31), (2, 64)), ((2, 32), (2, 63)), ((2, 32), (1, 64))):
        with pytest.raises(ValueError, match=r"x must be \[M, K\] and y \[M, N\]"):
            matrix.multiply_bf16(np.zeros(x, BFLOAT16), np.zeros(y, BFLOAT16))
