"""The CUDA kernels: on a GPU against float64 from NumPy alone; without one, that every text compiles."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lut4tool import formats, kernels
from lut4tool.kernels import MLX_FLOAT, choose, cuda, decoded, transfer
from lut4tool.kernels.cuda import decode, gemv_float, gemv_half, general, program, tile_float, tile_half, wide_half
from lut4tool.kernels.cuda import weights as cuda_weights
from lut4tool.kernels.cuda.program import Program
from lut4tool.kernels.cuda.weights import arranged, irregular
from lut4tool.runtime import Runtime, regions
from tests.cuda_text import PROGRAMS, translation_unit
from tests.cuda_text import weight as weight_facts
from tests.products import (
    ADVERSARIES,
    DTYPES,
    SPECIALS,
    Lookup4Weight,
    QmmWeight,
    adversary,
    check,
    check_special,
    dense,
    dense_qmm,
    forward_and_adjoint,
    lookup4,
    product_model,
    qmm,
    values,
    with_special,
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
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("codebook", ["nf4", "ones"])
@pytest.mark.parametrize("data", ADVERSARIES)
def test_float32_holds_its_bound_whatever_x_is(data: str, codebook: str, perm: tuple[int, int]) -> None:
    """Each kernel that float32 is given; weights that are all 1 leave the hard terms as they are."""
    k, n = 8192, 96
    book = formats.NF4 if codebook == "nf4" else np.ones(16, np.float32)
    weight = lookup4(*((k, n) if perm == (0, 1) else (n, k)), 32, perm=perm, codebook=book)
    matrix = dense(weight)
    for m, kernel in ((1, "gemv"), (4, "gemv"), (4, "tile"), (33, "tile")):
        x = adversary(data, m, k, seed=m)
        check(multiply(x, weight, "float32", kernel), x, matrix)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("codebook", [formats.NF4, formats.FP4], ids=["nf4", "fp4"])
def test_a_term_that_rounds_to_a_bfloat16_of_inf(codebook: np.ndarray, kernel: str) -> None:
    weight = lookup4(48, 8192, perm=(1, 0), codebook=codebook * np.float32(0.1))
    x = np.zeros((4, 8192), np.float32)
    x[:, 7] = np.float32(3.4e38)
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
@pytest.mark.skipif(not program.hopper(), reason="needs a Hopper GPU: its copy engine, clusters and wgmma")
@pytest.mark.parametrize(
    ("columns", "parts", "shape"),
    [(32, 2, (200, 1152, 128)), (128, 2, (77, 2192, 16)), (192, 1, (1000, 1152, 128)), (256, 1, (36000, 128, 64))],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_wide_tile(columns: int, parts: int, shape: tuple[int, int, int], dtype: str, monkeypatch: Any) -> None:
    """Parts of K of an odd number of chunks, rows past M and N, more tiles than blocks."""
    monkeypatch.setattr(wide_half, "shape", lambda m, rows, chunks: (columns, parts))
    weight = lookup4(*shape, perm=(1, 0), weight_dtype=dtype)
    for m in (70, 300):
        x = values(dtype, m, shape[1], seed=m)
        check(multiply(x, weight, dtype, "tile"), x, dense(weight), dtype)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gemv", "tile"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 1152, 128), (77, 2192, 16)], ids=str)
def test_what_older_gpus_run(shape: tuple[int, int, int], dtype: str, kernel: str, monkeypatch: Any) -> None:
    """mma.sync for wgmma, copies by all lanes for the copy engine: compiled in by a macro."""
    monkeypatch.setattr(tile_half, "hopper", lambda: False)
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
@pytest.mark.parametrize(("where", "special"), SPECIALS)
def test_nan_and_inf(where: str, special: float, kernel: str, perm: tuple[int, int], dtype: str) -> None:
    x, weight = with_special(lookup4(144, 160, 16, perm=perm, weight_dtype=dtype), 3, where, special, dtype)
    tolerance = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    check_special(multiply(x, weight, dtype, kernel), x, weight, tolerance)


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
def test_a_weight_of_more_than_2_31_bytes() -> None:
    """Four times as many elements as an index of 32 bits has, in pieces, with little beside them on the device."""
    rows, cols, block = 2**17 + 8, 2**15, 64
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, rows * cols // 2, dtype=np.uint8)
    scales = rng.random(rows * cols // block, np.float32)
    assert packed.size > 2**31
    last_rows = (packed[-8 * cols // 2 :], scales[-8 * cols // block :], formats.NF4, 8, cols, block, (1, 0))
    last_columns = (
        np.ascontiguousarray(packed.reshape(rows, -1)[:, -4:]).reshape(-1), scales.reshape(rows, -1)[:, -1].copy(),
        formats.NF4, rows, 8, 8, (0, 1),
    )  # fmt: skip
    for perm, last in (((1, 0), last_rows), ((0, 1), last_columns)):
        for dtype in ("float32", "bfloat16"):
            weight = Lookup4Weight(packed, scales, formats.NF4, rows, cols, block, perm, True, dtype)
            matrix = dense(Lookup4Weight(*last, True, dtype))
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            made = arranged(weight, half=dtype != "float32")
            size = made.codes.nbytes + made.scales.nbytes
            assert mx.get_peak_memory() - before < size + 5 * transfer.PIECE
            for m, kernel in ((1, None), (5, None), (16, None), (16, "decode")):
                x = values(dtype, m, len(matrix), seed=m)
                check(multiply(x, weight, dtype, kernel)[:, -8:], x, matrix, dtype)
            del weight, made
            mx.clear_cache()


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


# -- a decode that is shared


def decodes(monkeypatch: Any) -> list[Any]:
    """What decode.dense is asked for from now on."""
    made: list[Any] = []
    real = decode.dense

    def counted(weight: Any, dtype: str) -> mx.array:
        made.append(weight)
        return real(weight, dtype)

    monkeypatch.setattr(decode, "dense", counted)
    return made


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_and_its_adjoint_decode_once_a_run(dtype: str, monkeypatch: Any) -> None:
    """Step by step, each run asks once; compiled, no run asks, and the function has one decode for both products."""
    weight = lookup4(1024, 2048, weight_dtype=dtype)
    proto, x = forward_and_adjoint([weight], dtype), values(dtype, 4096, 1024)
    monkeypatch.setattr(cuda, "hopper", lambda: False)  # which needs no decode
    assert {cuda.pick(dtype, 4096, n) for n in (1024, 2048)} == {"decode"}
    made = decodes(monkeypatch)
    monkeypatch.setenv(regions.SWITCH, "0")
    runtime = Runtime(proto, device="cuda")
    assert {choice.name for choice in runtime.kernels.values()} == {"cuda"}
    del made[:]
    for run in (1, 2):
        (steps,) = runtime.run(None, {"x": x})
        assert len(made) == run
    middle = (x.astype(np.float32) @ dense(weight).astype(np.float32)).astype(DTYPES[dtype])
    exact = middle.astype(np.float64) @ dense(weight).T
    np.testing.assert_allclose(steps.astype(np.float64), exact, atol=2 * 2.0**-8 * np.abs(exact).max())

    monkeypatch.setattr(cuda, "dense_of", lambda weight, make: make())
    (alone,) = Runtime(proto, device="cuda").run(None, {"x": x})
    np.testing.assert_array_equal(steps, alone)
    monkeypatch.undo()

    monkeypatch.setattr(cuda, "hopper", lambda: False)
    made = decodes(monkeypatch)
    runtime = Runtime(proto, device="cuda")
    for _ in range(2):
        (compiled,) = runtime.run(None, {"x": x})
        np.testing.assert_array_equal(compiled, steps)
    del made[:]
    (compiled,) = runtime.run(None, {"x": x})
    assert made == []
    np.testing.assert_array_equal(compiled, steps)
    (region,) = [call for call, *_ in runtime.plan.graph.lines if isinstance(call, regions.Region)]
    (function,), text = region.functions.values(), io.StringIO()
    assert function is not None
    with mx.stream(runtime.device):
        mx.export_to_dot(text, function([device(x, dtype)])[0])
    found = re.findall(r'label ?= ?"([A-Za-z]+)"', text.getvalue())
    assert [found.count(name) for name in ("CustomKernel", "Matmul")] == [1, 2]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_shared_matrix_goes_with_its_last_use(switch: str, monkeypatch: Any) -> None:
    """Of 48 weights, each with its adjoint behind it, some matrices are there at a time, and none after a run."""
    monkeypatch.setattr(cuda, "hopper", lambda: False)  # which needs no decode
    monkeypatch.setenv(regions.SWITCH, switch)
    one = lookup4(8192, 8192, weight_dtype="bfloat16")
    weights = [replace(one, codebook=formats.NF4 * np.float32(1 + place / 64)) for place in range(48)]
    runtime, matrix = Runtime(forward_and_adjoint(weights, "bfloat16"), device="cuda"), 2 * 8192 * 8192
    x = values("bfloat16", 512, 8192)
    made = decodes(monkeypatch)
    runtime.run(None, {"x": x})
    assert len(made) == 48 + (2 * 48 if switch == "1" else 0)  # a region tries each step by itself once
    before = mx.get_active_memory()
    limit = mx.set_memory_limit(before + 8 * matrix)  # over it, MLX lets work end before it asks for more
    try:
        for _ in range(3):
            mx.reset_peak_memory()
            runtime.run(None, {"x": x})
            assert mx.get_active_memory() - before < matrix
            assert mx.get_peak_memory() - before < 24 * matrix
    finally:
        mx.set_memory_limit(limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["product first", "adjoint first", "qmm"])
def test_one_matrix_serves_whatever_the_perm(kind: str, dtype: str, monkeypatch: Any) -> None:
    """With the decode by NumPy, so that it runs without a GPU: [N, K] of the weight that asks first."""
    first: Any = qmm(48, 64, 32, scales_dtype=DTYPES[dtype]) if kind == "qmm" else lookup4(48, 64, weight_dtype=dtype)
    other = replace(first) if kind == "qmm" else replace(first, perm=(1, 0))
    users, made = [other, first] if kind == "adjoint first" else [first, other], list[Any]()

    def in_numpy(weight: Any, dtype: str) -> mx.array:
        made.append(weight)
        return device((dense_qmm if kind == "qmm" else dense)(weight).T, dtype)

    monkeypatch.setattr(cuda, "arranged", lambda weight, half: weight)
    monkeypatch.setattr(decode, "dense", in_numpy)
    alone, shared = [], []
    for weight in users:
        decoded.planned(weight)
        alone.append(multiply(values(dtype, 5, depth_of(weight)), weight, dtype, "decode"))
    assert made == users
    with decoded.one_run():
        for weight in users:
            shared.append(multiply(values(dtype, 5, depth_of(weight)), weight, dtype, "decode"))
    assert made[2:] == users[:1]
    for weight, one, two in zip(users, alone, shared, strict=True):
        matrix = dense_qmm(weight) if kind == "qmm" else dense(weight)
        exact = values(dtype, 5, depth_of(weight)).astype(np.float64) @ matrix
        rough = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype] * np.abs(exact).max()
        for result in (one, two):
            np.testing.assert_allclose(result.astype(np.float64), exact, atol=4 * rough, rtol=0)


def depth_of(weight: Any) -> int:
    return int(weight.K if isinstance(weight, QmmWeight) else weight.shape[0])


# -- kernels that do not work


@pytest.mark.skipif(mx.cuda.is_available(), reason="needs a machine where the kernels do not work")
def test_kernels_that_fail_are_replaced_with_one_warning(monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "_WARNED", set())
    monkeypatch.setattr(cuda, "available", lambda: True)
    with pytest.warns(UserWarning, match="the cuda kernels fail .*; the reference serves instead") as warned:
        choices = [choose(lookup4(16, 128, seed=seed), "float32", "cuda") for seed in range(3)]
    assert len(warned) == 1
    assert {choice.name for choice in choices} == {"reference"}
    assert all(choice.refusals["cuda"].startswith("its kernels fail: ") for choice in choices)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_with_less_shared_memory_is_served_by_the_reference(dtype: str, monkeypatch: Any) -> None:
    """Blocks that ask for more than this GPU has, as ours do on smaller ones: one warning, then right results."""
    monkeypatch.setattr(kernels, "_WARNED", set())
    monkeypatch.setattr(cuda, "_WORKED", set())
    built = program._built.__wrapped__
    monkeypatch.setattr(
        program, "_built", lambda asked: built(replace(asked, shared=asked.shared + (512 << 10) * (asked.shared > 0)))
    )
    weights = [lookup4(256, 256, weight_dtype=dtype, seed=seed) for seed in range(2)]
    held = len(cuda_weights._ARRANGED)
    with pytest.warns(UserWarning, match="the cuda kernels fail .*; the reference serves instead") as warned:
        runtime = Runtime(forward_and_adjoint(weights, dtype), device="cuda")
    assert len(warned) == 1
    assert {choice.name for choice in runtime.kernels.values()} == {"reference"}
    assert len(cuda_weights._ARRANGED) == held
    x = values(dtype, 3, 256)
    (y,) = runtime.run(None, {"x": x})
    exact = x.astype(np.float64)
    for weight in weights:
        exact = exact @ dense(weight) @ dense(weight).T
    rough = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype] * np.abs(exact).max()
    np.testing.assert_allclose(y.astype(np.float64), exact, atol=rough, rtol=0)


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


def test_the_kernel_follows_the_rows_of_x(monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda, "hopper", lambda: False)
    assert [cuda.pick("bfloat16", m, 14336) for m in (1, 8, 9, 256, 257)] == ["gemv", "gemv", "tile", "tile", "decode"]
    assert [cuda.pick("float32", m, 14336) for m in (1, 4, 5, 4096)] == ["gemv", "gemv", "tile", "tile"]
    assert [cuda.pick("float16", m, 1024) for m in (512, 4096)] == ["tile", "decode"]
    monkeypatch.setattr(cuda, "hopper", lambda: True)
    assert [cuda.pick("bfloat16", m, 14336) for m in (1, 8, 9, 2048)] == ["gemv", "gemv", "tile", "tile"]
    assert general.ROWS > 0
