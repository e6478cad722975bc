"""The compiled decode against formats' NumPy decode and against scalar arithmetic written out here."""

from __future__ import annotations

import struct
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lut4tool import formats, native
from lut4tool.formats import FLOAT_DTYPES, FP4, NF4, FormatError, Lookup4Weight, QmmWeight

FLOATS = list(FLOAT_DTYPES)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 65504.0, 65519.0, 65520.0, 6e-8, 2.9e-8, 1e-40, 6.1e-5]

needs_native = pytest.mark.skipif(not native.compiled(), reason="the package was built without its compiled module")


@pytest.fixture(params=["avx512", "avx2", "portable"])
def instruction_set(request):
    """Run the test once with each instruction set that this machine has."""
    if not native.compiled():
        pytest.skip("the package was built without its compiled module")
    before = native._native.instruction_set()
    try:
        native._native.use_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this machine lacks {request.param}")
    yield request.param
    native._native.use_instruction_set(before)


def bits(values: np.ndarray) -> np.ndarray:
    """The bits of each value, every NaN made the same."""
    values = values.copy()
    values[np.isnan(values.astype(np.float32))] = np.nan
    return values.view(np.uint32 if values.itemsize == 4 else np.uint16)


def lookup4(rng, rows, cols, block_size, weight_dtype="float32", stored="float32", high=True, special=False):
    """A weight of random codes and scales, with special values among its scales and codebook where asked."""
    blocks = -(-rows * cols // block_size)
    scales = rng.standard_normal(blocks) * 10.0 ** rng.integers(-6, 6, blocks)
    codebook = rng.standard_normal(16)
    if special:
        scales[: len(SPECIAL)] = SPECIAL[:blocks]
        codebook[:10] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -1.0, 65520.0, 1e-38, 1e-8]
    packed = rng.integers(0, 256, blocks * block_size // 2, dtype=np.uint8)
    with np.errstate(all="ignore"):
        scales, codebook = scales.astype(FLOAT_DTYPES[stored]), codebook.astype(FLOAT_DTYPES[stored])
    return Lookup4Weight(packed, scales, codebook, rows, cols, block_size, (0, 1), high, weight_dtype)


def qmm(rng, N, K, block_size, dtype="float32", zero_points="codes"):
    """A QMM weight with random codes; zero_points is "codes", "floats" or "one"."""
    grid = (N, -(-K // block_size))
    scales = (rng.standard_normal(grid) * 10.0 ** rng.integers(-5, 3, grid)).astype(FLOAT_DTYPES[dtype])
    zeros = {
        "codes": rng.integers(0, 16, grid).astype(np.uint8),
        "floats": rng.uniform(-3, 20, grid).astype(FLOAT_DTYPES[dtype]),
        "one": np.array([[8]], np.uint8),
    }[zero_points]
    packed = rng.integers(0, 256, (*grid, block_size // 2), dtype=np.uint8)
    return QmmWeight(packed, scales, zeros, K, N, block_size)


def round_scalar(value: float, dtype: str) -> float:
    """One rounding of a float64 to the type, to nearest and ties to even, by Python's own struct or by hand."""
    if np.isnan(value) or np.isinf(value):
        return value
    if dtype == "bfloat16":
        single = round_scalar(value, "float32")
        if np.isinf(single):
            return single
        (word,) = struct.unpack("<I", struct.pack("<f", single))
        low, word = word & 0xFFFF, word >> 16
        word += low > 0x8000 or (low == 0x8000 and word & 1)
        return struct.unpack("<f", struct.pack("<I", word << 16))[0]
    try:
        code = "<f" if dtype == "float32" else "<e"
        return struct.unpack(code, struct.pack(code, value))[0]
    except OverflowError:
        return float(np.copysign(np.inf, value))


def decode_scalar(weight: Lookup4Weight) -> list[float]:
    """The definition, one element after the other. A product of two float32 is exact in float64."""
    values = []
    for index in range(weight.rows * weight.cols):
        byte = int(weight.packed[index // 2])
        first = index % 2 == 0
        code = byte >> 4 if first == weight.high_nibble_first else byte & 15
        product = float(weight.codebook[code]) * float(weight.scales[index // weight.block_size])
        values.append(round_scalar(round_scalar(product, "float32"), weight.weight_dtype))
    return values


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("high", [True, False])
def test_equals_scalar_arithmetic(instruction_set, weight_dtype, high):
    weight = lookup4(np.random.default_rng(1), 37, 29, 32, weight_dtype, high=high, special=True)
    want = np.array(decode_scalar(weight)).astype(np.float32)
    got = native.decode_elements(weight, 0, 37 * 29)
    assert got.dtype == FLOAT_DTYPES[weight_dtype]
    assert np.array_equal(bits(got.astype(np.float32)), bits(want))


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("block_size", [2, 4, 6, 16, 34, 64, 256, 4096])
def test_equals_numpy(instruction_set, weight_dtype, stored, block_size):
    rng = np.random.default_rng(block_size)
    for high in (True, False):
        for rows, cols in ((1, 1), (3, 5), (31, 67), (64, 130)):
            weight = lookup4(rng, rows, cols, block_size, weight_dtype, stored, high, special=True)
            got = native.decode_elements(weight, 0, rows * cols)
            assert np.array_equal(bits(got), bits(formats.decode_elements(weight, 0, rows * cols)))


@needs_native
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_span_equals_numpy(data):
    block_size = 2 * data.draw(st.integers(1, 70))
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    total, blocks = rows * cols, -(-rows * cols // block_size)
    start = data.draw(st.integers(0, blocks - 1)) * block_size
    stop = data.draw(st.integers(start, total))
    weight = lookup4(np.random.default_rng(total), rows, cols, block_size, data.draw(st.sampled_from(FLOATS)))
    got = native.decode_elements(weight, start, stop, threads=data.draw(st.integers(0, 3)))
    assert np.array_equal(bits(got), bits(formats.decode_elements(weight, start, stop)))


@needs_native
@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16"])
def test_every_half_and_every_tie_rounds_as_ieee(instruction_set, weight_dtype):
    # Scales are all float32 values halfway between two neighbouring halves and the ones beside them.
    halves = np.arange(0x7F80 if weight_dtype == "bfloat16" else 0x7C01, dtype=np.uint16)
    exact = halves.view(FLOAT_DTYPES[weight_dtype]).astype(np.float32)
    ties = ((exact[:-1].astype(np.float64) + exact[1:]) / 2)[np.isfinite(exact[1:])].astype(np.float32)
    scales = np.concatenate([exact, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    codebook = np.array([1, -1] * 8, np.float32)
    packed = np.full(scales.size, 0x01, np.uint8)
    weight = Lookup4Weight(packed, scales, codebook, scales.size, 2, 2, weight_dtype=weight_dtype)
    got = native.decode_elements(weight, 0, 2 * scales.size)
    with np.errstate(over="ignore"):
        want = np.stack([scales, -scales], axis=1).reshape(-1).astype(FLOAT_DTYPES[weight_dtype])
    assert np.array_equal(bits(got), bits(want))


@pytest.mark.parametrize("codebook", [NF4, FP4])
def test_threads_give_the_same_bytes(codebook):
    rng = np.random.default_rng(3)
    rows, cols = 1025, 1023
    blocks = -(-rows * cols // 64)
    packed = rng.integers(0, 256, (rows * cols + 1) // 2, dtype=np.uint8)
    weight = Lookup4Weight(packed, rng.random(blocks, np.float32), codebook, rows, cols, 64)
    want = formats.decode_elements(weight, 0, rows * cols)
    for threads in (0, 1, 2, 7, 1000):
        assert np.array_equal(bits(native.decode_elements(weight, 0, rows * cols, threads=threads)), bits(want))


def test_out_is_filled_and_returned():
    weight = lookup4(np.random.default_rng(4), 8, 16, 32, "bfloat16")
    out = np.zeros(64, ml_dtypes.bfloat16)
    assert native.decode_elements(weight, 32, 96, out) is out
    assert np.array_equal(bits(out), bits(formats.decode_elements(weight, 32, 96)))


def test_views_that_are_not_contiguous_or_aligned_decode():
    weight = lookup4(np.random.default_rng(5), 16, 16, 16)
    packed = np.repeat(weight.packed, 2)[::2]
    raw = np.frombuffer(b"\0" + weight.scales.tobytes(), np.uint8)[1:].view(np.float32)
    assert not packed.flags.c_contiguous
    assert not raw.flags.aligned
    odd = Lookup4Weight(packed, raw, weight.codebook, 16, 16, 16)
    assert np.array_equal(native.decode_elements(odd, 0, 256), formats.decode_elements(weight, 0, 256))


@pytest.mark.parametrize(("start", "stop"), [(1, 32), (0, 257), (-16, 16), (32, 16)])
def test_a_wrong_span_is_refused(start, stop):
    weight = lookup4(np.random.default_rng(6), 16, 16, 16)
    with pytest.raises(FormatError, match=f"elements {start} to {stop}"):
        native.decode_elements(weight, start, stop)


@pytest.mark.parametrize(
    "out",
    [
        np.empty(255, np.float32),
        np.empty(256, np.float16),
        np.empty(512, np.float32)[::2],
        np.empty((16, 16), np.float32),
    ],
    ids=["short", "type", "strided", "shape"],
)
def test_a_wrong_out_is_refused(out):
    weight = lookup4(np.random.default_rng(7), 16, 16, 16)
    with pytest.raises(FormatError, match=r"out must be a writable C-contiguous float32 array of shape \[256\]"):
        native.decode_elements(weight, 0, 256, out)


@needs_native
def test_the_binding_checks_its_bounds():
    packed, scales, out = np.zeros(32, np.uint8), np.ones(4, np.float32), np.empty(64, np.float32)
    call = native._native.decode_elements
    call(packed, scales, NF4, 16, True, out)
    with pytest.raises(ValueError, match="packed has 31 values, and 32 are needed"):
        call(packed[:31], scales, NF4, 16, True, out)
    with pytest.raises(ValueError, match="scales has 3 values, and 4 are needed"):
        call(packed, scales[:3], NF4, 16, True, out)
    with pytest.raises(ValueError, match="codebook must have 16 values, not 15"):
        call(packed, scales, NF4[:15], 16, True, out)
    with pytest.raises(ValueError, match="block_size must be even and at least 2, not 0"):
        call(packed, scales, NF4, 0, True, out)
    with pytest.raises(ValueError, match="scales must be float32, float16 or uint16"):
        call(packed, scales.astype(np.float64), NF4, 16, True, out)
    out.flags.writeable = False
    with pytest.raises(TypeError):
        call(packed, scales, NF4, 16, True, out)


@needs_native
def test_the_qmm_binding_checks_its_bounds():
    packed, scales, zeros = np.zeros(4 * 2 * 8, np.uint8), np.ones(8, np.float32), np.zeros(8, np.uint8)
    out = np.empty(4 * 30, np.float32)
    call = native._native.decode_qmm
    call(packed, scales, zeros, 4, 30, 16, out)
    with pytest.raises(ValueError, match=r"packed, in blocks, has 7 values, and 8 are needed"):
        call(packed[:-1], scales, zeros, 4, 30, 16, out)
    with pytest.raises(ValueError, match="scales has 7 values, and 8 are needed"):
        call(packed, scales[:7], zeros, 4, 30, 16, out)
    with pytest.raises(ValueError, match="zero_points must have one value, or one a block"):
        call(packed, scales, zeros[:7], 4, 30, 16, out)
    with pytest.raises(ValueError, match="zero_points must be uint8 or of the scales' type"):
        call(packed, scales, zeros.astype(np.float16), 4, 30, 16, out)
    with pytest.raises(ValueError, match="out must have rows x K values"):
        call(packed, scales, zeros, 4, 31, 16, out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zero_points", ["codes", "floats", "one"])
@pytest.mark.parametrize(("N", "K", "block_size"), [(1, 1, 2), (5, 37, 16), (7, 96, 32), (3, 300, 128), (2, 5, 4096)])
def test_qmm_equals_numpy(instruction_set, dtype, zero_points, N, K, block_size):
    weight = qmm(np.random.default_rng(K), N, K, block_size, dtype, zero_points)
    got, want = native.decode_qmm(weight), formats.decode_qmm(weight)
    assert got.shape == (N, K)
    assert np.array_equal(bits(got), bits(want))
    assert np.array_equal(bits(native.decode_qmm(weight, 1, N)), bits(want[1:]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_qmm_equals_scalar_arithmetic(instruction_set, dtype):
    weight = qmm(np.random.default_rng(8), 6, 45, 16, dtype, "floats")
    got = native.decode_qmm(weight)
    for n in range(6):
        for k in range(45):
            byte = int(weight.packed[n, k // 16, k % 16 // 2])
            code, block = (byte >> 4 if k % 2 else byte & 15), (n, k // 16)
            step = round_scalar(round_scalar(code - float(weight.zero_points[block]), "float32"), dtype)
            product = round_scalar(step * float(weight.scales[block]), "float32")
            assert float(got[n, k]) == round_scalar(product, dtype)


@needs_native
def test_the_gil_is_released():
    weight = lookup4(np.random.default_rng(9), 4096, 4096, 64)
    decoding, counted = threading.Event(), 0
    done = threading.Event()

    def work():
        decoding.set()
        native.decode_elements(weight, 0, 1 << 24, threads=1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    decoding.wait()
    while not done.is_set():
        counted += 1
    thread.join()
    assert counted > 100  # with the GIL held, the loop stands still while C++ runs


def test_without_the_compiled_module_numpy_gives_the_same(monkeypatch):
    weight, affine = (
        lookup4(np.random.default_rng(10), 33, 21, 16, "float16"),
        qmm(np.random.default_rng(11), 4, 40, 16),
    )
    with_module = native.decode_elements(weight, 16, 693), native.decode_qmm(affine)
    monkeypatch.setattr(native, "_native", None)
    assert not native.compiled()
    assert native.describe() == "numpy"
    assert np.array_equal(bits(native.decode_elements(weight, 16, 693)), bits(with_module[0]))
    assert np.array_equal(native.decode_qmm(affine), with_module[1])
    out = np.empty(16, np.float16)
    assert native.decode_elements(weight, 0, 16, out) is out


@needs_native
def test_describe_names_the_instruction_set(instruction_set):
    assert native.describe() == f"native ({instruction_set})"


def test_thread_count_is_bounded_by_the_machine_and_by_omp_num_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = native.thread_count()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert native.thread_count() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert native.thread_count() == machine
