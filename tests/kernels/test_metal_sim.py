"""The Metal simulator itself: its text against MLX's, its arithmetic against NumPy, the faults that it must find."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from lut4tool.kernels import metal
from lut4tool.kernels.metal import source as metal_source
from tests.metal_sim import ORDERS, How, KernelError, Simulator, to_numpy
from tests.metal_sim.compiler import UNSUPPORTED, CompileError
from tests.metal_sim.lint import lint, spaces, words
from tests.products import DTYPES, lookup4, qmm, values

pytestmark = pytest.mark.skipif(bool(UNSUPPORTED), reason=UNSUPPORTED)

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
BFLOAT = np.dtype(ml_dtypes.bfloat16)


def launch(source: str, *inputs: np.ndarray, size: int = 64, threads: int = 64, how: How | None = None, **options: Any):
    """Run `source` with inputs a, b, ... and one output y of `size` floats, in one threadgroup unless `groups` says."""
    simulator = Simulator(how or How())
    kernel = simulator.metal_kernel("test", list("abc"[: len(inputs)]), ["y"], source, HEADER)
    (y,) = kernel(
        inputs=[mx.array(array) if array.dtype != BFLOAT else bfloat(array) for array in inputs],
        output_shapes=[(size,)],
        output_dtypes=[options.get("dtype", mx.float32)],
        grid=(threads * options.get("groups", 1), 1, 1),
        threadgroup=(threads, 1, 1),
        template=options.get("template", ()),
    )
    return to_numpy(y), simulator.calls[-1]


def bfloat(array: np.ndarray) -> mx.array:
    return mx.array(array.view(np.uint16)).view(mx.bfloat16)


# -- the text


def traced(product: Any, x: mx.array, path: Any, capfd: Any, monkeypatch: Any) -> list[str]:
    """The texts that MLX itself generates for a product."""
    real = mx.fast.metal_kernel

    def verbose(**facts: Any) -> Any:
        kernel = real(**facts)
        return lambda **call: kernel(**call, verbose=True)

    metal_source.built.cache_clear()
    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", verbose)
        mx.export_function(str(path), product, x)
    metal_source.built.cache_clear()
    ctypes.CDLL(None).fflush(None)  # MLX prints from C++
    return [part.split("\n```")[0] for part in capfd.readouterr().out.split("`:\n```\n")[1:]]


@pytest.mark.parametrize("kernel", ["gemv", "tile", "decode", "half"])
@pytest.mark.parametrize("kind", ["rows", "columns", "affine", "small"])
def test_the_text_is_mlxs_own(kind: str, kernel: str, tmp_path: Any, capfd: Any, monkeypatch: Any) -> None:
    weight: Any = {
        "rows": lambda: lookup4(40, 64, perm=(1, 0), weight_dtype="float16"),
        "columns": lambda: lookup4(40, 64, perm=(0, 1)),
        "affine": lambda: qmm(40, 64, 32, DTYPES["bfloat16"]),
        "small": lambda: lookup4(8, 1, 2, perm=(0, 1)),  # sums of fewer than 8 elements
    }[kind]()
    dtype = mx.bfloat16 if kind == "affine" else mx.float32
    K = weight.K if kind == "affine" else weight.shape[0]
    x = mx.array(values("float32", 2, K)).astype(dtype)

    def product(x: mx.array) -> mx.array:
        if kernel == "half":
            return metal.tile(x, metal.on_device(weight), mx.float16)
        return (metal.qmm if kind == "affine" else metal.lookup4_matmul)(x, weight, kernel)

    theirs = traced(product, x, tmp_path / "traced", capfd, monkeypatch)
    simulator = Simulator(How("fast"))
    simulator.install(monkeypatch)
    metal_source.built.cache_clear()
    product(x)
    metal_source.built.cache_clear()
    ours = [call.signature.text for call in simulator.calls]
    assert [text.strip() for text in theirs] == [text.strip() for text in ours]
    assert theirs
    assert [sentence for call in simulator.calls for sentence in lint(call.signature)] == []


# -- arithmetic


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("type_name", ["float", "half", "bfloat"])
@pytest.mark.parametrize("transpose", ["false", "true"])
def test_matrix_products(type_name: str, transpose: str, order: int) -> None:
    a, b = values("float32", 8, 8), values("float32", 8, 8, seed=2)
    text = f"""
