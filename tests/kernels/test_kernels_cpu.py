"""The CPU's kernels under every instruction set of this machine, against float64 from NumPy alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import runtime_of

from lut4tool import formats, native
from lut4tool.kernels import cpu, reference, thresholds
from lut4tool.runtime import RunError
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
    lookup4,
    qmm,
    values,
    with_special,
)

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "lut4tool" / "native"
pytestmark = pytest.mark.skipif(not native.compiled(), reason="the compiled module is not installed")
ALL = ("amx", "avx512", "avx2", "neon", "portable")


def here() -> list[str]:
    """The instruction sets of this machine, the one in use first."""
    first, found = native.product_instruction_set(), []
    for name in (first, *ALL):
        try:
            native._native.use_instruction_set(name)
        except ValueError:
            continue
        found.append(name)
    native._native.use_instruction_set(first)
    return list(dict.fromkeys(found))


ISAS = here() if native.compiled() else []


@pytest.fixture(params=ISAS)
def isa(request: Any) -> Iterator[str]:
    """Force an instruction set for one test."""
    native._native.use_instruction_set(request.param)
    yield request.param
    native._native.use_instruction_set(ISAS[0])


def matrix_of(weight: Lookup4Weight | QmmWeight) -> np.ndarray:
    return dense(weight) if isinstance(weight, Lookup4Weight) else dense_qmm(weight)


def multiply(x: np.ndarray, weight: Lookup4Weight | QmmWeight, kernel: str = "", threads: int = 2) -> np.ndarray:
    """The product by a kernel, which is the one that made it."""
    y = np.full((len(x), matrix_shape(weight)[1]), np.nan, np.float32)
    made = native.Matrix(weight).multiply(x, y, kernel, threads)
    assert made == (kernel or native.Matrix(weight).kernel(len(x)))
    return y


def matrix_shape(weight: Lookup4Weight | QmmWeight) -> tuple[int, int]:
    return weight.shape if isinstance(weight, Lookup4Weight) else (weight.K, weight.N)


def run(weight: Lookup4Weight | QmmWeight, x: np.ndarray, isa: str, dtype: str = "float32") -> np.ndarray:
    """Through the Runtime, from NumPy to NumPy; the plan says that the CPU's kernels served, and which."""
    runtime = runtime_of(weight, dtype)
    assert {node: choice.name for node, choice in runtime.kernels.items()} == {"product": f"cpu {isa}"}
    (y,) = runtime.run(None, {"x": x})
    assert y.dtype == x.dtype
    return y


#: rows, cols, block: aligned; tails of a group and of a panel; blocks that cross rows at multiples of 32; blocks that
#: begin anywhere; a block larger than the weight; one element.
SHAPES = [(128, 256, 64), (160, 96, 32), (352, 416, 64), (96, 160, 128), (96, 100, 32), (33, 70, 16), (7, 3, 4),
          (5, 9, 4096), (64, 64, 8192), (1, 1, 2)]  # fmt: skip


@pytest.mark.parametrize("m", [0, 1, 2, 5, 7, 17, 130])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lookup4_of_every_shape(shape: tuple[int, int, int], perm: tuple[int, int], m: int, isa: str) -> None:
    weight = lookup4(*shape, perm=perm)
    x = values("float32", m, weight.shape[0])
    check(run(weight, x, isa), x, dense(weight))


