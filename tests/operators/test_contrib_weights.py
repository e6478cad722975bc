"""com.microsoft's packed weights against onnxruntime, and that 4-bit ones stay packed for a kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contrib_cases import close, compare, contrib, feeds, ours
from places import place  # noqa: F401 - a fixture

from lut4tool.errors import Lut4Error
from lut4tool.formats import FP4, NF4
from lut4tool.kernels import Choice
from lut4tool.runtime import backend
from lut4tool.runtime.ops.contrib_weights import DECODED
from lut4tool.runtime.registry import Unsupported
from lut4tool.runtime.session import Runtime

pytestmark = pytest.mark.usefixtures("place")

RNG = np.random.default_rng(31)
HALVES = [np.float16, ml_dtypes.bfloat16]


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of packed bytes, low bits first, an element at a time."""
    return np.array([byte >> shift & (2**bits - 1) for byte in packed.reshape(-1) for shift in range(0, 8, bits)])


def nbits(
    k: int, n: int, block: int, bits: int = 4, zeros: str = "none", flat: bool = False, dtype: type = np.float32
) -> list[Any]:
    """Inputs of MatMulNBits; zeros: none, packed, or of A's type; flat: scales and zero points of rank 1."""
    blocks = -(-k // block)
    inputs = [floats(3, k, dtype=dtype), RNG.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)]
    inputs += [(0.1 + np.abs(floats(n, blocks))).astype(dtype)]
    bytes_ = -(-blocks * bits // 8)
    inputs += [
        {
            "none": None,
            "packed": RNG.integers(0, 256, (n, bytes_)).astype(np.uint8),
            "typed": (2 ** (bits - 1) + 2 * floats(n, blocks)).astype(dtype),
        }[zeros]
    ]
    return [*inputs[:2], *(part if part is None or not flat else part.reshape(-1) for part in inputs[2:])]


def dense(inputs: list[Any], k: int, n: int, block: int, bits: int, group: np.ndarray | None = None) -> np.ndarray:
    """W [N, K] in float64."""
    blocks = -(-k // block)
    codes = unpack(inputs[1], bits).reshape(n, blocks * block)[:, :k].astype(np.float64)
    zero = inputs[3]
    if zero is None:
        zero = np.full((n, blocks), 2 ** (bits - 1))
    elif zero.dtype == np.uint8:
        zero = unpack(zero, bits).reshape(n, -1)[:, :blocks]
    group = np.arange(k) // block if group is None else group
    steps = codes - zero.reshape(n, blocks).astype(np.float64)[:, group]
    return steps * inputs[2].reshape(n, blocks).astype(np.float64)[:, group]


def run(model: Any, inputs: list[Any]) -> tuple[np.ndarray, list[Choice]]:
    runtime = Runtime(model, device="cpu")
    return runtime.run(None, feeds(model, inputs))[0], list(runtime.kernels.values())


CONSTANT = {"constant weights": (1, 2, 3, 4, 5), "weights as inputs": ()}
constant = pytest.mark.parametrize("constant", CONSTANT.values(), ids=CONSTANT)


def kept(inputs: list[Any], constant: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(at for at in constant if at < len(inputs) and inputs[at] is not None)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "typed"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("k", "block"), [(32, 16), (64, 32), (48, 32), (17, 16), (80, 16), (33, 128)])
def test_matmul_nbits(bits, zeros, flat, k, block):
    """K that is no multiple of the block, an odd number of blocks, every layout of zero points."""
    n = 5
    inputs = nbits(k, n, block, bits, zeros, flat)
    model = contrib("MatMulNBits", inputs, constant=kept(inputs, (1, 2, 3)), K=k, N=n, bits=bits, block_size=block)
    y, choices = run(model, inputs)
    (choice,) = choices
    assert (choice.name == DECODED) == (bits != 4)
    np.testing.assert_allclose(y, inputs[0] @ dense(inputs, k, n, block, bits).T, rtol=1e-5, atol=1e-4)


#: What onnxruntime's CPU computes: it refuses 8 bits with typed zero points, and with groups it takes any weight for
#: one of 4 bits and packed zero points for 8.
SERVED = [
    *(
        (bits, zeros, False)
        for bits in (2, 4, 8)
        for zeros in ("none", "packed", "typed")
        if (bits, zeros) != (8, "typed")
    ),
    (4, "none", True),
    (4, "typed", True),
]


@pytest.mark.parametrize(("bits", "zeros", "grouped"), SERVED)
@pytest.mark.parametrize("bias", [False, True])
@constant
def test_matmul_nbits_against_onnxruntime(bits, zeros, bias, grouped, constant):
    k, n, block = 64, 6, 16
    inputs = nbits(k, n, block, bits, zeros)
    inputs += [RNG.permutation(np.arange(k) // block).astype(np.int32) if grouped else None]
    inputs += [floats(n) if bias else None]
    options = {"K": k, "N": n, "bits": bits, "block_size": block}
    compare("MatMulNBits", inputs, constant=kept(inputs, constant), rtol=1e-4, atol=1e-4, **options)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "typed"])
@pytest.mark.parametrize("k", [64, 40])
def test_matmul_nbits_whose_inputs_have_groups(bits, zeros, k):
    group = RNG.permutation(np.arange(k) // 16).astype(np.int32)
    inputs = [*nbits(k, 6, 16, bits, zeros), group]
    model = contrib("MatMulNBits", inputs, constant=kept(inputs, (1, 2, 3, 4)), K=k, N=6, bits=bits, block_size=16)
    y, choices = run(model, inputs)
    device = backend.kind(backend.device("cpu"))  # a GPU where the place is MLX's and there is one
    assert [str(choice) for choice in choices] == [
        f"{DECODED}; not {device}: it has g_idx; the kernels take 4 bits without g_idx"
    ]
    np.testing.assert_allclose(y, inputs[0] @ dense(inputs, k, 6, 16, bits, group).T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_matmul_nbits_of_halves(bits, dtype, bias):
    """Summed in float32, the weight rounded to A's type."""
    k, n, block = 64, 6, 32
    inputs = [*nbits(k, n, block, bits, "packed", dtype=dtype), None, floats(n, dtype=dtype) if bias else None]
    model = contrib("MatMulNBits", inputs, constant=kept(inputs, (1, 2, 3)), K=k, N=n, bits=bits, block_size=block)
    weight = dense(inputs, k, n, block, bits).astype(dtype).astype(np.float64)
    expected = inputs[0].astype(np.float64) @ weight.T + (inputs[5].astype(np.float64) if bias else 0)
    eps = float(ml_dtypes.finfo(dtype).eps)
    close(run(model, inputs)[0], expected.astype(dtype), rtol=eps, atol=eps * float(np.abs(expected).max()))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 3, 32), (0, 32)], ids=str)
def test_matmul_nbits_of_any_rank(shape):
    inputs = nbits(32, 6, 16)
    inputs[0] = floats(*shape)
    model = contrib("MatMulNBits", inputs, constant=(1, 2), K=32, N=6, block_size=16)
    (y,) = ours(model, inputs)
    close(y, (inputs[0] @ dense(inputs, 32, 6, 16, 4).T).astype(np.float32), atol=1e-4)


@constant
@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_without_a_weight_is_zero(constant, bias):
    inputs = nbits(32, 6, 16)
    inputs[1] = np.zeros((6, 2, 0), np.uint8)
    inputs += [None, floats(6) if bias else None]
    compare("MatMulNBits", inputs, constant=kept(inputs, constant), K=32, N=6, bits=4, block_size=16)


def test_accuracy_level_changes_nothing():
    inputs = nbits(64, 6, 32)
    options = {"constant": (1, 2), "K": 64, "N": 6, "block_size": 32}
    exact, level = (
        ours(contrib("MatMulNBits", inputs, **options, **more), inputs)[0] for more in ({}, {"accuracy_level": 4})
    )
    np.testing.assert_array_equal(exact, level)


# -- MatMulBnb4


def bnb4(n: int, k: int, block: int, codebook: np.ndarray, dtype: type = np.float32) -> tuple[list[Any], np.ndarray]:
    """Packed weight and absmax, and the W [N, K] that they stand for; high nibble first."""
    codes = RNG.integers(0, 16, n * k + n * k % 2)
    packed = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)
    absmax = (0.1 + np.abs(floats(-(-n * k // block)))).astype(dtype)
    flat = codebook[codes[: n * k]] * np.repeat(absmax.astype(np.float32), block)[: n * k]
    return [packed, absmax], flat.reshape(n, k)


@pytest.mark.parametrize(("kind", "codebook"), [(0, FP4), (1, NF4)])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (7, 9), (5, 40)])
@constant
def test_matmul_bnb4(kind, codebook, block, trans_b, n, k, constant):
    """Blocks cross the rows of W where K is no multiple of them; an odd number of elements pads a nibble."""
    weight, meant = bnb4(n, k, block, codebook)
    inputs = [floats(2, 3, k if trans_b else n), *weight]
    options = {"K": k, "N": n, "block_size": block, "quant_type": kind, "transB": trans_b}
    y, choices = run(contrib("MatMulBnb4", inputs, constant=kept(inputs, constant), **options), inputs)
    assert len(choices) == (1 if constant else 0)
    np.testing.assert_allclose(y, inputs[0] @ (meant.T if trans_b else meant), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("training", [0, 1])
def test_matmul_bnb4_against_onnxruntime(kind, training):
    weight, _ = bnb4(24, 64, 32, FP4)
    inputs = [floats(3, 64), *weight]
    options = {"K": 64, "N": 24, "block_size": 32, "quant_type": kind, "training_mode": training}
    compare("MatMulBnb4", inputs, constant=(1, 2), atol=1e-4, **options)


@pytest.mark.parametrize("dtype", HALVES)
def test_matmul_bnb4_of_halves(dtype):
    weight, meant = bnb4(16, 64, 32, NF4, dtype)
    inputs = [floats(3, 64, dtype=dtype), *weight]
    model = contrib("MatMulBnb4", inputs, constant=(1, 2), K=64, N=16, block_size=32, quant_type=1)
    expected = inputs[0].astype(np.float64) @ meant.astype(dtype).astype(np.float64).T
    eps = float(ml_dtypes.finfo(dtype).eps)
    close(run(model, inputs)[0], expected.astype(dtype), rtol=eps, atol=1e-4)


# -- GatherBlockQuantized


def gathered(
    data: np.ndarray, scales: np.ndarray, zeros: Any, axis: int, quantized: int, block: int, indices: np.ndarray
) -> np.ndarray:
    """Everything decoded, then np.take."""
    spread = [np.repeat(part.astype(np.float64), block, axis=quantized) for part in (scales, zeros)]
    cut = tuple(map(slice, data.shape))
    return np.take((data.astype(np.float64) - spread[1][cut]) * spread[0][cut], indices, axis=axis)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4], ids=["int4", "uint4"])
@pytest.mark.parametrize(("axis", "quantized"), [(0, 1), (1, 0), (0, 2), (-1, 0), (1, 1), (0, 0)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("indices", [(), (4,), (2, 3)], ids=str)
def test_gather_of_four_bits(dtype, axis, quantized, zeros, indices):
    info, shape = ml_dtypes.iinfo(dtype), (20, 24, 3)
    data = RNG.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)
    grid = [-(-size // 16) if at == quantized else size for at, size in enumerate(shape)]
    zero = RNG.integers(0, 8, grid).astype(dtype) if zeros else None
    inputs = [data, np.asarray(RNG.integers(0, 3, indices), np.int64), floats(*grid), zero]
    options = {"gather_axis": axis, "quantize_axis": quantized, "block_size": 16}
    model = contrib("GatherBlockQuantized", inputs, constant=kept(inputs, (0, 2, 3)), **options)
    (y,) = ours(model, inputs)
    meant = np.zeros(grid) if zero is None else zero
    expected = gathered(data, inputs[2], meant, axis, quantized, 16, inputs[1])
    close(y, expected.astype(np.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4], ids=["int4", "uint4"])
@pytest.mark.parametrize(("axis", "quantized"), [(0, 1), (1, 0), (0, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_gather_of_four_bits_against_onnxruntime(dtype, axis, quantized, zeros):
    info, shape = ml_dtypes.iinfo(dtype), (20, 24, 3)
    data = RNG.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)
    grid = [-(-size // 16) if at == quantized else size for at, size in enumerate(shape)]
    inputs = [
        data,
        np.array([[2, 0], [-1, 1]], np.int32),
        floats(*grid),
        RNG.integers(0, 8, grid).astype(dtype) if zeros else None,
    ]
    options = {"gather_axis": axis, "quantize_axis": quantized, "block_size": 16}
    compare("GatherBlockQuantized", inputs, constant=kept(inputs, (0, 2, 3)), **options)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("wide", [np.float32, np.float16])
@pytest.mark.parametrize("columns", [48, 80])
def test_gather_of_bytes(bits, zeros, wide, columns):
    """Three or five blocks a row: packed zero points end in a part of a byte."""
    blocks = columns // 16
    data = RNG.integers(0, 256, (9, columns * bits // 8)).astype(np.uint8)
    zero = RNG.integers(0, 256, (9, -(-blocks * bits // 8))).astype(np.uint8) if zeros else None
    inputs = [data, np.array([[0, 8], [3, -2]], np.int64), floats(9, blocks, dtype=wide), zero]
    compare("GatherBlockQuantized", inputs, constant=kept(inputs, (0, 2, 3)), bits=bits, block_size=16, rtol=0, atol=0)


@pytest.mark.parametrize("index", [9, -10])
def test_an_index_out_of_range_gives_zeros(index):
    data = RNG.integers(1, 256, (9, 16)).astype(np.uint8)
    inputs = [data, np.array([1, index]), 1 + np.abs(floats(9, 1)), None]
    (y,) = ours(contrib("GatherBlockQuantized", inputs, constant=(0, 2), bits=8, block_size=16), inputs)
    assert (y[0] != 0).any()
    np.testing.assert_array_equal(y[1], 0)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn], ids=str)
@pytest.mark.parametrize(("block", "scales"), [(16, (9, 2)), (0, (9, 1)), (0, (1, 1)), (16, (1, 2))])
def test_gather_of_small_floats(dtype, block, scales):
    """A scale for all rows where its axis is 1; block 0 is a whole row. onnxruntime's Python holds no such data."""
    data = floats(9, 32).astype(dtype)
    inputs = [data, np.array([3, 0]), floats(*scales)]
    (y,) = ours(contrib("GatherBlockQuantized", inputs, constant=(0, 2), block_size=block), inputs)
    scale = np.repeat(np.broadcast_to(inputs[2], (9, scales[1])), block or 32, axis=1)
    np.testing.assert_allclose(y, (data.astype(np.float32) * scale)[[3, 0]], rtol=1e-6)


# -- refusals

NBITS = {"K": 32, "N": 6, "block_size": 16}
BNB4 = {"K": 32, "N": 6, "block_size": 16, "quant_type": 1}


@pytest.mark.parametrize(
    ("op_type", "options", "why"),
    [
        ("MatMulNBits", {**NBITS, "bits": 3}, "bits must be 2, 4 or 8, not 3"),
        ("MatMulNBits", {**NBITS, "weight_prepacked": 1}, "weight_prepacked must be 0"),
        ("MatMulNBits", {"K": 32, "N": 6}, "needs the attributes block_size"),
        ("MatMulNBits", {**NBITS, "block_size": 24}, "block_size must be a power of two from 16 on, not 24"),
        ("MatMulNBits", {**NBITS, "axis": 1}, "no attributes axis"),
        ("MatMulBnb4", {**BNB4, "quant_type": 2}, "quant_type must be 0"),
        ("GatherBlockQuantized", {"block_size": 24}, "block_size must be 0 or a power of two"),
        ("GatherBlockQuantized", {"bits": 3}, "bits must be 2, 4 or 8, not 3"),
        ("GatherBlockQuantized", {"gather_axis": 1, "quantize_axis": 0}, "gather_axis must be 0 where data is uint8"),
    ],
)
def test_what_is_not_supported_is_refused_before_running(op_type, options, why):
    inputs, places = nbits(32, 6, 16)[:3], (1, 2)
    if op_type == "MatMulBnb4":
        inputs = [inputs[0], *bnb4(6, 32, 16, NF4)[0]]
    if op_type == "GatherBlockQuantized":
        inputs, places = [np.zeros((4, 16), np.uint8), np.array([0]), floats(4, 1)], (0, 2)
    with pytest.raises(Unsupported, match=why):
        Runtime(contrib(op_type, inputs, constant=places, **options), device="cpu")


@pytest.mark.parametrize(("at", "name"), [(1, "B"), (2, "scales")])
@pytest.mark.parametrize("constant", [(1, 2), ()], ids=str)
def test_blocks_before_rows_are_refused(at, name, constant):
    """Some exporters write [blocks, N, bytes]: as many bytes, another meaning."""
    inputs = nbits(32, 6, 16)
    inputs[at] = inputs[at].swapaxes(0, 1).copy()
    with pytest.raises(Lut4Error, match=rf"{name} must be of shape \[6, 2.*, or flat, not \[2, 6"):
        ours(contrib("MatMulNBits", inputs, constant=constant, **NBITS), inputs)


@pytest.mark.parametrize("group", [-1, 2])
def test_a_group_that_names_no_block_is_an_error(group):
    inputs = [*nbits(32, 6, 16), np.full(32, group, np.int32)]
    with pytest.raises(Exception, match="g_idx must name one of 2 blocks for each of 32 inputs"):
        ours(contrib("MatMulNBits", inputs, constant=(1, 2), **NBITS), inputs)
