"""Products in digits of 8 bits (native/product_amx.cpp) against float64: their bound and what shows it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import runtime_of

from lut4tool import formats, native
from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import cpu, thresholds
from tests.products import ADVERSARIES, DTYPES, adversary, check, dense, dense_qmm, lookup4, qmm, values

HERE = native.compiled() and native.product_instruction_set() == "amx"
pytestmark = pytest.mark.skipif(not HERE, reason="this machine has no matrix unit for bytes (AMX)")


def multiply(x: np.ndarray, weight: Lookup4Weight | QmmWeight, made_by: str = "digits", threads: int = 2) -> np.ndarray:
    columns = weight.shape[1] if isinstance(weight, Lookup4Weight) else weight.N
    y = np.full((len(x), columns), np.nan, np.float32)
    assert native.Matrix(weight).multiply(x, y, "digits", threads) == made_by
    return y


#: rows, cols, block: blocks of a row, of several runs, across rows; a panel's tail, and a four's.
SHAPES = [(64, 256, 64), (32, 32, 32), (37, 96, 32), (100, 640, 128), (48, 4128, 32), (259, 352, 64), (70, 96, 8192)]
PERMS = [(1, 0), (0, 1)]


@pytest.mark.parametrize("m", [0, 1, 15, 16, 17, 33, 257])
@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lookup4(m: int, perm: tuple[int, int], shape: tuple[int, int, int]) -> None:
    weight = lookup4(*shape, perm=perm, high_nibble_first=m % 2 == 0)
    x = values("float32", m, weight.shape[0])
    check(multiply(x, weight), x, dense(weight))


@pytest.mark.parametrize("points", ["codes", "one", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24, 640, 128), (5, 333, 32), (70, 100, 64)], ids=str)
def test_qmm(points: str, dtype: str, shape: tuple[int, int, int]) -> None:
    weight = qmm(*shape, scales_dtype=DTYPES[dtype], points=points)
    x = values("float32", 30, weight.K)
    check(multiply(x, weight), x, dense_qmm(weight))


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16"])
def test_weights_are_rounded_as_proved(weight_dtype: str, perm: tuple[int, int]) -> None:
    weight = lookup4(40, 512, 32, perm=perm, weight_dtype=weight_dtype, codebook=formats.FP4)
    x = values("float32", 20, weight.shape[0])
    check(multiply(x, weight), x, dense(weight))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_data(data: st.DataObject) -> None:
    """Values and scales over many orders of magnitude, zeros among them: digits, or too coarse and a tile of floats."""
    rows, cols = data.draw(st.integers(1, 300), "rows"), 32 * data.draw(st.integers(1, 20), "cols")
    perm = data.draw(st.sampled_from(PERMS), "perm")
    block, m = data.draw(st.sampled_from([32, 64, 96, 256, 8192]), "block"), data.draw(st.integers(1, 40), "m")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    weight = lookup4(rows, cols, block, seed=m, perm=perm)
    k, n = weight.shape
    spread = data.draw(st.sampled_from([0, 1, 3, 12]), "powers of ten")
    weight.scales[:] *= 10 ** rng.uniform(-spread, spread, weight.scales.shape)
    x = (rng.standard_normal((m, k)) * 10 ** rng.uniform(-spread, spread, (m, k))).astype(np.float32)
    zeros = data.draw(st.sampled_from([0.0, 0.5, 0.98]), "zeros")
    x[rng.random((m, k)) < zeros] = 0
    y = np.full((m, n), np.nan, np.float32)
    made = native.Matrix(weight).multiply(x, y, "digits")
    assert made in ("digits", "tile")
    if spread == 0 and zeros < 0.9:
        assert made == "digits"
    check(y, x, dense(weight))


@pytest.mark.parametrize("perm", PERMS)
@pytest.mark.parametrize("k", [14336, 65536])
def test_the_bound_holds_for_adversaries(k: int, perm: tuple[int, int]) -> None:
    n = 32
    sizes = (n, k) if perm == (1, 0) else (k, n)
    packed = np.full(n * k // 2, 0xFF, np.uint8)  # the codebook's last entry, 1
    made = set()
    for seed, name in enumerate(ADVERSARIES):
        scales = np.full(n * k // 32, 0.7 if name in ADVERSARIES[:4] else 1, np.float32)
        weight = Lookup4Weight(packed, scales, formats.NF4, *sizes, 32, perm)
        x, y = adversary(name, 17, k, seed), np.empty((17, n), np.float32)
        made.add(native.Matrix(weight).multiply(x, y, "digits"))
        check(y, x, dense(weight))
    assert "digits" in made


def large_values_over_zeros(outputs: int, zeros: int) -> tuple[np.ndarray, Lookup4Weight]:
    """One large value of x in each panel of 256, which the first `zeros` outputs multiply by 0: too coarse for them."""
    weight = lookup4(outputs, 512, 64, perm=(1, 0))
    x = values("float32", 32, 512)
    x[:, ::256] = 126
    packed = weight.packed.reshape(outputs, 256).copy()
    packed[:, ::128] = 0xFF  # 1
    packed[:zeros, ::128] = 0x77  # 0
    scales = np.full(outputs * 8, 0.9, np.float32)
    return x, Lookup4Weight(packed.reshape(-1), scales, formats.NF4, outputs, 512, 64, (1, 0))


def test_outputs_whose_bound_is_not_shown_are_made_again() -> None:
    x, weight = large_values_over_zeros(4096, 2)
    matrix = dense(weight)
    check(multiply(x, weight), x, matrix)  # 64 of 131,072 one by one
    terms, error_of_digits = np.abs(x).astype(np.float64) @ np.abs(matrix), 2 * 256 * 5.1 * 2.0**-32 * 128
    assert np.all(4.9 * 2.0**-24 * terms[:, :2] < error_of_digits)
    assert np.all(4.9 * 2.0**-24 * terms[:, 2:] > error_of_digits)


def test_too_many_of_them_are_a_tile() -> None:
    x, weight = large_values_over_zeros(64, 64)
    check(multiply(x, weight, made_by="tile"), x, dense(weight))


def test_outputs_of_rows_along_n_are_made_again_too() -> None:
    """Two outputs multiply a panel's large values by 0, on scales that differ from row to row."""
    weight = lookup4(512, 4096, 64, perm=(0, 1))
    weight.scales[:] = 0.8 + 0.1 * weight.scales
    weight.scales.reshape(512, 64)[::256] = 0.98
    x = values("float32", 32, 512)
    x[:, ::256] = 126
    packed = weight.packed.reshape(512, 2048)
    packed[::256] = 0xFF
    packed[::256, 5] = 0x77
    y = multiply(x, weight)
    check(y, x, dense(weight))
    error_of_digits = 2 * 256 * 5.1 * 2.0**-32 * 128
    terms = np.abs(x).astype(np.float64) @ np.abs(dense(weight))
    assert np.all(4.9 * 2.0**-24 * terms[:, 10:12] < error_of_digits)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_x_that_is_not_finite_is_a_tile(special: float) -> None:
    weight, x = lookup4(32, 64, 32, perm=(1, 0)), values("float32", 20, 64)
    x[3, 5] = special
    y = multiply(x, weight, made_by="tile")
    assert not np.isfinite(y[3]).any()
    check(np.delete(y, 3, 0), np.delete(x, 3, 0), dense(weight))


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_seen(special: float) -> None:
    """One output of 2,048: made again with the others of its row's panel left alone."""
    weight, x = lookup4(2048, 64, 32, perm=(1, 0)), values("float32", 20, 64)
    weight.scales[7] = special
    y = multiply(x, weight)
    assert not np.isfinite(y[:, 3]).any()
    check(np.delete(y, 3, 1), x, np.delete(dense(weight), 3, 1))