@pytest.mark.parametrize(
    "facts",
    [
        {"high_nibble_first": False},
        {"codebook": formats.FP4},
        {"codebook": formats.NF4.astype(np.float16), "scales_dtype": np.float16},
        {"scales_dtype": DTYPES["bfloat16"]},
        {"weight_dtype": "float16"},
        {"weight_dtype": "bfloat16", "high_nibble_first": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("cols", [192, 100])
def test_lookup4_of_every_kind(facts: dict[str, Any], perm: tuple[int, int], m: int, cols: int, isa: str) -> None:
    weight = lookup4(64, cols, 32, perm=perm, **facts)
    x = values("float32", m, weight.shape[0])
    check(run(weight, x, isa), x, dense(weight))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 17])
def test_halves_round_the_weight_as_proved_and_the_sum_once(
    dtype: str, perm: tuple[int, int], m: int, isa: str
) -> None:
    weight = lookup4(96, 128, 64, perm=perm, weight_dtype=dtype)
    x = values(dtype, m, weight.shape[0])
    check(run(weight, x, isa, dtype), x, dense(weight), dtype)


@pytest.mark.parametrize("points", ["codes", "one", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [(40, 256, 32), (24, 640, 128), (5, 333, 32), (70, 100, 64), (5, 33, 16), (1, 1, 2)])
def test_qmm(points: str, dtype: str, m: int, shape: tuple[int, int, int], isa: str) -> None:
    weight = qmm(*shape, scales_dtype=DTYPES[dtype], points=points)
    x = values(dtype, m, weight.K)
    check(run(weight, x, isa, dtype), x, dense_qmm(weight), dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([1, 2, 32]), "step")
    rows, cols = (step * data.draw(st.integers(1, 400 // step), name) for name in ("rows", "cols"))
    block = data.draw(st.sampled_from([2, 6, 16, 32, 64, 96, 256, 100000]), "block")
    m, threads = data.draw(st.integers(0, 20), "m"), data.draw(st.integers(1, 3), "threads")
    perm = data.draw(st.sampled_from([(0, 1), (1, 0)]), "perm")
    weight = lookup4(rows, cols, block, seed=m, perm=perm, high_nibble_first=data.draw(st.booleans(), "high first"))
    native._native.use_instruction_set(data.draw(st.sampled_from(ISAS), "isa"))
    try:
        x = values("float32", m, weight.shape[0])
        check(multiply(x, weight, threads=threads), x, dense(weight))
    finally:
        native._native.use_instruction_set(ISAS[0])


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("kernel", "m"), [("gemv", 1), ("tile", 1), ("tile", 40)])
def test_the_bytes_do_not_depend_on_threads(perm: tuple[int, int], kernel: str, m: int, isa: str) -> None:
    weight = lookup4(1024, 2048, perm=perm)  # enough work for several pieces
    x = values("float32", m, weight.shape[0])
    one = multiply(x, weight, kernel, threads=1)
    check(one, x, dense(weight))
    np.testing.assert_array_equal(multiply(x, weight, kernel, threads=2), one)


# -- exactness


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("kernel", "m"), [("gemv", 1), ("tile", 2)])
@pytest.mark.parametrize("k", [14336, 65536])
def test_the_bound_holds_for_adversaries(perm: tuple[int, int], kernel: str, m: int, k: int, isa: str) -> None:
    n = 32
    rows, cols = (k, n) if perm == (0, 1) else (n, k)
    packed = np.full(rows * cols // 2, 0xFF, np.uint8)  # the codebook's last entry, 1
    for seed, name in enumerate(ADVERSARIES):
        scales = np.full(rows * cols // 32, 0.7 if name in ADVERSARIES[:4] else 1, np.float32)
        weight = Lookup4Weight(packed, scales, formats.NF4, rows, cols, 32, perm)
        x = adversary(name, m, k, seed)
        check(multiply(x, weight, kernel), x, dense(weight))


def test_the_adversaries_defeat_a_running_sum() -> None:
    """The test above can fail: chains of 64 terms in float32, as a plain kernel sums, leave the bound."""
    x = adversary("1/64", 1, 14336, 0)[0]
    chains = np.cumsum(x.reshape(-1, 64), axis=1, dtype=np.float32)[:, -1]
    exact = x.astype(np.float64).sum()
    assert abs(chains.astype(np.float64).sum() - exact) > 4 * 2.0**-21 * exact


# -- IEEE


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 3, 30])
@pytest.mark.parametrize(("where", "special"), SPECIALS)
def test_nan_and_inf_go_through_as_ieee_says(
    perm: tuple[int, int], m: int, where: str, special: float, isa: str
) -> None:
    x, weight = with_special(lookup4(96, 64, 32, perm=perm), m, where, special)
    y = np.full((m, weight.shape[1]), np.nan, np.float32)
    native.Matrix(weight).multiply(x, y)
    check_special(y, x, weight)


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize("m", [1, 3])
def test_a_sum_that_overflows_only_on_the_way_is_right(perm: tuple[int, int], m: int, isa: str) -> None:
    weight = lookup4(64, 64, 32, perm=perm)
    x = np.full((m, 64), 2e38, np.float32)
    exact = x.astype(np.float64) @ dense(weight)
    with np.errstate(over="ignore"):
        want = exact.astype(np.float32)
    assert np.isinf(want).any()
    assert np.isfinite(want).any()
    np.testing.assert_allclose(multiply(x, weight), want, rtol=1e-6)


@pytest.mark.parametrize("m", [1, 3])
def test_padding_of_a_qmm_row_is_not_multiplied(m: int, isa: str) -> None:
    """K ends inside a block whose scale is Inf: the codes behind it would make NaN of it."""
    weight = qmm(6, 72, 32)
    scales = weight.scales.copy()
    scales[:, -1] = np.inf
    packed = weight.packed.copy()
    packed[:, -1, :4], packed[:, -1, 4:] = 0xFF, 0x00
    zeros = np.zeros_like(weight.zero_points)
    weight = QmmWeight(packed, scales, zeros, 72, 6, 32)
    assert np.all(multiply(np.ones((m, 72), np.float32), weight) == np.inf)


# -- choice and switches


def test_one_row_is_gemv_and_more_are_a_tile() -> None:
    aligned, ragged = native.Matrix(lookup4(64, 96, 32)), native.Matrix(lookup4(64, 90, 32))
    assert [aligned.kernel(m) for m in (0, 1, 2, 512)] == ["tile", "gemv", "tile", "tile"]
    assert ragged.kernel(1) == "tile"
    assert (aligned.serves_gemv, ragged.serves_gemv) == (True, False)


@pytest.mark.parametrize(("perm", "layout"), [((0, 1), "W [K, N]"), ((1, 0), "W [N, K]")])
def test_each_instruction_set_has_thresholds_of_its_own(perm: tuple[int, int], layout: str, isa: str) -> None:
    weight = lookup4(64, 96, 32, perm=perm)
    most = thresholds.MOST_ROWS["cpu"][f"{layout}, {isa if isa in ('amx', 'avx512') else 'avx2'}"]
    assert [cpu.pick(rows, weight) for rows in (1, most["gemv"], most["gemv"] + 1)] == ["gemv", "gemv", "tile"]


@pytest.mark.parametrize("kernel", ["gemv", "tile"])
def test_a_forced_kernel_serves_any_m(kernel: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("LUT4TOOL_KERNEL", kernel)
    weight = lookup4(96, 64, 32)
    runtime, x = runtime_of(weight), values("float32", 3, 96)
    assert runtime.kernels["product"].name == f"cpu/{kernel} {ISAS[0]}"
    check(runtime.run(None, {"x": x})[0], x, dense(weight))


def test_gemv_forced_on_a_weight_that_it_does_not_serve_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setenv("LUT4TOOL_KERNEL", "gemv")
    with pytest.raises(RunError, match="gemv needs blocks and rows that begin at multiples of 32 elements"):
        runtime_of(lookup4(96, 50, 16)).run(None, {"x": values("float32", 1, 96)})


@pytest.mark.parametrize("name", ISAS)
def test_the_environment_forces_an_instruction_set(name: str) -> None:
    program = "from lut4tool import native; print(native.product_instruction_set(), native.describe())"
    environment = {**os.environ, "LUT4TOOL_CPU_ISA": name}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[0] == name


def test_an_instruction_set_that_is_not_here_is_an_error() -> None:
    environment = {**os.environ, "LUT4TOOL_CPU_ISA": "avx1024"}
    command = [sys.executable, "-m", "lut4tool.cli", "selftest"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "lut4tool: LUT4TOOL_CPU_ISA: this machine has no instruction set avx1024\n"


def test_a_wrong_product_is_found_warned_of_and_refused(monkeypatch: Any) -> None:
    def wrong(self: Any, x: np.ndarray, out: np.ndarray, kernel: str = "", threads: int = 0) -> None:
        out[:] = 0

    cpu.available.cache_clear()
    monkeypatch.setattr(native.Matrix, "multiply", wrong)
    try:
        with pytest.warns(UserWarning, match=f"lut4tool's gemv kernel for {ISAS[0]} gives wrong products here"):
            choice = runtime_of(lookup4(96, 64, 32)).kernels["product"]
        assert (choice.name, dict(choice.refusals)) == ("reference", {"cpu": "it gives wrong products on this machine"})
    finally:
        cpu.available.cache_clear()


def test_what_is_refused_and_why() -> None:
    half = lookup4(32, 32, weight_dtype="float16")
    assert cpu.refuses(mx.zeros((1, 32), mx.bfloat16), half) == (
        "x is bfloat16 and the weight float16; a bfloat16 x takes a bfloat16 weight"
    )
    assert cpu.refuses(mx.zeros((1, 32), mx.int32), half) is not None
    assert cpu.refuses(mx.zeros((1, 32), mx.float32), half) is None


def test_mlx_arrays_give_mlx_arrays() -> None:
    weight, x = lookup4(64, 96, 32), values("float32", 3, 64)
    y = cpu.lookup4_matmul(mx.array(x), weight)
    assert isinstance(y, mx.array)
    check(np.array(y), x, dense(weight))
    np.testing.assert_array_equal(np.array(cpu.lookup4_decode(weight)), np.array(reference.lookup4_decode(weight)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"packed": 10}, "packed has 10 values, and 512 are needed"),
        ({"scales": 3}, "scales has 3 values, and 32 are needed"),
        ({"rows": 2**61}, "the weight is too large"),
    ],
)
def test_buffers_are_checked_before_they_are_read(change: dict[str, int], sentence: str) -> None:
    packed, scales = np.zeros(change.get("packed", 512), np.uint8), np.zeros(change.get("scales", 32), np.float32)
    with pytest.raises(ValueError, match=sentence):
        native._native.lookup4_matrix(
            packed, scales, formats.NF4, change.get("rows", 32), 32, 32, True, True, "float32"
        )


def test_shapes_are_checked_before_they_are_read() -> None:
    matrix = native.Matrix(lookup4(32, 64, 32))
    for x, y in (((2, 31), (2, 64)), ((2, 32), (2, 63)), ((2, 32), (1, 64))):
        with pytest.raises(ValueError, match=r"x must be \[M, K\] and y \[M, N\]"):
            matrix.multiply(np.zeros(x, np.float32), np.zeros(y, np.float32))


# -- where weights lie, threads, memory


def test_weights_are_read_where_they_lie(tmp_path: Path) -> None:
    """From a file's map, at an odd offset, and as they are at the time: nothing was copied."""
    file = tmp_path / "weights"
    source = lookup4(64, 96, 32)
    file.write_bytes(b"?" + source.packed.tobytes())
    packed = np.memmap(file, np.uint8, "r+", offset=1, shape=source.packed.shape)
    weight = Lookup4Weight(packed, source.scales, source.codebook, 64, 96, 32)
    matrix, x, y = native.Matrix(weight), values("float32", 3, 64), np.empty((3, 96), np.float32)
    matrix.multiply(x, y)
    check(y, x, dense(source))
    packed[:] = 0xFF - packed
    matrix.multiply(x, y)
    check(y, x, dense(weight))


def test_a_matrix_keeps_its_arrays() -> None:
    weight = lookup4(64, 96, 32)
    matrix = native.Matrix(Lookup4Weight(weight.packed.copy(), weight.scales.copy(), formats.NF4, 64, 96, 32))
    np.full((1 << 20,), 7, np.uint8)  # what would take the place of arrays that are gone
    x, y = values("float32", 1, 64), np.empty((1, 96), np.float32)
    matrix.multiply(x, y)
    check(y, x, dense(weight))


def test_several_threads_and_a_fork_use_the_pool_at_once() -> None:
    program = """
import os, threading
import numpy as np
from lut4tool import native
from lut4tool.formats import NF4, Lookup4Weight
packed, scales = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8), np.ones(1 << 15, np.float32)
matrix = native.Matrix(Lookup4Weight(packed, scales, NF4, 1024, 2048, 64))
x = np.linspace(-1, 1, 8 * 1024, dtype=np.float32).reshape(8, 1024)
def product():
    y = np.empty((8, 2048), np.float32)
    matrix.multiply(x, y, threads=2)
    return y
expected = product()
def work():
    for _ in range(20):
        assert np.array_equal(product(), expected)
workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers: worker.start()
for worker in workers: worker.join()
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(product(), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr


def test_the_gil_is_released() -> None:
    weight = lookup4(4096, 4096)
    matrix, x, y = native.Matrix(weight), values("float32", 16, 4096), np.empty((16, 4096), np.float32)
    counted, started, done = 0, threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        matrix.multiply(x, y, threads=1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    while not done.is_set():
        counted += 1
    thread.join()
    assert counted > 100  # with the GIL held, the loop stands still while C++ runs


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
@pytest.mark.parametrize("m", [1, 128])
def test_the_process_never_holds_a_dense_weight(m: int) -> None:
    """14336 x 4096: 33 MB packed with its scales, 235 MB in float32; in a fresh process, for its peak is for life."""
    program = f"""
import numpy as np
from pathlib import Path
from tests.kernels.test_kernels import lookup4, runtime_of, values
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
weight = lookup4(14336, 4096, perm=(1, 0))
runtime_of(lookup4(64, 64)).run(None, {{"x": values("float32", 1, 64)}})
before = peak()
runtime = runtime_of(weight)
assert runtime.kernels["product"].name.startswith("cpu ")
runtime.run(None, {{"x": values("float32", {m}, 4096)}})
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) < 100 * 1024  # the model's proto and its bytes are 33 MB each


# -- sizes past int32: zeros that are never written take no memory, and what is not zero lies behind them

LONG = 1 << 15


@pytest.mark.parametrize("perm", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("kernel", "m"), [("gemv", 1), ("tile", 2), pytest.param("digits", 17, marks=pytest.mark.slow)]
)
def test_a_weight_of_more_than_2_to_the_32_elements(kernel: str, m: int, perm: tuple[int, int]) -> None:
    rows, last = (1 << 17) + 16, 16
    packed, scales = np.zeros(rows * LONG // 2, np.uint8), np.ones(rows * LONG // 4096, np.float32)
    end = lookup4(last, LONG, 4096, perm=perm, codebook=formats.FP4)  # whose code 0 is 0
    packed[-end.packed.size :], scales[-end.scales.size :] = end.packed, end.scales
    weight = Lookup4Weight(packed, scales, formats.FP4, rows, LONG, 4096, perm)
    x, y = values("float32", m, weight.shape[0]), np.full((m, weight.shape[1]), np.nan, np.float32)
    native.Matrix(weight).multiply(x, y, kernel)
    if perm == (0, 1):
        check(y, x[:, -last:], dense(end))
    else:
        check(y[:, -last:], x, dense(end))
        assert not y[:, :-last].any()


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "perm"), [("tile", (1, 0)), ("digits", (0, 1))])
def test_x_of_more_than_2_to_the_31_elements(kernel: str, perm: tuple[int, int]) -> None:
    weight = lookup4(*((LONG, 32) if perm == (0, 1) else (32, LONG)), 32, perm=perm)
    m, last = (1 << 16) + 20, 20
    x, y = np.zeros((m, LONG), np.float32), np.full((m, 32), np.nan, np.float32)
    x[-last:] = values("float32", last, LONG)
    native.Matrix(weight).multiply(x, y, kernel)
    check(y[-last:], x[-last:], dense(weight))
    assert not y[:-last].any()


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "perm"), [("tile", (0, 1)), ("digits", (1, 0))])
def test_an_output_of_more_than_2_to_the_31_bytes(kernel: str, perm: tuple[int, int]) -> None:
    n, m = 1 << 16, (1 << 13) + 30
    weight = lookup4(*((32, n) if perm == (0, 1) else (n, 32)), 32, perm=perm)
    x, y = np.zeros((m, 32), np.float32), np.empty((m, n), np.float32)
    x[-30:] = values("float32", 30, 32)
    native.Matrix(weight).multiply(x, y, kernel)
    check(y[-30:], x[-30:], dense(weight))
    assert not y[:-30].any()


