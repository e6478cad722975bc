"""The order in which CUDA's kernels have a weight, against its definition in NumPy; and that it is made in pieces."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lut4tool import formats
from lut4tool.kernels.cuda import weights
from lut4tool.kernels.cuda.weights import CHUNK, TILE, DeviceWeight, arranged, irregular
from tests.products import DTYPES, Lookup4Weight, QmmWeight, lookup4, qmm

#: rows, cols, block, perm: aligned; K of a part of a chunk; N of a part of a tile; blocks over rows and of many rows.
LOOKUP4 = [
    (256, 384, 64, (1, 0)),
    (1000, 160, 32, (1, 0)),
    (77, 2192, 16, (1, 0)),
    (300, 96, 64, (1, 0)),
    (300, 48, 1024, (1, 0)),
    (1200, 128, 64, (0, 1)),
    (2192, 80, 16, (0, 1)),
    (700, 96, 64, (0, 1)),
]
#: N, K, block.
QMM = [(256, 384, 32), (130, 400, 16), (77, 300, 128)]


def weights_of_every_kind(dtype: str) -> list[Lookup4Weight | QmmWeight]:
    every: list[Lookup4Weight | QmmWeight] = [
        lookup4(rows, cols, block, perm=perm, weight_dtype=dtype, high_nibble_first=block != 32)
        for rows, cols, block, perm in LOOKUP4
    ]
    every += [qmm(*sizes, scales_dtype=DTYPES[dtype], points=points) for sizes in QMM for points in ("codes", "one")]
    return [*every, qmm(130, 400, 16, scales_dtype=DTYPES[dtype], points="float")]


def codes(
    packed: np.ndarray, rows: int, depth: int, row_step: int, k_step: int, high_first: bool, interleave: bool,
    padding: int, tile: int,
) -> np.ndarray:  # fmt: skip
    """What weights._codes makes, element by element from the text at the head of its module."""
    chunks, lines = -(-depth // CHUNK), -(-rows // tile) * tile
    n, k = np.arange(lines)[:, None], np.arange(chunks * CHUNK)[None, :]
    inside = (n < rows) & (k < depth)
    flat = np.where(inside, n * row_step + k * k_step, 0)
    byte = packed.reshape(-1)[flat >> 1]
    code = np.where(inside, np.where((flat & 1) == high_first, byte & 15, byte >> 4), padding)
    # k = 128 chunk + 16 s + 8 h + 2 lane + second
    pieces = code.reshape(-1, tile, chunks, 8, 2, 4, 2).transpose(0, 2, 1, 5, 3, 4, 6)  # tile, chunk, row, lane, s, h
    if tile == 4:
        pieces[:, 1::2] = pieces[:, 1::2, [1, 0, 3, 2]].copy()
    pairs = pieces.reshape(*pieces.shape[:4], 16, 2).astype(np.uint32)
    if interleave:
        words = pairs.reshape(*pairs.shape[:4], 4, 4, 2)
        shifts = np.arange(4, dtype=np.uint32) * 4
        joined = (words[..., 0] << shifts | words[..., 1] << (shifts + 16)).sum(-1, dtype=np.uint32)
        made = np.ascontiguousarray(joined).view(np.uint8)
    else:
        made = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
    return np.ascontiguousarray(made).reshape(lines // tile, chunks, tile, CHUNK // 2)


@pytest.fixture
def in_numpy(monkeypatch: Any) -> list[int]:
    """Arrange codes in NumPy, as the kernel does on a GPU; returns the bytes of each piece."""
    sizes: list[int] = []

    def made(packed: np.ndarray, *facts: Any) -> mx.array:
        sizes.append(packed.nbytes)
        return mx.array(codes(packed, *facts))

    monkeypatch.setattr(weights, "_codes", made)
    return sizes


def again(weight: Lookup4Weight | QmmWeight, half: bool) -> DeviceWeight:
    """Arrange a weight that may have been arranged before."""
    weights._ARRANGED.pop(weight, None)
    return arranged(weight, half)


def same_arrays(first: DeviceWeight, second: DeviceWeight) -> None:
    for name in ("codes", "scales", "points", "book", "sizes"):
        one, other = (np.array(getattr(weight, name)) for weight in (first, second))
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, name)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_make_what_the_whole_makes(dtype: str, half: bool, in_numpy: list[int], monkeypatch: Any) -> None:
    for weight in weights_of_every_kind(dtype):
        assert irregular(weight) is None
        del in_numpy[:]
        whole = again(weight, half)
        assert in_numpy == [weight.packed.nbytes]
        monkeypatch.setattr(weights, "PIECE", 6000)
        del in_numpy[:]
        same_arrays(again(weight, half), whole)
        monkeypatch.setattr(weights, "PIECE", 64 << 20)
        row = weight.cols / 2 if isinstance(weight, Lookup4Weight) else weight.packed[0].nbytes
        unit = CHUNK if isinstance(weight, Lookup4Weight) and weight.perm == (0, 1) else TILE[half]
        blocks = weight.block_size if isinstance(weight, Lookup4Weight) else 1
        assert len(in_numpy) > 1
        assert max(in_numpy) <= max(6000, row * np.lcm(2 * unit, blocks))


@pytest.mark.parametrize("half", [False, True])
def test_scales_lie_where_the_kernels_look_for_them(half: bool, in_numpy: list[int], monkeypatch: Any) -> None:
    """Of each element, found by the order that DeviceWeight states, in pieces; zero in the padding of K."""
    monkeypatch.setattr(weights, "PIECE", 6000)
    for weight in weights_of_every_kind("float32")[: len(LOOKUP4)]:
        assert isinstance(weight, Lookup4Weight)
        made = again(weight, half)
        spread = np.array(made.scales)
        n, k = np.arange(made.rows)[:, None], np.arange(made.chunks * CHUNK)[None, :]
        if made.span:
            found = spread[n // made.span, k]
        elif half:
            found = spread[n // 16, k // CHUNK, n % 8, n % 16 // 8, k % CHUNK * made.groups // CHUNK]
        else:
            found = spread[n // 4, k // CHUNK, n % 4, k % CHUNK * made.groups // CHUNK]
        elements = np.arange(weight.rows * weight.cols).reshape(weight.rows, weight.cols)
        flat = elements.T if weight.perm == (0, 1) else elements
        expected = np.zeros(found.shape, np.float32)
        expected[:, : made.depth] = weight.scales[flat // weight.block_size]
        np.testing.assert_array_equal(found, expected)


def test_little_more_than_the_result_is_needed_on_the_device(monkeypatch: Any) -> None:
    """Codes, scales and points are written in place: what is there beside them does not grow with the weight."""
    monkeypatch.setattr(weights, "PIECE", 1 << 20)

    def empty(packed: np.ndarray, rows: int, depth: int, *facts: Any) -> mx.array:
        tile = facts[-1]
        return mx.zeros((-(-rows // tile), -(-depth // CHUNK), tile, CHUNK // 2), mx.uint8)

    monkeypatch.setattr(weights, "_codes", empty)
    for weight in (lookup4(8192, 4096, perm=(1, 0)), lookup4(8192, 4096), qmm(8192, 4096, 32)):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        made = again(weight, half=False)
        size = sum({id(leaf): leaf.nbytes for leaf in (made.codes, made.scales, made.points)}.values())
        assert size > 16 << 20
        assert mx.get_peak_memory() - before < size + (6 << 20)


def test_facts_are_those_of_the_whole_weight(in_numpy: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(weights, "PIECE", 6000)
    weight = lookup4(256, 384, perm=(1, 0))
    assert (again(weight, False).fold, again(weight, False).finite) == (True, True)
    for place, value, fold, finite in (
        (-1, np.inf, False, False),
        (900, np.nan, False, False),
        (3, 1e-35, False, True),
    ):
        scales = weight.scales.copy()
        scales[place] = value
        other = Lookup4Weight(weight.packed, scales, formats.NF4, 256, 384, 64, (1, 0))
        assert (again(other, False).fold, again(other, False).finite) == (fold, finite)
    affine = qmm(256, 384, 32)
    assert not again(affine, True).float_points
    points = affine.zero_points.astype(np.float32)
    points[-1, -1] = 0.25
    assert again(QmmWeight(affine.packed, affine.scales, points, 384, 256, 32), True).float_points


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build")
@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("piece", [6000, 64 << 20])
def test_the_kernel_makes_this_order(piece: int, half: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(weights, "PIECE", piece)
    for weight in weights_of_every_kind("bfloat16"):
        made = again(weight, half)
        with monkeypatch.context() as patch:
            patch.setattr(weights, "_codes", lambda packed, *facts: mx.array(codes(packed, *facts)))
            same_arrays(made, again(weight, half))