def test_a_scale_of_a_row_along_n_that_is_not_finite_is_seen() -> None:
    """It is of 64 outputs, which are made again one by one."""
    weight, x = lookup4(64, 16384, 64, perm=(0, 1)), values("float32", 20, 64)
    weight.scales[7] = np.inf
    y = np.full((20, 16384), np.nan, np.float32)
    native.Matrix(weight).multiply(x, y, "digits")
    assert not np.isfinite(y[:, 448:512]).any()
    check(np.delete(y, np.s_[448:512], 1), x, np.delete(dense(weight), np.s_[448:512], 1))


@pytest.mark.parametrize("perm", PERMS)
def test_sums_that_overflow_are_inf_or_as_they_should(perm: tuple[int, int]) -> None:
    weight = lookup4(64, 64, 32, perm=perm)
    x = np.full((24, 64), 2e38, np.float32)
    with np.errstate(over="ignore"):
        want = (x.astype(np.float64) @ dense(weight)).astype(np.float32)
    assert np.isinf(want).any()
    assert np.isfinite(want).any()
    np.testing.assert_allclose(multiply(x, weight), want, rtol=1e-6)


@pytest.mark.parametrize("perm", PERMS)
def test_the_smallest_values_and_rows_of_zeros(perm: tuple[int, int]) -> None:
    weight = lookup4(*((64, 96) if perm == (1, 0) else (96, 64)), 32, perm=perm)
    x = np.zeros((20, 96), np.float32)
    x[1::2] = 1e-42 * np.arange(96, dtype=np.float32)  # subnormal
    x[3, :] = 1e-30 * values("float32", 96)
    y, exact = np.empty((20, 64), np.float32), x.astype(np.float64) @ dense(weight)
    native.Matrix(weight).multiply(x, y, "digits")
    terms = np.abs(x).astype(np.float64) @ np.abs(dense(weight))
    assert np.all(np.abs(y - exact) <= 2.0**-21 * terms + 96 * 2.0**-149)
    assert not y[::2].any()


