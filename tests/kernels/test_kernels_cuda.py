"""The CUDA kernels: on a GPU against float64 from NumPy alone; without one, that every text compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lut4tool import formats
from lut4tool.kernels import MLX_FLOAT, choose, cuda
from lut4tool.kernels.cuda import decode, gemv_float, gemv_half, general, program, tile_float
from lut4tool.kernels.cuda.program import Program
from lut4tool.kernels.cuda.weights import irregular
from lut4tool.runtime import Runtime
from tests.cuda_text import PROGRAMS, translation_unit
from tests.cuda_text import weight as weight_facts
from tests.products import (
    DTYPES,
    Lookup4Weight,
    QmmWeight,
    check,
    dense,
    dense_qmm,
    lookup4,
    product_model,
    qmm,
    values,
)

needs_gpu = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build")
NVCC = shutil.which("nvcc")

ROWS_OF_X = [0, 1, 2, 4, 7, 8, 16, 17, 64, 130, 512]
#: rows, cols, block: aligned; a K of several chunks and of a part of one; N and K ragged; blocks of each size.
SHAPES = [(256, 128, 64), (144, 384, 32), (200, 1152, 128), (77, 2192, 16), (96, 100, 4), (33, 70, 16), (1, 1, 2)]


def host(y: mx.array) -> np.ndarray:
    """A result on the host in its own type."""
    return np.array(y.astype(mx.float32)).astype(DTYPES[str(y.dtype).removeprefix("mlx.core.")])


def device(x: np.ndarray, dtype: str) -> mx.array:
    """A NumPy array on the device."""
    return mx.array(x.astype(np.float32)).astype(MLX_FLOAT[dtype])


def multiply(x: np.ndarray, weight: Lookup4Weight | QmmWeight, dtype: str, kernel: str | None = None) -> np.ndarray:
    given = device(x, dtype)
    assert cuda.refuses(given, weight) is None
    product = cuda.lookup4_matmul if isinstance(weight, Lookup4Weight) else cuda.qmm
    return host(product(given, weight, kernel))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "gemv", "tile", "decode"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lookup4(shape: tuple[int, int, int], perm: tuple[int, int], dtype: str, kernel: str | None) -> None:
    weight = lookup4(*shape, perm=perm, weight_dtype=dtype, high_nibble_first=shape[2] != 32)
    matrix = dense(weight)
    for m in ROWS_OF_X if kernel is None else [1, 3, 33]:
        x = values(dtype, m, weight.shape[0], seed=m)
        check(multiply(x, weight, dtype, kernel), x, matrix, dtype)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gemv", "tile", "decode"])
@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_float32_products_with_weights_rounded_to_a_half(perm: tuple[int, int], weight_dtype: str, kernel: str) -> None:
    weight = lookup4(160, 256, perm=perm, weight_dtype=weight_dtype, codebook=formats.FP4)
    for m in (1, 2, 3, 19):
        x = values("float32", m, weight.shape[0])
        check(multiply(x, weight, "float32", kernel), x, dense(weight))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "gemv", "tile", "decode"])
@pytest.mark.parametrize("points", ["codes", "one", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256, 32), (130, 400, 16), (48, 96, 128), (24, 66, 6)], ids=str)
def test_qmm(shape: tuple[int, int, int], dtype: str, points: str, kernel: str | None) -> None:
    weight = qmm(*shape, scales_dtype=DTYPES[dtype], points=points)
    matrix = dense_qmm(weight)
    for m in ROWS_OF_X if kernel is None else [1, 3, 33]:
        x = values(dtype, m, weight.K, seed=m)
        check(multiply(x, weight, dtype, kernel), x, matrix, dtype)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 14336), (320, 40960)], ids=str)
def test_long_sums(shape: tuple[int, int], dtype: str) -> None:
    """K of many slices and passes, N of many tiles a block; a sample of the outputs is compared."""
    weight = lookup4(*shape, perm=(1, 0), weight_dtype=dtype)
    matrix = dense(weight)[:, ::37]
    for m in (1, 4, 8, 16, 130):
        x = values(dtype, m, shape[1], seed=m)
        check(multiply(x, weight, dtype)[:, ::37], x, matrix, dtype)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("m", "kernel"), [(1, "gemv"), (4, "gemv"), (4, "tile"), (40, "tile"), (4, "decode")])
def test_float32_sums_that_cancel(perm: tuple[int, int], m: int, kernel: str) -> None:
    """As in test_kernels: many equal terms, then their opposite, which a running sum gets wrong."""
    k, n = 8192, 24
    rows, cols = (k, n) if perm == (0, 1) else (n, k)
    block = 8 if perm == (0, 1) else 64
    scales = np.full(rows * cols // block, 0.7, np.float32)
    weight = Lookup4Weight(np.full(rows * cols // 2, 255, np.uint8), scales, formats.NF4, rows, cols, block, perm)
    x = np.full((m, k), 0.1, np.float32)
    x[:, 3 * k // 4 :] = -0.3
    check(multiply(x, weight, "float32", kernel), x, dense(weight))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("codebook", [formats.NF4, formats.FP4], ids=["nf4", "fp4"])
@pytest.mark.parametrize("kind", ["swamped", "wide", "positive", "near the largest"])
def test_float32_sums_of_terms_of_other_sizes(kind: str, codebook: np.ndarray, kernel: str) -> None:
    """Terms just too small to be added one by one to the first of each 16; of 60 orders of 2; all of one sign."""
    weight, rng = lookup4(48, 8192, perm=(1, 0), codebook=codebook), np.random.default_rng(3)
    x = np.abs(values("float32", 4, 8192))
    if kind == "swamped":
        x = rng.uniform(0.5, 1, x.shape).astype(np.float32) * np.float32(2.0**-24)
        x[:, ::16] = 1
    elif kind == "wide":
        x = (values("float32", *x.shape) * 2.0 ** rng.integers(-30, 30, x.shape)).astype(np.float32)
    elif kind == "near the largest":  # rounds to a bfloat16 that is Inf
        x = np.zeros_like(x)
        x[:, 7] = np.float32(3.4e38)
        weight = lookup4(48, 8192, perm=(1, 0), codebook=codebook * np.float32(0.1))
    check(multiply(x, weight, "float32", kernel), x, dense(weight))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
def test_rows_beside_one_with_inf_are_as_exact(perm: tuple[int, int]) -> None:
    """The tile in float32 sums a row with Inf or NaN in another way, and no other."""
    weight = lookup4(160, 256, perm=perm)
    x = values("float32", 19, weight.shape[0])
    x[3, 5], x[3, 9], x[17, 0] = np.inf, 7.0, np.nan
    y = multiply(x, weight, "float32", "tile")
    finite = np.delete(np.arange(19), [3, 17])
    check(y[finite], x[finite], dense(weight))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[3], np.inf * dense(weight)[5])
    assert np.isnan(y[17]).all()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 1152, 128), (77, 2192, 16)], ids=str)
def test_what_older_gpus_run(shape: tuple[int, int, int], dtype: str, kernel: str, monkeypatch: Any) -> None:
    """mma.sync for wgmma, copies by all lanes for the copy engine: compiled in by a macro."""
    header = Program.header.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Program, "header", property(lambda program: "#define OLDER 1\n" + header(program)))
    program._built.cache_clear()
    try:
        weight = lookup4(*shape, perm=(1, 0), weight_dtype=dtype)
        for m in (1, 3, 16, 40, 130):
            x = values(dtype, m, weight.shape[0], seed=m)
            check(multiply(x, weight, dtype, kernel), x, dense(weight), dtype)
    finally:
        program._built.cache_clear()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kernel", ["gemv", "tile", "decode"])
@pytest.mark.parametrize("where", ["x", "codebook", "scales"])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nan_and_inf(special: float, where: str, kernel: str, perm: tuple[int, int], dtype: str) -> None:
    rows, cols, block = 144, 160, 16
    weight = lookup4(rows, cols, block, perm=perm, weight_dtype=dtype)
    x = values(dtype, 3, weight.shape[0])
    x[0, 3] = 0  # 0 * Inf is NaN
    if where == "x":
        x[-1, 5] = special
    else:
        leaf = getattr(weight, where).copy()
        leaf[2] = special
        facts = {"scales": weight.scales, "codebook": weight.codebook} | {where: leaf}
        weight = Lookup4Weight(weight.packed, facts["scales"], facts["codebook"], rows, cols, block, perm, True, dtype)
    y = multiply(x, weight, dtype, kernel).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = (x.astype(np.float64)[:, :, None] * dense(weight)).sum(axis=1)
    assert np.isnan(exact).any() or np.isinf(exact).any()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(exact))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shape", [(144, 384, 32), (77, 2192, 16), (33, 70, 16)], ids=str)
def test_decode_gives_the_same_bits(shape: tuple[int, int, int], perm: tuple[int, int], dtype: str) -> None:
    weight = lookup4(*shape, perm=perm, weight_dtype=dtype, codebook=formats.FP4)
    np.testing.assert_array_equal(host(cuda.lookup4_decode(weight)), formats.decode(weight))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.slow
def test_a_weight_of_more_than_2_31_elements() -> None:
    rows, cols = 2**17 + 8, 2**14
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, rows * cols // 2, dtype=np.uint8)
    weight = Lookup4Weight(packed, rng.random(rows * cols // 64, np.float32), formats.NF4, rows, cols, 64, (1, 0))
    last = Lookup4Weight(packed[-8 * cols // 2 :], weight.scales[-8 * cols // 64 :], formats.NF4, 8, cols, 64, (1, 0))
    half = Lookup4Weight(packed, weight.scales, formats.NF4, rows, cols, 64, (1, 0), True, "bfloat16")
    half_last = Lookup4Weight(last.packed, last.scales, formats.NF4, 8, cols, 64, (1, 0), True, "bfloat16")
    for m in (1, 5, 16):
        x = values("float32", m, cols)
        check(multiply(x, weight, "float32")[:, -8:], x, dense(last))
        x = values("bfloat16", m, cols)
        check(multiply(x, half, "bfloat16")[:, -8:], x, dense(half_last), "bfloat16")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_is_served_by_them(dtype: str) -> None:
    weight = lookup4(96, 256, perm=(1, 0), weight_dtype=dtype)
    leaves = {"packed": weight.packed, "scales": weight.scales, "codebook": weight.codebook}
    runtime = Runtime(product_model("Lookup4MatMul", leaves, weight.attributes(dtype), dtype), device="cuda")
    assert {node: choice.name for node, choice in runtime.kernels.items()} == {"product": "cuda"}
    for m in (1, 20):
        x = values(dtype, m, 256, seed=m)
        (y,) = runtime.run(None, {"x": x})
        check(y, x, dense(weight), dtype)


@pytest.mark.skipif(mx.cuda.is_available(), reason="needs a machine where the kernels do not work")
def test_a_kernel_that_fails_is_replaced_once_with_a_warning(monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda, "available", lambda: True)
    weight = lookup4(16, 128)
    with pytest.warns(UserWarning, match="the cuda kernels fail .*; the reference serves instead"):
        choice = choose(weight, "float32", "cuda")
    assert choice.name == "reference"
    assert choice.refusals["cuda"].startswith("its kernels fail: ")


# -- without a GPU


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i % 12 == 0 else pytest.mark.slow) for i, name in enumerate(PROGRAMS)]
)
def test_texts_compile_for_ampere_and_hopper(name: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(translation_unit(PROGRAMS[name]))
    for arch in ("80", "90a"):
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        done = subprocess.run(
            [str(NVCC), "-cubin", target, "-o", str(tmp_path / "out"), str(source)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_names_differ_wherever_the_text_does() -> None:
    """MLX keeps a module by its name, on disk too."""
    texts = {(translation_unit(program), program.shared): program.unique_name for program in PROGRAMS.values()}
    assert len(set(texts.values())) == len(texts) > 50
    assert all(program.shared <= 227 * 1024 for program in PROGRAMS.values())


def test_one_build_serves_every_n() -> None:
    small, large = weight_facts(rows=96), weight_facts(rows=1 << 20)
    for m in (1, 8, 16):
        assert gemv_half.program("bfloat16", small, m) == gemv_half.program("bfloat16", large, m)
    small, large = weight_facts(rows=96, tile=4), weight_facts(rows=1 << 20, tile=4)
    assert gemv_float.program(small, 1, "float32") == gemv_float.program(large, 1, "float32")
    assert tile_float.program(small, "float32", 16) == tile_float.program(large, "float32", 16)
    assert decode.program(small, "float32") == decode.program(large, "float32")


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lookup4(64, 128), None),
        (lookup4(64, 100, 16), "blocks of 16 meet rows of 100 at no multiple of 16"),
        (lookup4(64, 96, 64), None),  # blocks cross rows, at multiples of 32
        (qmm(8, 64, 8), "blocks of 8 along K are no multiple of 16"),
        (qmm(8, 40, 16), None),
    ],
)
def test_what_the_arranged_order_does_not_hold(weight: Any, reason: str | None) -> None:
    assert irregular(weight) == reason


def test_refusals() -> None:
    weight = lookup4(64, 64, weight_dtype="bfloat16")
    assert cuda.refuses(mx.zeros((1, 64), mx.bfloat16), weight) is None
    assert cuda.refuses(mx.zeros((1, 64), mx.float32), weight) is None
    assert (
        cuda.refuses(mx.zeros((1, 64), mx.float16), weight)
        == "x is float16 and the weight bfloat16; a float16 x takes a float16 weight"
    )
    assert "float32, float16 and bfloat16 are served" in str(cuda.refuses(mx.zeros((1, 64), mx.int32), weight))


def test_the_kernel_follows_the_rows_of_x() -> None:
    assert [cuda.pick("bfloat16", m, 14336) for m in (1, 8, 9, 128, 129)] == ["gemv", "gemv", "tile", "tile", "decode"]
    assert [cuda.pick("float32", m, 14336) for m in (1, 4, 5, 4096)] == ["gemv", "gemv", "tile", "tile"]
    assert [cuda.pick("float16", m, 1024) for m in (512, 4096)] == ["tile", "decode"]
    assert general.ROWS > 0