# -- NEON, in an emulator

CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.fixture(scope="module")
def arm(tmp_path_factory: Any) -> Path:
    """The kernels and a program that runs one product, built for 64-bit Arm."""
    program = tmp_path_factory.mktemp("arm") / "product"
    sources = [NATIVE / f"{name}.cpp" for name in ("product", "product_portable", "product_neon", "threads")]
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-DLUT4TOOL_NEON_KERNELS"]
    command = [
        str(CROSS),
        *flags,
        "-static",
        f"-I{NATIVE}",
        "-o",
        program,
        ROOT / "tests" / "one_product.cpp",
        *sources,
    ]
    subprocess.run(command, check=True)
    return Path(program)


def on_arm(program: Path, weight: Lookup4Weight | QmmWeight, x: np.ndarray, kernel: str) -> np.ndarray:
    """One product in the emulator; the program says that NEON served."""
    halves = ["float32", "float16", "bfloat16"].index(weight.weight_dtype)
    choice = ["", "gemv", "tile"].index(kernel)
    scales = weight.scales.astype(np.float32)
    if isinstance(weight, Lookup4Weight):
        facts = [weight.rows, weight.cols, weight.block_size, weight.perm == (1, 0), weight.high_nibble_first]
        last, points = weight.codebook.astype(np.float32), 0
    else:
        facts = [weight.N, weight.K, weight.block_size, True, False]
        last, points = weight.zero_points, weight.zero_points.size
    facts += [halves, len(x), choice, weight.packed.size, scales.size, points]
    parts = (np.array(facts, np.int64), weight.packed, scales, last, x)
    done = subprocess.run(
        [str(QEMU), program], input=b"".join(part.tobytes() for part in parts), capture_output=True, check=True
    )
    assert done.stderr == b"neon\n"
    return np.frombuffer(done.stdout, np.float32).reshape(len(x), -1)


