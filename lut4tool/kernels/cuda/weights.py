"""A 4-bit weight on the device: its codes in the order of tensor-core fragments, its scales beside them.

Codes are [N, chunks, 64] bytes, whatever the orientation, nibble order and padding of the producer's bytes: a chunk is
128 consecutive k of one row n. `tile` rows lie together, [N / tile, chunks, tile, 64], so that what a warp reads is
contiguous: 16 for halves, 4 for float32, where odd chunks have rows 0 and 1, 2 and 3 exchanged (a warp reads 8 chunks
of one row at a time from shared memory, and meets no bank conflict so). Scales along K lie as the chunks do.

Lane t (of 4) owns 16 bytes of a chunk; byte 2 s + h of those holds k = 16 s + 8 h + 2 t and k + 1, which are what a
lane needs of rows of A in step s of an m16n8k16 product. The first of the two is in the low nibble; for halves of a QMM
weight, four bytes hold their four first codes, then their four second ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels.cuda.program import Program
from lut4tool.kernels.transfer import PIECE, floats, forget, settle

CHUNK = 128
#: Rows that lie together, for products in halves and in float32.
TILE = {True: 16, False: 4}
Weight = Lookup4Weight | QmmWeight

ARRANGE = r"""
  const int64_t rows = facts[0], depth = facts[1], row_step = facts[2], k_step = facts[3];
  const int high_first = (int)facts[4], interleave = (int)facts[5], padding = (int)facts[6], tile = (int)facts[7];
  const int64_t chunks = (depth + 127) / 128, pieces = (rows + tile - 1) / tile * tile * chunks * 4;
  for (int64_t piece = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; piece < pieces;
       piece += (int64_t)gridDim.x * blockDim.x) {
    const int64_t per_tile = chunks * tile * 4, chunk = piece % per_tile / (tile * 4);
    const int64_t n = piece / per_tile * tile + (piece / 4 % tile ^ (tile == 4 && chunk & 1));
    const int64_t first = chunk * 128 + piece % 4 * 2;
    auto code = [&](int64_t k) -> unsigned {
      if (k >= depth || n >= rows) return padding;
      const int64_t flat = n * row_step + k * k_step;
      return ((flat & 1) != high_first ? packed[flat >> 1] >> 4 : packed[flat >> 1]) & 15;
    };
    uint32_t words[4] = {};
    for (int b = 0; b < 16; ++b) {
      const int64_t k = first + b / 2 * 16 + b % 2 * 8;
      const unsigned low = code(k), high = code(k + 1);
      words[b / 4] |= interleave ? low << 4 * (b % 4) | high << (4 * (b % 4) + 16) : (low | high << 4) << 8 * (b % 4);
    }
    reinterpret_cast<uint4*>(codes)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
  }
"""
ARRANGER = Program("arrange", (("packed", "uint8"), ("facts", "int64")), (("codes", "uint8"),), ARRANGE, threads=256)


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A weight in the kernels' own order.

    rows: N, the outputs. codes: uint8 [N / tile, chunks, tile, 64]. book: float32 [16].
    scales: [N / tile, chunks, tile, groups] along K, for tiles of 16 [N / 16, chunks, 8, 2, groups] with rows 8 apart
    together, or float32 [N / span, chunks * 128] where blocks run along N (span > 0).
    float32, or for halves of a QMM weight uint32: the scale, and minus the zero point above it.
    points: float32 like scales, the zero points of a QMM weight for float32 products; scales itself where unused.
    finite: whether every weight is a finite number of its type.
    depth: K, before padding. sizes: int32 [N, K], for kernels that are built once for all of them.
    fold: whether a scale may multiply a sum of products instead of each weight: nothing overflows or is subnormal.
    """

    rows: int
    tile: int
    codes: mx.array
    book: mx.array
    scales: mx.array
    points: mx.array
    groups: int
    span: int
    affine: bool
    float_points: bool
    fold: bool
    finite: bool
    depth: int
    sizes: mx.array

    @property
    def chunks(self) -> int:
        """Pieces of 128 k."""
        return self.codes.shape[1]


#: Arranged once a weight and kind of product, gone with the weight.
_ARRANGED: WeakKeyDictionary[Weight, dict[bool, DeviceWeight]] = WeakKeyDictionary()