threadgroup {type_name} tile[8 * 10];
uint lane = thread_index_in_simdgroup;
for (uint i = lane; i < 64; i += 32) tile[i / 8 * 10 + i % 8] = {type_name}(a[i]);
simdgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<{type_name}, 8, 8> left;
simdgroup_load(left, tile, 10, ulong2(0), {transpose});
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = lane; i < 64; i += 32) tile[i / 8 * 10 + i % 8] = {type_name}(b[i]);
simdgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_matrix<{type_name}, 8, 8> right;
simdgroup_load(right, tile, 10);
simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
simdgroup_multiply_accumulate(sum, left, right, sum);
uint row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
y[row * 8 + column] = sum.thread_elements()[0];
y[row * 8 + column + 1] = sum.thread_elements()[1];
"""
    y, call = launch(text, a, b, threads=32, how=How(matrix_order=order))
    dtype = {"float": np.float32, "half": np.float16, "bfloat": BFLOAT}[type_name]
    left, right = a.astype(dtype).astype(np.float64), b.astype(dtype).astype(np.float64)
    np.testing.assert_allclose(y.reshape(8, 8), 1 + (left.T if transpose == "true" else left) @ right, atol=2e-6)
    assert call.cost.matrix_products == 1


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT], ids=str)
def test_roundings_are_those_of_the_type(dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65520, 1e-8, -6e-8, 1 + 2**-9, 1 + 3 * 2**-9])
    a = np.concatenate([bits.view(np.float32), special.astype(np.float32)])
    kind = {2: "half"}.get(dtype.itemsize) if dtype != BFLOAT else "bfloat"
    text = f"uint i = thread_position_in_grid.x; y[i] = float({kind}(a[i]));"
    y, _ = launch(text, a, size=a.size, threads=1, groups=a.size, how=How("fast"))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(y, a.astype(dtype).astype(np.float32))


def test_shuffles_and_template_arguments() -> None:
    text = "uint i = thread_index_in_simdgroup; y[i] = simd_shuffle(a[i], ushort(SHIFT ? (i + 3) % 32 : i));"
    a = values("float32", 32)
    np.testing.assert_array_equal(launch(text, a, size=32, threads=32, template=[("SHIFT", True)])[0], np.roll(a, -3))


def test_orders_are_different_and_give_the_same() -> None:
    text = "uint i = thread_position_in_grid.x; y[i] = a[i];"
    a = values("float32", 256)
    for order in ORDERS:
        y, call = launch(text, a, size=256, groups=4, how=How(order=order, seed=3))
        np.testing.assert_array_equal(y, a)
        assert (call.cost.device_reads.requests, call.cost.device_reads.bytes) == (256, 1024)


# -- faults

A = np.arange(64, dtype=np.float32)
I = "uint i = thread_index_in_threadgroup; "  # noqa: E741  it is the kernels' own name
SHARED = "threadgroup float s[64]; " + I
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "
FAULTS = {
    "no barrier": (SHARED + "s[i] = a[i]; y[i] = s[63 - i];", "(data race|uninitialised memory): 4-byte read of 's'"),
    "a barrier of the wrong memory": (
        SHARED + "s[i] = a[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = s[63 - i];",
        "data race",
    ),
    "a write that overtakes a read": (
        SHARED + "s[i] = a[i]; " + BARRIER + "y[i] = s[63 - i]; s[i] = 0.0f;",
        r"data race: 4-byte (read|write) of 's'.* against",
    ),
    "no simdgroup barrier": (SHARED + "s[i] = a[i]; y[i] = s[i ^ 1];", "data race"),
    "two threads write one output": (I + "y[i / 2] = a[i]; y[32 + i / 2] = 0.0f;", "data race: 4-byte write of 'y'"),
    "a read past the end": (I + "y[i] = a[i + 1];", r"out of bounds: 4-byte read of 'a'\[64\]"),
    "a read before the start": (I + "y[i] = a[int(i) - 1];", r"out of bounds: 4-byte read of 'a'\[-1\]"),
    "a write past the end": (I + "y[i] = a[i]; if (i == 5) y[64] = 0.0f;", r"out of bounds: 4-byte write of 'y'\[64\]"),
    "threadgroup memory past the end": (SHARED + "s[i + 1] = a[i]; y[i] = s[i + 1];", "out of bounds|undefined"),
    "uninitialised": (SHARED + "if (i) s[i] = a[i]; y[i] = s[i];", r"uninitialised memory: 4-byte read of 's'\[0\]"),
    "an output not written": (I + "if (i != 7) y[i] = a[i];", r"output 'y' is never written at \[7\]"),
    "misaligned": (
        I + "y[i] = (*(const device float2*)(a + (i < 62 ? i + 1 : 0))).x;",
        "misaligned 8-byte access|undefined behaviour",
    ),
    "a barrier that some miss": (I + "if (i < 40) " + BARRIER + "y[i] = a[i];", "reached by 40 of 64 threads"),
    "barriers that differ": (
        I + "if (i < 32) {\n " + BARRIER + "} else {\n" + BARRIER + "}\n y[i] = a[i];",
        "threadgroup diverges",
    ),
    "a lane that is not there": (
        I + "y[i] = a[i]; if (i % 32 < 8) y[i] = simd_shuffle(a[i], ushort(9));",
        "a lane that is not there",
    ),
    "a matrix product of a few lanes": (
        I + "simdgroup_matrix<float, 8, 8> m; if (i % 32 < 30) simdgroup_multiply_accumulate(m, m, m, m); y[i] = a[i];",
        "reached by 30 of 32 lanes",
    ),
    "too much threadgroup memory": ("threadgroup float s[8200]; " + I + "s[i] = a[i]; y[i] = s[i];", "Metal allows"),
    "an input written": (I + "((device float*)a)[i] = 1.0f; y[i] = 0.0f;", "write to an input"),
    "a shift too far": (I + "y[i] = float(1u << (i + 1));", "undefined behaviour"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    text, sentence = FAULTS[fault]
    with pytest.raises(KernelError, match=sentence):
        launch(text, A)


@pytest.mark.parametrize(
    "fault", ["a barrier that some miss", "a matrix product of a few lanes", "too much threadgroup memory"]
)
def test_a_fault_is_found_in_fast_mode_too(fault: str) -> None:
    with pytest.raises(KernelError, match=FAULTS[fault][1]):
        launch(FAULTS[fault][0], A, how=How("fast"))


def test_far_out_of_bounds_and_poison_in_fast_mode() -> None:
    with pytest.raises(KernelError, match=r"out of bounds: 'a' at byte 4\d+ of 256"):
        launch(I + "y[i] = a[i + 1024];", A, how=How("fast"))
    y, _ = launch(SHARED + "if (i) s[i] = a[i]; y[i] = s[i];", A, how=How("fast"))
    assert np.isnan(y[0])
    np.testing.assert_array_equal(y[1:], A[1:])


def test_findings_name_the_line_of_the_text() -> None:
    with pytest.raises(KernelError, match=r"out of bounds.* at line (\d+)") as found:
        launch(f"\n\n{I}\ny[i] = a[i + 1];", A)
    text = HEADER + "[[kernel]] void x(\n  a,\n  y,\n  i) {\n" + f"\n\n{I}\ny[i] = a[i + 1];"
    assert f"at line {len(text.splitlines())}" in str(found.value)


def test_races_between_threadgroups() -> None:
    with pytest.raises(KernelError, match=r"data race: 4-byte write of 'y'.* in another threadgroup"):
        launch(I + "y[i] = a[i];", A, groups=2)


# -- lint


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("double d = a[0];", "there is no double"),
        ("float d = 1.0 * a[0];", "a number without f is a double: 1.0"),
        ("float v = a[0]; float* p = &v; v = *p;", "without an address space: float*"),
        ("const float& v = a[0]; y[0] = v;", "without an address space: const float&"),
        ("float z = a[0]; y[0] = std::max(z, z);", "there is no std"),
        ("static float z = 1.0f;", "there is no static storage"),
        ("auto f = [&](uint z) { return z; };", "there are no lambdas"),
    ],
)
def test_lint_of_words(source: str, sentence: str) -> None:
    assert [found for found in words(source) if sentence in found], words(source)
    assert words("threadgroup float* p = s; uint q = a * b; uint r = (a & b); const device float* z = x + 2;") == []


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("const threadgroup float* p = a; y[i] = p[i];", "with an lvalue of type 'device float const *'"),
        ("const device float* p = (const threadgroup float*)s; y[i] = p[i];", "threadgroup float const *"),
        ("half h = a[i] * 2.0f; y[i] = h;", "loses floating-point precision"),
    ],
)
def test_lint_of_address_spaces_and_conversions(source: str, sentence: str) -> None:
    right = "s[i] = a[i]; y[i] = s[i];"
    _, call = launch(SHARED + right, A)
    assert spaces(call.signature) == []
    wrong = replace(call.signature, text=call.signature.text.replace(right, source))
    assert [found for found in spaces(wrong) if sentence in found], spaces(wrong)


def test_what_is_not_in_the_shim_does_not_compile() -> None:
    with pytest.raises(CompileError, match="simd_prefix_sum"):
        launch(I + "y[i] = simd_prefix_sum(a[i]);", A)