@pytest.mark.parametrize("perm", PERMS)
def test_the_bytes_do_not_depend_on_threads(perm: tuple[int, int]) -> None:
    weight = lookup4(1024, 2048, perm=perm)
    x = values("float32", 40, weight.shape[0])
    np.testing.assert_array_equal(multiply(x, weight, threads=1), multiply(x, weight, threads=2))


@pytest.mark.parametrize(("perm", "group"), [((1, 0), "W [N, K], amx"), ((0, 1), "W [K, N], amx")])
def test_what_they_are_picked_for(perm: tuple[int, int], group: str) -> None:
    weight = lookup4(64, 96, 32, perm=perm)
    most = thresholds.MOST_ROWS["cpu"][group]
    assert {cpu.pick(rows, weight) for rows in range(1, most["gemv"] + 1)} == {"gemv"}
    assert {cpu.pick(rows, weight) for rows in range(most["gemv"] + 1, most["tile"] + 1)} == {"tile"}
    assert {cpu.pick(rows, weight) for rows in (most["tile"] + 1, 512, 5000)} == {"digits"}
    assert cpu.pick(1, lookup4(64, 90, 32)) == "tile"


@pytest.mark.parametrize("perm", PERMS)
def test_a_run_is_made_by_them(monkeypatch: pytest.MonkeyPatch, perm: tuple[int, int]) -> None:
    made, multiply = [], native.Matrix.multiply
    monkeypatch.setattr(native.Matrix, "multiply", lambda *given: made.append(multiply(*given)))
    weight = lookup4(96, 640, 32, perm=perm)
    x = values("float32", 60, weight.shape[0])
    check(runtime_of(weight).run(None, {"x": x})[0], x, dense(weight))
    assert made[-1] == "digits"


@pytest.mark.parametrize(("perm", "cols"), [((1, 0), 480), ((0, 1), 480), ((0, 1), 90)])
def test_other_blocks_are_a_tile(perm: tuple[int, int], cols: int) -> None:
    weight = lookup4(96, cols, 48, perm=perm)
    x = values("float32", 60, weight.shape[0])
    check(multiply(x, weight, made_by="tile"), x, dense(weight))