def arranged(weight: Weight, half: bool) -> DeviceWeight:
    """Return the weight on the device, for products in halves or in float32; made at the first call."""
    kinds = _ARRANGED.setdefault(weight, {})
    if half not in kinds:
        kinds[half] = _lookup4(weight, half) if isinstance(weight, Lookup4Weight) else _qmm(weight, half)
    return kinds[half]


def drop(weight: Weight) -> None:
    """Let go of what was made of a weight."""
    _ARRANGED.pop(weight, None)


def irregular(weight: Weight) -> str | None:
    """Say why the arranged form does not hold this weight; None where it does."""
    if weight not in _IRREGULAR:
        _IRREGULAR[weight] = _why_irregular(weight)
    return _IRREGULAR[weight]


#: What was said of a weight, whose scales are not looked at twice.
_IRREGULAR: WeakKeyDictionary[Weight, str | None] = WeakKeyDictionary()


def _why_irregular(weight: Weight) -> str | None:
    if isinstance(weight, QmmWeight):
        if weight.block_size % 16:
            return f"blocks of {weight.block_size} along K are no multiple of 16"
        if weight.K % weight.block_size and not _all_finite(weight.scales):
            return "a padded block has a scale that is not finite"
        return None
    if _granularity(weight) % 16:
        return f"blocks of {weight.block_size} meet rows of {weight.cols} at no multiple of 16"
    if weight.shape[0] % CHUNK:
        if not np.isfinite(weight.codebook.astype(np.float32)).any():
            return "no codebook entry is finite"
        if not _all_finite(weight.scales):
            return "K is padded and a scale is not finite"
    return None


def _all_finite(values: np.ndarray) -> bool:
    return all(bool(np.isfinite(some).all()) for some in floats(values))


def _granularity(weight: Lookup4Weight) -> int:
    """Elements along the flattened weight that share a scale and lie in one row: a divisor of the block."""
    return math.gcd(weight.block_size, weight.cols)


def _span(weight: Lookup4Weight) -> int:
    """Where blocks run along N: the rows of outputs that share a scale for each k, else 0."""
    return _granularity(weight) if tuple(weight.perm) == (0, 1) else 0


def _groups(granularity: int) -> int:
    """Scales of a chunk for blocks of `granularity` elements along K."""
    return CHUNK // math.gcd(granularity, CHUNK)


def _lookup4(weight: Lookup4Weight, half: bool) -> DeviceWeight:
    depth, columns = weight.shape
    book, span = weight.codebook.astype(np.float32), _span(weight)
    padding = int(np.flatnonzero(np.isfinite(book))[0]) if np.isfinite(book).any() else 0
    leaves = _joined(weight, half, lambda part: _lookup4_leaves(part, half, padding))
    scales = _extremes(floats(weight.scales))
    return _device_weight(columns, depth, TILE[half], book, leaves, 1 if span else _groups(_granularity(weight)), span,
                          False, False, _folds(book, scales), _finite(book, scales, weight.weight_dtype))  # fmt: skip


