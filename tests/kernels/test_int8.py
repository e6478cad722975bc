"""The native products of bytes and the rounding to them, in every instruction set of this machine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lut4tool import native
from lut4tool.runtime import int8

pytestmark = pytest.mark.skipif(not native.compiled(), reason="no native library was compiled")

SETS = ["avx512 amx", "avx512 vnni", "avx2", "portable"]


@pytest.fixture(params=SETS)
def instruction_set(request):
    """Multiply with one set; skipped where this machine lacks it."""
    before = int8.instruction_set()
    try:
        int8.use_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    assert int8.instruction_set() == request.param
    yield request.param
    int8.use_instruction_set(before)


def frozen(array):
    """The array, which nobody may write to."""
    array.setflags(write=False)
    return array


def drawn(random, dtype, *size):
    info = np.iinfo(dtype)
    return frozen(random.integers(info.min, info.max + 1, size).astype(dtype))


@pytest.mark.parametrize("types", list(itertools.product((np.uint8, np.int8), repeat=2)))
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 777), (9, 513, 5), (32, 200, 64), (50, 128, 100)])
@pytest.mark.parametrize("one", [True, False])
def test_products_are_exact(instruction_set, types, shape, one):
    random, (rows, depth, columns) = np.random.default_rng(2), shape
    a, b = drawn(random, types[0], rows, depth), drawn(random, types[1], depth, columns)
    a_zero, b_zero = drawn(random, types[0], 1 if one else rows), drawn(random, types[1], 1 if one else columns)
    wanted = (a.astype(np.int64) - a_zero.reshape(-1, 1)) @ (b.astype(np.int64) - b_zero)
    packed = int8.pack(b, b_zero)
    assert (int8.matmul(a, a_zero, packed) == wanted).all()
    assert (int8.matmul(a, None, int8.pack(b, None)) == a.astype(np.int64) @ b.astype(np.int64)).all()
    factors = random.uniform(0, 1, columns).astype(np.float32)
    scaled = wanted.astype(np.int32).astype(np.float32) * (np.float32(0.1) * factors)
    assert (int8.scaled_matmul(a, a_zero, packed, 0.1, factors) == scaled).all()


@pytest.mark.parametrize("depth", [1, 3, 5, 8, 64])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_rows_of_another_depth_are_refused(depth, dtype):
    packed = int8.pack(frozen(np.ones((4, 17), np.int8)), None)
    with pytest.raises(ValueError, match=f"rows of {depth} bytes and a matrix of 4 rows have no product"):
        int8.matmul(frozen(np.ones((2, depth), dtype)), None, packed)


def test_extremes_do_not_saturate(instruction_set):
    a, b = frozen(np.full((33, 640), 255, np.uint8)), frozen(np.full((640, 70), -128, np.int8))
    assert (int8.matmul(a, None, int8.pack(b, None)) == 255 * -128 * 640).all()
    assert (int8.matmul(a, None, int8.pack(-1 - b, None)) == 255 * 127 * 640).all()


@pytest.mark.parametrize("size", [1, 31, 100, 4096])
@pytest.mark.parametrize("shift", [-9, 0, 9])
def test_values_are_quantized_as_the_standard_says(size, shift):
    x = frozen(np.random.default_rng(size).standard_normal(size).astype(np.float32) + np.float32(shift))
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    scale = np.float32(high - low) / np.float32(255)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    values, found_scale, found_zero = int8.quantized(x)
    assert (found_scale, found_zero) == (scale, zero)
    assert (values == np.clip(np.rint(x / scale) + zero, 0, 255)).all()


def test_what_is_not_finite_is_left_to_numpy():
    assert int8.quantized(np.array([0, np.nan], np.float32)) is None
    assert int8.quantized(np.full(40, -np.inf, np.float32)) is None
    assert int8.quantized(np.zeros(3, np.float32))[1] == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_values_are_quantized_to_a_given_scale(dtype):
    random, info = np.random.default_rng(6), np.iinfo(dtype)
    x = np.concatenate([9 * random.standard_normal(1000), [np.inf, -np.inf]]).astype(np.float32)
    scale, zero = np.float32(0.07), np.array(info.max // 3, dtype)
    found = int8.quantize_linear(x, np.array(scale), zero, np.dtype(dtype))
    assert found.dtype == dtype
    assert (found == np.clip(np.rint(x / scale) + np.float32(zero), info.min, info.max)).all()
    assert int8.quantize_linear(np.array([np.nan], np.float32), np.array(scale), zero, np.dtype(dtype)) == 0
