"""Tile in float32 for more rows of x: blocks of weights decoded into shared memory, multiplied on plain arithmetic.

A thread sums 8 outputs of 4 rows of x. 16 products are summed at a time, two such sums added, and those added to the
total with the correction of Kahan (arXiv:math/0211049 has the bound: 2 units of the last place, whatever K). The
correction is kept only where the sum is finite, so that Inf and NaN come through.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import Program
from lut4tool.kernels.cuda.weights import DeviceWeight

OUTPUTS = 128
#: Rows of x at a time, parts of K in a block, and blocks on a multiprocessor: parts and blocks do not wait for each other.
SHAPES = {16: (6, 1), 32: (1, 3)}
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
  // A part of K has COLUMNS / 4 x 16 threads; parts are added at the end.
  constexpr int PARTS = THREADS / (COLUMNS * 4), TEAM = COLUMNS * 4;
  constexpr int WIDTH = 128 + 4, LENGTH = COLUMNS + 4;    // rows of shared memory, padded
  extern __shared__ uint4 dynamic[];
  const int M = x_shape[0], N = codes_shape[0], chunks = codes_shape[1];
  const int tid = threadIdx.x, part = tid / TEAM, member = tid % TEAM;
  float* book_of = reinterpret_cast<float*>(dynamic);
  float* w_of = book_of + 16 * 32 + part * 32 * (WIDTH + LENGTH);    // [32][WIDTH]: k, then n
  float* x_of = w_of + 32 * WIDTH;                                   // [32][LENGTH]: k, then m
  const int n0 = member % 16 * 4, m0 = member / 16 * 4;
  auto meet = [&]() { asm volatile("bar.sync %0,%1;" ::"r"(part + 1), "n"(TEAM) : "memory"); };
  const long long row0 = (long long)blockIdx.x * 128;
  const int column0 = blockIdx.y * COLUMNS;
  for (int i = tid; i < 16 * 32; i += THREADS) book_of[i] = book[i >> 5];   // an entry in every bank
  __syncthreads();
  float total[8][4] = {}, lost[8][4] = {};
  // Quarter t of a chunk: the 32 k that piece t of its codes holds, in the order of its bytes.
  for (int quarter = part; quarter < chunks * 4; quarter += PARTS) {
    const int chunk = quarter >> 2, t = quarter & 3;
    meet();
    for (int i = member; i < 128; i += TEAM) {
      const long long row = min(row0 + i, (long long)N - 1);
      const uint4 v = *reinterpret_cast<const uint4*>(codes + (row * chunks + chunk) * 64 + t * 16);
#pragma unroll
      for (int s = 0; s < 8; ++s) {
#if !SPAN
        const long long at = (row * chunks + chunk) * GROUPS + s * GROUPS / 8;
        const float scale = __ldg(scales + at), point = AFFINE ? __ldg(points + at) : 0.f;
#endif
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const unsigned code = word_of(v, s / 2) >> (s % 2 * 16 + e * 4) & 15;
          float w = book_of[code * 32 + (tid & 31)];
#if SPAN
          const float scale = __ldg(scales + (row / SPAN * chunks + chunk) * 128 + s * 16 + e / 2 * 8 + 2 * t + e % 2);
#else
          if (AFFINE) w = ROUND(w - point);
#endif
          w_of[(s * 4 + e) * WIDTH + i] = ROUND(w * scale);
        }
      }
    }
    for (int i = member; i < COLUMNS * 16; i += TEAM) {
      const int m = i % COLUMNS, p = i / COLUMNS;
      float2 v = make_float2(0.f, 0.f);
      if (column0 + m < M)
        v = *reinterpret_cast<const float2*>(x + ((long long)(column0 + m) * chunks + chunk) * 128 + p * 8 + 2 * t);
      x_of[2 * p * LENGTH + m] = v.x;
      x_of[(2 * p + 1) * LENGTH + m] = v.y;
    }
    meet();
    float sum[8][4] = {}, half[8][4];
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const float4 wa = *reinterpret_cast<const float4*>(w_of + k * WIDTH + n0);
      const float4 wb = *reinterpret_cast<const float4*>(w_of + k * WIDTH + 64 + n0);
      const float4 xa = *reinterpret_cast<const float4*>(x_of + k * LENGTH + m0);
      const float w[8] = {wa.x, wa.y, wa.z, wa.w, wb.x, wb.y, wb.z, wb.w}, v[4] = {xa.x, xa.y, xa.z, xa.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (k == 16) { half[i][j] = sum[i][j]; sum[i][j] = w[i] * v[j]; }
          else sum[i][j] = fmaf(w[i], v[j], sum[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float term = __fsub_rn(__fadd_rn(sum[i][j], half[i][j]), lost[i][j]);
        const float next = __fadd_rn(total[i][j], term);
        const float error = __fsub_rn(__fsub_rn(next, total[i][j]), term);
        lost[i][j] = fabsf(next) < as_float(0x7f800000u) ? error : 0.f;
        total[i][j] = next;
      }
  }
  if (PARTS > 1) {
    float* sums = reinterpret_cast<float*>(dynamic);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float term = total[i][j] - lost[i][j];
        if (part) sums[((part - 1) * 32 + i * 4 + j) * TEAM + member] = term;
        total[i][j] = term;
        lost[i][j] = 0.f;
      }
    __syncthreads();
    if (part) return;
    for (int p = 1; p < PARTS; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][j] += sums[((p - 1) * 32 + i * 4 + j) * TEAM + member];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const long long n = row0 + i / 4 * 64 + n0 + i % 4;
      const int m = column0 + m0 + j;
      if (n < N && m < M) y[m * (long long)N + n] = total[i][j] - lost[i][j];
    }
"""


def product(x: mx.array, weight: DeviceWeight, weight_dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128] of float32 -> [M, N]."""
    m = len(x)
    columns = 16 if m <= 16 else 32
    grid = (-(-weight.rows // OUTPUTS), -(-m // columns))
    arrays = [x, weight.codes, weight.scales, weight.points, weight.book]
    (y,) = program(weight, columns, weight_dtype).launch(arrays, [(m, weight.rows)], grid)
    return y


def program(weight: DeviceWeight, columns: int, weight_dtype: str) -> Program:
    """The program for 16 or 32 rows of x at a time."""
    parts, blocks = SHAPES[columns]
    threads = parts * columns * 4
    constants = {
        "AFFINE": int(weight.affine), "SPAN": weight.span, "GROUPS": weight.groups, "COLUMNS": columns,
        "ROUNDING": ROUNDING[weight_dtype],
    }  # fmt: skip
    tiles = 16 * 32 + parts * 32 * (OUTPUTS + 4 + columns + 4)
    return Program(
        "tile_float",
        (("x", "float32"), ("codes", "uint8"), ("scales", "float32"), ("points", "float32"), ("book", "float32")),
        (("y", "float32"),),
        BODY,
        threads,
        tuple(constants.items()),
        4 * max(tiles, (parts - 1) * 32 * columns * 4),
        blocks=blocks,
    )