def _lookup4_leaves(weight: Lookup4Weight, half: bool, padding: int) -> list[mx.array]:
    """Codes and scales of a weight, or of some of its rows."""
    depth, columns = weight.shape
    row_step, k_step = (1, columns) if tuple(weight.perm) == (0, 1) else (depth, 1)
    codes = _codes(
        weight.packed, columns, depth, row_step, k_step, weight.high_nibble_first, False, padding, TILE[half]
    )
    span, chunks = _span(weight), -(-depth // CHUNK)
    groups = 1 if span else _groups(_granularity(weight))
    rows, step = (-(-columns // span), 1) if span else (columns, CHUNK // groups)
    n = mx.arange(rows, dtype=mx.int64) * (max(span, 1) * row_step)
    k = mx.arange(chunks * CHUNK // step, dtype=mx.int64) * step
    index = (n[:, None] + mx.minimum(k, depth - 1)[None, :] * k_step) // weight.block_size
    scales = mx.array(weight.scales.astype(np.float32))
    spread = mx.where(k[None, :] < depth, scales[index], mx.array(0.0, mx.float32))
    return [codes, spread if span else _tiled(spread, groups, TILE[half])]


def _qmm(weight: QmmWeight, half: bool) -> DeviceWeight:
    points = weight.zero_points
    small = all(bool(np.all((some == np.round(some)) & (some >= 0) & (some <= 127))) for some in floats(points))
    leaves = _joined(weight, half, lambda part: _qmm_leaves(part, half, small))
    book, scales = np.arange(16, dtype=np.float32), _extremes(floats(weight.scales))
    # Sizes that code - zero point can have: the least is 1 or a distance from an integer, the largest is bounded.
    fractions = _extremes(some - np.round(some) for some in floats(points))
    steps = np.append(fractions, [1.0, 15.0 + _extremes(floats(points)).max()])
    return _device_weight(weight.N, weight.K, TILE[half], book, leaves, _groups(weight.block_size), 0, True, not small,
                          _folds(steps, scales), _finite(steps, scales, weight.weight_dtype))  # fmt: skip


def _qmm_leaves(weight: QmmWeight, half: bool, small: bool) -> list[mx.array]:
    """Codes, scales and for float32 zero points of a weight, or of some of its rows; small: so are all zero points."""
    groups, pitch = _groups(weight.block_size), weight.packed.shape[1] * weight.block_size
    codes = _codes(weight.packed, weight.N, weight.K, pitch, 1, False, half, 0, TILE[half])
    points = np.broadcast_to(weight.zero_points, weight.scales.shape)
    spread = [_spread(mx.array(values.astype(np.float32)), weight, groups) for values in (weight.scales, points)]
    if half:
        base = 0 if not small else 128 if weight.weight_dtype == "bfloat16" else 1024
        kind = getattr(mx, weight.weight_dtype)
        low = spread[0].astype(kind).view(mx.uint16).astype(mx.uint32)
        high = (-(spread[1] + base)).astype(kind).view(mx.uint16).astype(mx.uint32)
        spread = [low | (high << 16)]
    return [codes, *(_tiled(values, groups, TILE[half]) for values in spread)]


def _joined(weight: Weight, half: bool, leaves_of: Callable[[Any], list[mx.array]]) -> list[mx.array]:
    """The leaves of a weight, made of some of its rows at a time, so that little is on the host or twice on the device.

    Rows of W are outputs, or K where W is [K, N]: leaves lie beside each other along axis 0, or 1.
    """
    along_k = isinstance(weight, Lookup4Weight) and tuple(weight.perm) == (0, 1)
    unit, axis = CHUNK if along_k else TILE[half], int(along_k)
    rows = weight.rows if isinstance(weight, Lookup4Weight) else weight.N
    units, done, whole = -(-rows // unit), 0, list[mx.array]()
    for start, stop in _spans(weight, 2 * unit):  # odd chunks stay odd
        leaves, count = leaves_of(_some_rows(weight, start, stop)), -(-(stop - start) // unit)
        if count == units:
            return leaves
        for place, leaf in enumerate(leaves):
            each = leaf.shape[axis] // count
            if not start:
                whole.append(mx.zeros((*leaf.shape[:axis], each * units, *leaf.shape[axis + 1 :]), leaf.dtype))
            some = slice(each * done, each * (done + count))
            whole[place][(slice(None), some) if axis else some] = leaf  # in place: nothing else refers to it
        settle(whole)
        del leaves, leaf  # before the next ones are made
        done += count
    return whole


def _spans(weight: Weight, unit: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of W, of PIECE bytes at most or of one unit; each begins a unit and a block."""
    if isinstance(weight, Lookup4Weight):
        rows, size = weight.rows, -(-weight.cols // 2)
        unit = math.lcm(unit, weight.block_size // math.gcd(weight.block_size, weight.cols))
    else:
        rows, size = weight.N, weight.packed[0].nbytes
    step = max(1, PIECE // (size * unit)) * unit
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _some_rows(weight: Weight, start: int, stop: int) -> Weight:
    """Rows of W as a weight of its own; its arrays are views."""
    if isinstance(weight, QmmWeight):
        points = weight.zero_points if weight.zero_points.shape == (1, 1) else weight.zero_points[start:stop]
        return replace(
            weight, packed=weight.packed[start:stop], scales=weight.scales[start:stop], zero_points=points,
            N=stop - start,
        )  # fmt: skip
    first, last = start * weight.cols, stop * weight.cols
    packed = weight.packed[first // 2 : (last + 1) // 2]
    scales = weight.scales[first // weight.block_size : -(-last // weight.block_size)]
    return replace(weight, packed=packed, scales=scales, rows=stop - start)


def _tiled(scales: mx.array, groups: int, tile: int) -> mx.array:
    """[N, chunks * groups] -> [N / tile, chunks, tile, groups], for 16 rows as [8, 2]."""
    rows, columns = scales.shape
    padded = mx.pad(scales, [(0, -rows % tile), (0, 0)])
    if tile == 16:
        return padded.reshape(-1, 2, 8, columns // groups, groups).transpose(0, 3, 2, 1, 4)
    return padded.reshape(-1, tile, columns // groups, groups).transpose(0, 2, 1, 3)


def _spread(values: mx.array, weight: QmmWeight, groups: int) -> mx.array:
    """One value a group of every chunk, from one a block; 0 in the padding."""
    chunks = -(-weight.K // CHUNK)
    starts = mx.arange(chunks * groups) * (CHUNK // groups)
    spread = values[:, mx.minimum(starts // weight.block_size, values.shape[1] - 1)]
    return mx.where((starts < weight.K)[None, :], spread, mx.array(0.0, mx.float32))


def _codes(
    packed: np.ndarray, rows: int, depth: int, row_step: int, k_step: int, high_first: bool, interleave: bool,
    padding: int, tile: int,
) -> mx.array:  # fmt: skip
    chunks, lines = -(-depth // CHUNK), -(-rows // tile) * tile
    numbers = [rows, depth, row_step, k_step, int(high_first), int(interleave), padding, tile]
    blocks = max(1, min(1 << 16, -(-lines * chunks * 4 // ARRANGER.threads)))
    shape = (lines // tile, chunks, tile, CHUNK // 2)
    arrays = [mx.array(packed.reshape(-1)), mx.array(numbers, mx.int64)]
    forget(packed)
    (codes,) = ARRANGER.launch(arrays, [shape], (blocks,))
    return codes


def _extremes(values: Iterable[np.ndarray]) -> np.ndarray:
    """The least size but 0 and the greatest of each of some arrays; both are NaN where one is."""
    found = []
    for some in values:
        sizes = np.abs(some)
        used = sizes[sizes != 0]
        found += [used.min() if used.size else 0.0, sizes.max()]
    return np.array(found, np.float32)


def _folds(entries: np.ndarray, scales: np.ndarray) -> bool:
    """Whether every entry * scale is 0 or a normal float32 far from overflow."""
    sizes = [np.abs(values[values != 0]) for values in (entries, scales)]
    if not all(np.isfinite(values).all() for values in (entries, scales)):
        return False
    least = math.prod(float(size.min(initial=1.0)) for size in sizes)
    most = math.prod(float(size.max(initial=1.0)) for size in sizes)
    return least > 2.0**-100 and most < 2.0**100 and float(sizes[1].min(initial=1.0)) > 2.0**-100


def _finite(entries: np.ndarray, scales: np.ndarray, dtype: str) -> bool:
    """Whether no entry * scale is Inf or NaN, or rounds to Inf in the type of the weight."""
    most = np.abs(entries).max(initial=0.0).astype(np.float64) * np.abs(scales).max(initial=0.0)
    return bool(most < {"float32": 3.4028235e38, "bfloat16": 3.3895e38, "float16": 65504.0}[dtype])  # no for NaN


def _device_weight(
    rows: int, depth: int, tile: int, book: np.ndarray, leaves: Sequence[mx.array], groups: int, span: int,
    affine: bool, float_points: bool, fold: bool, finite: bool,
) -> DeviceWeight:  # fmt: skip
    """Leaves: codes, scales and, where they are used, zero points."""
    codes, scales, *others = (mx.contiguous(leaf) for leaf in leaves)
    points = others[0] if others else scales
    on_device, sizes = mx.array(book), mx.array([rows, depth], mx.int32)
    mx.eval(codes, on_device, scales, points, sizes)
    return DeviceWeight(rows, tile, codes, on_device, scales, points, groups, span, affine, float_points, fold, finite,
                        depth, sizes)  # fmt: skip
