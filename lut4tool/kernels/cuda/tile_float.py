"""Tile in float32 for more rows of x: a lane owns outputs and decodes their weights in registers, x is broadcast.

A lane sums 4 outputs of 16 rows of x over its warp's part of K; x comes from shared memory, one address for all lanes.
16 products are summed at a time, and those sums added to the total with the correction of Kahan, so that the error does
not grow with K: 16 roundings of a part of the sum and 2 units of the last place. The correction is kept only where the
sum is finite, so that Inf and NaN come through.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import Program
from lut4tool.kernels.cuda.weights import DeviceWeight

#: Outputs and rows of x of a block, and its warps, which share K.
OUTPUTS, COLUMNS, PARTS = 128, 16, 8
ROUNDING = {"float32": 0, "bfloat16": 1, "float16": 2}

BODY = r"""
  using namespace lut4tool;
#if ROUNDING == 1
#define ROUND(v) round_bf16(v)
#elif ROUNDING == 2
#define ROUND(v) round_f16(v)
#else
#define ROUND(v) (v)
#endif
  constexpr int STAGE = 64 * COLUMNS;                           // x of half a chunk: [64 k][COLUMNS]
  extern __shared__ uint4 dynamic[];
  const int width = x_shape[1], N = codes_shape[0], chunks = codes_shape[1];   // x is transposed: [K, width]
  const int tid = threadIdx.x, lane = tid & 31, part = tid >> 5, column0 = blockIdx.y * COLUMNS;
  const unsigned bits = lane_bits(table_of(dynamic), lane);
  char* after = after_table(reinterpret_cast<char*>(dynamic));
  float* stages = reinterpret_cast<float*>(after) + part * 2 * STAGE;
  long long rows[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) rows[r] = (long long)min(blockIdx.x * 128 + r * 32 + lane, N - 1) * chunks;
  // Unit u of a chunk is its pieces 2 u and 2 u + 1: k = 8 b + 4 u and the next three, for b from 0 to 15.
  auto copy_x = [&](int unit, int stage) {
    const float* from = x + (unit / 2 * 128ll + unit % 2 * 4 + (lane >> 2 & 3) + (lane >> 4) * 8) * width + column0 +
                        (lane & 3) * 4;
    const unsigned to = (unsigned)__cvta_generic_to_shared(stages + stage * STAGE + lane * 4);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to + i * 512), "l"(from + i * 16ll * width)
                   : "memory");
  };
  auto codes_at = [&](int r, int unit, int p) {
    return __ldg(reinterpret_cast<const uint4*>(codes + (rows[r] + unit / 2) * 64) + unit % 2 * 2 + p);
  };
  float total[4][COLUMNS] = {}, lost[4][COLUMNS] = {};
  const int units = chunks * 2;                                 // parts take whole chunks in turn
  auto following = [&](int unit) { return unit % 2 ? unit + 2 * PARTS - 1 : unit + 1; };
  int unit = part * 2, stage = 0;
  uint4 next[4];
  if (unit < units) {
    copy_x(unit, 0);
#pragma unroll
    for (int r = 0; r < 4; ++r) next[r] = codes_at(r, unit, 0);
  }
  build_table<THREADS>(after - 65536, book, tid);
  __syncthreads();
  for (; unit < units; unit = following(unit), stage ^= 1) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();                                               // everyone's copies are here, the other stage is free
    if (following(unit) < units) copy_x(following(unit), stage ^ 1);
#if !SPAN
    float scale[4][GROUPS], point[4][GROUPS];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      load_all(scale[r], scales + (rows[r] + unit / 2) * GROUPS);
      if (AFFINE) load_all(point[r], points + (rows[r] + unit / 2) * GROUPS);
    }
