"""Few rows of x times a weight whose lines run along N: K is split over lanes and simdgroups, without a barrier."""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.metal.source import built
from lut4tool.kernels.metal.weights import INPUTS, DeviceWeight

SIMDGROUPS = 2
#: Rows of x made together -> words of 8 codes that a lane takes of a line: registers hold ROWS * 8 * WORDS sums.
WORDS = {1: 4, 2: 2, 4: 2}
#: Lanes side by side in a line; the others take other lines. A simdgroup covers LANES * 8 * WORDS columns.
LANES = 4
#: Lines that a simdgroup takes at a time (4 a lane); K is split until so many simdgroups fill the GPU.
LINES, ENOUGH_SIMDGROUPS = 32, 512

SOURCE = """
constexpr uint LINES_OF_LANE = LINES * LANES / 32, COLUMNS = 8 * WORDS;
uint M = x_shape[0], K = x_shape[1], N = dims[0], splits = split[0], depth = split[1];
uint lane = thread_position_in_grid.x;
uint n0 = (thread_position_in_grid.y * LANES + lane % LANES) * COLUMNS;
uint m0 = thread_position_in_grid.z / splits * ROWS;
uint part = thread_position_in_grid.z % splits;
uint stop = min(K, (part + 1) * depth);

LaneTable table = {float(levels[lane % 16])};
float high[ROWS][COLUMNS] = {};
float low[ROWS][COLUMNS] = {};

for (uint start = part * depth; start < stop; start += LINES) {  // the same for all lanes
  uint4 chunk[LINES_OF_LANE];
  ulong line[LINES_OF_LANE];
  float scale[LINES_OF_LANE] = {};
  bool live[LINES_OF_LANE];
  float values[ROWS][LINES_OF_LANE];
  UNROLL for (uint i = 0; i < LINES_OF_LANE; ++i) {
    uint k = start + (i * 32 + lane) / LANES;
    live[i] = k < stop && n0 < N;
    line[i] = ulong(k) * N + n0;
    chunk[i] = uint4(0);
    if (ALIGNED && live[i]) {
      if (WORDS == 4) chunk[i] = ((const device uint4*)packed)[line[i] / 32];
      else chunk[i].xy = ((const device uint2*)packed)[line[i] / 16];
    }
    UNROLL for (uint m = 0; m < ROWS; ++m)
      values[m][i] = live[i] ? float(x[ulong(min(m0 + m, M - 1)) * K + k]) : 0.0f;
  }
  UNROLL for (uint word = 0; word < WORDS; ++word) {
    float weights[LINES_OF_LANE][8];
    UNROLL for (uint i = 0; i < LINES_OF_LANE; ++i) {
      if (ALIGNED) {
        if (live[i] && (word == 0 || BLOCK % 32 != 0))
          scale[i] = float(scales[block_of_word<BLOCK>(line[i] / 8 + word)]);
        weights_of_word<W, false, HIGH_FIRST>(chunk[i][word], table, 0.0f, scale[i], weights[i]);
      } else {
        uint count = live[i] ? min(8u, N - min(n0 + 8 * word, N)) : 0;
        weights_from<W, false, HIGH_FIRST, false, BLOCK>(
            line[i] + 8 * word, count, packed, scales, levels, table, weights[i]);
      }
    }
    UNROLL for (uint m = 0; m < ROWS; ++m) {
      UNROLL for (uint c = 0; c < 8; ++c) {
        float term = 0.0f;
        UNROLL for (uint i = 0; i < LINES_OF_LANE; ++i)
          if (live[i]) term = fma(values[m][i], weights[i][c], term);
        add_to<EXACT>(high[m][8 * word + c], low[m][8 * word + c], term);
      }
    }
  }
}

UNROLL for (uint m = 0; m < ROWS; ++m) {
  UNROLL for (uint c = 0; c < COLUMNS; ++c) {
    UNROLL for (ushort bit = 16; bit >= LANES; bit /= 2) {
      float other = simd_shuffle_xor(high[m][c], bit);
      if (EXACT) low[m][c] += simd_shuffle_xor(low[m][c], bit);
      add_to<EXACT>(high[m][c], low[m][c], other);
    }
    if (lane < LANES && m0 + m < M && n0 + c < N) {
      ulong place = (ulong(part) * M + m0 + m) * N + n0 + c;
      sums[place] = high[m][c];
      corrections[place] = low[m][c];
    }
  }
}
"""

# One output a thread: its parts, in order.
JOIN = """
uint splits = split[0];
uint place = thread_position_in_grid.x;
uint count = threads_per_grid.x;
float high = 0.0f;
float low = 0.0f;
for (uint part = 0; part < splits; ++part) {
  add_exactly(high, low, sums[ulong(part) * count + place]);
  low += corrections[ulong(part) * count + place];
}
y[place] = T(total(high, low));
"""


def gemv_columns(x: mx.array, weight: DeviceWeight) -> mx.array:
    """Multiply x [M, K] by W [K, N] -> [M, N] of x's type; W is read once for every 4 rows of x."""
    M, K, N = x.shape[0], weight.K, weight.N
    rows = next((rows for rows in WORDS if rows >= M), max(WORDS))
    groups, blocks = -(-N // (LANES * 8 * WORDS[rows])), -(-M // rows)
    wanted = max(1, min(ENOUGH_SIMDGROUPS // (groups * blocks), K // (2 * LINES)))
    depth = -(-K // (wanted * LINES)) * LINES  # lines of a split, in whole steps
    splits = -(-K // depth)
    split = mx.array([splits, depth], mx.uint32)
    sums, corrections = built("gemv_columns", ("x", *INPUTS, "split"), ("sums", "corrections"), SOURCE)(
        inputs=[x, *weight.inputs, split],
        output_shapes=[(splits, M, N)] * 2,
        output_dtypes=[mx.float32] * 2,
        grid=(32, groups, blocks * splits),
        threadgroup=(32, SIMDGROUPS, 1),
        template=[
            ("T", x.dtype),
            *weight.template,
            ("ROWS", rows),
            ("WORDS", WORDS[rows]),
            ("LANES", LANES),
            ("LINES", LINES),
            ("EXACT", x.dtype == mx.float32),
        ],
    )
    (y,) = built("gemv_join", ("sums", "corrections", "split"), ("y",), JOIN)(
        inputs=[sums, corrections, split],
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
        grid=(M * N, 1, 1),
        threadgroup=(min(256, M * N), 1, 1),
        template=[("T", x.dtype)],
    )
    return y
