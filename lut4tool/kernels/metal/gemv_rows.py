"""Few rows of x times a weight whose lines run along K: a simdgroup makes ROWS x OUTS outputs, without a barrier."""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.metal.source import built
from lut4tool.kernels.metal.weights import INPUTS, DeviceWeight

SIMDGROUPS = 2
#: Rows of x that are made together -> outputs of a simdgroup: registers hold ROWS * OUTS sums.
OUTS = {1: 4, 2: 4, 4: 4, 8: 2}

# Each lane takes 32 codes of a line at a time with one load (8 where blocks or lines are not aligned), and adds 8
# products at a time: 4 + 1 roundings deep, into a compensated sum where x is float32.
SOURCE = """
constexpr uint PER_LANE = ALIGNED ? 32 : 8;
uint M = x_shape[0], K = x_shape[1], N = dims[0];
ulong pitch = dims[1];
uint lane = thread_position_in_grid.x;
uint n0 = thread_position_in_grid.y * OUTS;
uint m0 = thread_position_in_grid.z * ROWS;

LaneTable table = {AFFINE ? 0.0f : float(levels[lane % 16])};
float high[ROWS][OUTS] = {};
float low[ROWS][OUTS] = {};

for (uint start = 0; start < K; start += 32 * PER_LANE) {  // the same for all lanes: they look up together
  uint k = start + lane * PER_LANE;
  bool live = k < K;
  ulong line[OUTS];
  uint4 chunk[OUTS];
  float scale[OUTS] = {};
  float zero[OUTS] = {};
  UNROLL for (uint r = 0; r < OUTS; ++r) {
    line[r] = min(n0 + r, N - 1) * pitch + k;
    chunk[r] = uint4(0);
    if (ALIGNED && live) chunk[r] = ((const device uint4*)packed)[line[r] / 32];
  }
  UNROLL for (uint word = 0; word < PER_LANE / 8; ++word) {
    uint count = live ? min(8u, K - k) : 0;
    float values[ROWS][8];
    UNROLL for (uint m = 0; m < ROWS; ++m) {
      const device T* row = x + ulong(min(m0 + m, M - 1)) * K + k + 8 * word;
      if (ALIGNED) {
        float4 left = live ? four_of(row) : float4(0.0f), right = live ? four_of(row + 4) : float4(0.0f);
        UNROLL for (uint i = 0; i < 4; ++i) {
          values[m][i] = left[i];
          values[m][4 + i] = right[i];
        }
      } else {
        UNROLL for (uint i = 0; i < 8; ++i) values[m][i] = i < count ? float(row[i]) : 0.0f;
      }
    }
    UNROLL for (uint r = 0; r < OUTS; ++r) {
      float weights[8];
      if (ALIGNED) {
        if (live && (word == 0 || BLOCK % 32 != 0)) {
          uint block = block_of_word<BLOCK>(line[r] / 8 + word);
          scale[r] = float(scales[block]);
          zero[r] = AFFINE ? float(levels[ONE_ZERO ? 0 : block]) : 0.0f;
        }
        weights_of_word<W, AFFINE, HIGH_FIRST>(chunk[r][word], table, zero[r], scale[r], weights);
      } else {
        weights_from<W, AFFINE, HIGH_FIRST, ONE_ZERO, BLOCK>(
            line[r], count, packed, scales, levels, table, weights);
      }
      UNROLL for (uint m = 0; m < ROWS; ++m) {
        float left = values[m][0] * weights[0];
        float right = values[m][4] * weights[4];
        UNROLL for (uint i = 1; i < 4; ++i) {
          left = fma(values[m][i], weights[i], left);
          right = fma(values[m][4 + i], weights[4 + i], right);
        }
        if (live) add_to<EXACT>(high[m][r], low[m][r], left + right);
      }
    }
  }
}

UNROLL for (uint m = 0; m < ROWS; ++m) {
  UNROLL for (uint r = 0; r < OUTS; ++r) {
    UNROLL for (ushort bit = 16; bit >= 1; bit /= 2) {
      float other = simd_shuffle_xor(high[m][r], bit);
      if (EXACT) low[m][r] += simd_shuffle_xor(low[m][r], bit);
      add_to<EXACT>(high[m][r], low[m][r], other);
    }
    if (lane == 0 && m0 + m < M && n0 + r < N)
      y[ulong(m0 + m) * N + n0 + r] = T(total(high[m][r], low[m][r]));
  }
}
"""


def gemv_rows(x: mx.array, weight: DeviceWeight) -> mx.array:
    """Multiply x [M, K] by W [N, K] transposed -> [M, N] of x's type; W is read once for every 8 rows of x."""
    M, N = x.shape[0], weight.N
    rows = next((rows for rows in OUTS if rows >= M), max(OUTS))
    kernel = built("gemv_rows", ("x", *INPUTS), ("y",), SOURCE)
    (y,) = kernel(
        inputs=[x, *weight.inputs],
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
        grid=(32, -(-N // OUTS[rows]), -(-M // rows)),
        threadgroup=(32, SIMDGROUPS, 1),
        template=[
            ("T", x.dtype),
            *weight.template,
            ("ROWS", rows),
            ("OUTS", OUTS[rows]),
            ("EXACT", x.dtype == mx.float32),
        ],
    )
    return y