#endif
    uint4 now[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {                      // piece p, 8 of its bytes
      const int p = step / 2;
      if (step % 2 == 0) {
        const int other = p ? following(unit) : unit;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          now[r] = next[r];
          if (other < units) next[r] = codes_at(r, other, 1 - p);
        }
      }
      float sum[4][COLUMNS];
      const float* xs = stages + stage * STAGE + 2 * p * COLUMNS;
#pragma unroll
      for (int b = step % 2 * 8; b < step % 2 * 8 + 8; ++b) {   // byte b: k = 8 b + 4 u + 2 p and the next one
        float2 w[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          w[r] = pair_at(word_of(now[r], b / 4), b % 4, bits);
#if SPAN
          const int n = min(blockIdx.x * 128 + r * 32 + lane, N - 1);
          const float2 s = __ldg(reinterpret_cast<const float2*>(
              scales + ((long long)(n / SPAN) * chunks + unit / 2) * 128 + b * 8 + unit % 2 * 4 + 2 * p));
#else
          if (AFFINE) {
            w[r].x = ROUND(w[r].x - point[r][b * GROUPS / 16]);
            w[r].y = ROUND(w[r].y - point[r][b * GROUPS / 16]);
          }
          const float2 s = make_float2(scale[r][b * GROUPS / 16], scale[r][b * GROUPS / 16]);
#endif
          w[r].x = ROUND(w[r].x * s.x);
          w[r].y = ROUND(w[r].y * s.y);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int q = 0; q < COLUMNS / 4; ++q) {
            const float4 v = *reinterpret_cast<const float4*>(xs + (b * 4 + e) * COLUMNS + q * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float xv = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
#pragma unroll
              for (int r = 0; r < 4; ++r) {
                const float wv = e ? w[r].y : w[r].x;
                sum[r][q * 4 + j] = b % 8 + e == 0 ? wv * xv : fmaf(wv, xv, sum[r][q * 4 + j]);
              }
            }
          }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int m = 0; m < COLUMNS; ++m) {
          const float term = __fsub_rn(sum[r][m], lost[r][m]), after_it = __fadd_rn(total[r][m], term);
          const float error = __fsub_rn(__fsub_rn(after_it, total[r][m]), term);
          lost[r][m] = fabsf(after_it) < as_float(0x7f800000u) ? error : 0.f;
          total[r][m] = after_it;
        }
    }
  }
  __syncthreads();
  float* sums = reinterpret_cast<float*>(after);                // [PARTS][4 * COLUMNS][32]
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int m = 0; m < COLUMNS; ++m)
      sums[((part * 4 + r) * COLUMNS + m) * 32 + lane] = total[r][m] - lost[r][m];
  __syncthreads();
  for (int i = part; i < 4 * COLUMNS; i += PARTS) {
    const long long n = blockIdx.x * 128ll + i / COLUMNS * 32 + lane;
    const int m = column0 + i % COLUMNS;
    float v[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) v[p] = sums[(p * 4 * COLUMNS + i) * 32 + lane];
#pragma unroll
    for (int step = PARTS / 2; step; step /= 2)
#pragma unroll
      for (int p = 0; p < step; ++p) v[p] += v[p + step];
    if (n < N) y[m * (long long)N + n] = v[0];
  }
"""


def product(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128] of float32 -> [M, N]; dtype: what the weight is rounded to."""
    m = len(x)
    width = -(-m // COLUMNS) * COLUMNS
    across = mx.contiguous(mx.pad(x, [(0, width - m), (0, 0)]).T)
    grid = (-(-weight.rows // OUTPUTS), width // COLUMNS)
    arrays = [across, weight.codes, weight.scales, weight.points, weight.book]
    (y,) = program(weight, dtype).launch(arrays, [(width, weight.rows)], grid)
    return y[:m]


def program(weight: DeviceWeight, dtype: str) -> Program:
    """The program for a kind of weight."""
    constants = {
        "AFFINE": int(weight.affine), "SPAN": weight.span, "GROUPS": weight.groups, "COLUMNS": COLUMNS, "PARTS": PARTS,
        "ROUNDING": ROUNDING[dtype],
    }  # fmt: skip
    return Program(
        "tile_float",
        (("x", "float32"), ("codes", "uint8"), ("scales", "float32"), ("points", "float32"), ("book", "float32")),
        (("y", "float32"),),
        BODY,
        PARTS * 32,
        tuple(constants.items()),
        128 * 1024 + 4 * PARTS * 2 * 64 * COLUMNS,
    )