@pytest.mark.slow
@pytest.mark.skipif(not (CROSS and QEMU), reason="needs Debian's g++-aarch64-linux-gnu and qemu-user")
def test_neon_in_an_emulator(arm: Path) -> None:
    for shape in SHAPES:
        for perm in ((0, 1), (1, 0)):
            for facts in ({}, {"weight_dtype": "float16"}, {"weight_dtype": "bfloat16", "high_nibble_first": False}):
                weight = lookup4(*shape, perm=perm, **facts)
                for m in (1, 9):
                    x = values("float32", m, weight.shape[0])
                    check(on_arm(arm, weight, x, ""), x, dense(weight))
    for affine in (qmm(40, 256, 32), qmm(5, 333, 64, points="one"), qmm(5, 33, 16)):
        for m in (1, 9):
            x = values("float32", m, affine.K)
            check(on_arm(arm, affine, x, ""), x, dense_qmm(affine))
    for perm in ((0, 1), (1, 0)):
        rows, cols = (14336, 32) if perm == (0, 1) else (32, 14336)
        packed, scales = np.full(rows * cols // 2, 0xFF, np.uint8), np.ones(rows * cols // 32, np.float32)
        weight = Lookup4Weight(packed, scales, formats.NF4, rows, cols, 32, perm)
        for seed, name in enumerate(ADVERSARIES):
            x = adversary(name, 2, 14336, seed)
            check(on_arm(arm, weight, x, "tile"), x, dense(weight))
            check(on_arm(arm, weight, x[:1], "gemv"), x[:1], dense(weight))
