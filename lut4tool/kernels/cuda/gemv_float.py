"""GEMV in float32 for 1 to 4 rows of x, on plain float32 arithmetic.

A warp owns 1024 k of 4 (2) outputs at a time, a lane 32 of them, so that its part of x stays in
registers. No running sum is longer than 8 products: those are scaled (or the weights were), added in a tree
over the lanes, then over the slices of K. What 8 roundings and a tree lose is far below 2^-21 * sum |x||w|.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import MAX_SHARED, Program, multiprocessors
from lut4tool.kernels.cuda.weights import DeviceWeight

MOST_ROWS = 4

BODY = r"""
  using namespace lut4tool;
#if ROUNDING == 1
#define ROUND(v) round_bf16(v)
#elif ROUNDING == 2
#define ROUND(v) round_f16(v)
#else
#define ROUND(v) (v)
#endif
  extern __shared__ uint4 dynamic[];
  const int N = codes_shape[0], chunks = codes_shape[1];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, grid = gridDim.x;
  const int slice = warp % SLICES, tiles = (N + TILE - 1) / TILE;
  const unsigned bits = lane_bits(table_of(dynamic), lane);
  float* sums = reinterpret_cast<float*>(after_table(reinterpret_cast<char*>(dynamic)));
  constexpr int WORDS = HELD / 8, STEPS = HELD / 4;          // words of codes and m16n8k16 steps of a lane
  constexpr int SETS = GROUPS * STEPS > 8 ? GROUPS * STEPS / 8 : 1;   // scales of a lane
  constexpr int PAIRS = HELD / 2 / SETS;
  const int t = HELD == 32 ? lane & 3 : lane >> 1 & 3, step0 = HELD == 32 ? 0 : (lane & 1) * 4;
  uint32_t codes_of[2][ROWS][WORDS];
  float scale[2][ROWS][SETS], point[2][ROWS][SETS];
  float xs[M][HELD];
  int chunk = 0;
  auto load = [&](int b, int tile) __attribute__((always_inline)) {
    const int c = min(chunk, chunks - 1);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const long long row = min(tile * TILE + warp / SLICES * ROWS + r, N - 1);
      const uint8_t* p = codes + (row * chunks + c) * 64 + t * 16 + step0 * 2;
      if (HELD == 32) {
        const uint4 v = load_streamed(p);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) codes_of[b][r][i] = word_of(v, i);
      } else {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
        codes_of[b][r][0] = v.x; codes_of[b][r][WORDS - 1] = v.y;
      }
#if !SPAN
      const long long at = (row * chunks + c) * GROUPS + step0 * GROUPS / 8;
      load_all(scale[b][r], scales + at);
      if (AFFINE) load_all(point[b][r], points + at);
#endif
    }
  };
  auto multiply = [&](int b, int slot, int tile, bool add) __attribute__((always_inline)) {
    float v[ROWS * M];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#if SPAN
      const int row = min(tile * TILE + warp / SLICES * ROWS + r, N - 1);
      const float* along = scales + ((long long)(row / SPAN) * chunks + min(chunk, chunks - 1)) * 128 + 2 * t;
#endif
#pragma unroll
      for (int m = 0; m < M; ++m) v[r * M + m] = 0.f;
#pragma unroll
      for (int i = 0; i < SETS; ++i) {
        float a[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m) a[m][0] = a[m][1] = 0.f;
#pragma unroll
        for (int q = 0; q < PAIRS; ++q) {
          const int p = i * PAIRS + q;
          float2 w = pair_at(codes_of[b][r][p / 4], p % 4, bits);
          if (AFFINE) { w.x = ROUND(w.x - point[b][r][i]); w.y = ROUND(w.y - point[b][r][i]); }
#if SPAN
          const float2 s = *reinterpret_cast<const float2*>(along + (step0 * 2 + p) * 8);
          w.x = ROUND(w.x * s.x); w.y = ROUND(w.y * s.y);
#elif !FOLD
          w.x = ROUND(w.x * scale[b][r][i]); w.y = ROUND(w.y * scale[b][r][i]);
#endif
#pragma unroll
          for (int m = 0; m < M; ++m) {
            a[m][0] = fmaf(w.x, xs[m][2 * p], a[m][0]);
            a[m][1] = fmaf(w.y, xs[m][2 * p + 1], a[m][1]);
          }
          if (q % 8 == 7 || q == PAIRS - 1) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
              v[r * M + m] = FOLD ? fmaf(a[m][0] + a[m][1], scale[b][r][i], v[r * M + m])
                                           : v[r * M + m] + (a[m][0] + a[m][1]);
              a[m][0] = a[m][1] = 0.f;
            }
          }
        }
      }
    }
    if (chunk >= chunks)
#pragma unroll
      for (int i = 0; i < ROWS * M; ++i) v[i] = 0.f;
    int index = 0;
    add_lanes<ROWS * M, 16>(v, lane, index);
    if ((lane & (32 / (ROWS * M) - 1)) == 0) {
      float* out = sums + ((slot * WARPS + warp) * ROWS * M + index);
      *out = add ? *out + v[0] : v[0];
    }
  };
  bool ready = false;
  for (int first = blockIdx.x; first < tiles; first += SLOTS * grid) {
    const int count = min(SLOTS, (tiles - first + grid - 1) / grid);
    for (int start = 0; start < chunks; start += SLICES * HELD / 4) {
      // A lane's chunk; lanes past the last one take it again and give nothing.
      chunk = start + slice * HELD / 4 + lane * HELD / 128;
      load(0, first);
      if (count > 1) load(1, first + grid);
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int p = 0; p < HELD / 2; ++p) {
          float2 v = make_float2(0.f, 0.f);
          if (chunk < chunks && m < x_shape[0])
            v = *reinterpret_cast<const float2*>(
                x + ((long long)m * chunks + chunk) * 128 + step0 * 16 + p * 8 + 2 * t);
          xs[m][2 * p] = v.x; xs[m][2 * p + 1] = v.y;
        }
      if (!ready) {
        build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, book, tid);
        __syncthreads();
        ready = true;
      }
      for (int i = 0; i < count; i += 2) {
        multiply(0, i, first + i * grid, start > 0);
        if (i + 2 < count) load(0, first + (i + 2) * grid);
        if (i + 1 < count) {
          multiply(1, i + 1, first + (i + 1) * grid, start > 0);
          if (i + 3 < count) load(1, first + (i + 3) * grid);
        }
      }
    }
    __syncthreads();
    for (int o = tid; o < count * TILE * M; o += THREADS) {
      const int i = o / (TILE * M), rest = o % (TILE * M), m = rest / TILE, r = rest % TILE;
      const int n = (first + i * grid) * TILE + r;
      float sum = 0.f;
#pragma unroll
      for (int q = 0; q < SLICES; ++q)
        sum += sums[((i * WARPS + r / ROWS * SLICES + q) * ROWS + r % ROWS) * M + m];
      if (n < N && m < x_shape[0]) y[(long long)m * N + n] = sum;
    }
    if (first + SLOTS * grid < tiles) __syncthreads();
  }
"""


def product(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128], M from 1 to 4, of float32 -> [M, N]; dtype: what the weight is rounded to."""
    m = 1 << (len(x) - 1).bit_length()  # 1, 2 or 4: three programs serve all
    kernel, tile = program(weight, m, dtype)
    grid = min(-(-weight.rows // tile), multiprocessors())
    arrays = [x, weight.codes, weight.scales, weight.points, weight.book]
    (y,) = kernel.launch(arrays, [(len(x), weight.rows)], (grid,))
    return y


def shape(m: int) -> tuple[int, int]:
    """Consecutive k that a lane holds x for, and the most warps of a block, as registers allow."""
    return 32, 16 if m == 1 else 8


def program(weight: DeviceWeight, m: int, dtype: str) -> tuple[Program, int]:
    """The program for 1, 2 or 4 rows of x, and the outputs that a block makes at a time."""
    held, most_warps = shape(m)
    slices = -(-weight.chunks * 4 // held)  # of 32 * held k, one a warp
    passes = -(-slices // most_warps)
    slices = -(-slices // passes)
    teams = most_warps // slices
    rows = 2 if weight.groups > 4 or (weight.affine and weight.groups > 2) else 4  # of a warp, as registers allow
    warps, tile = slices * teams, teams * rows
    tiles = -(-weight.rows // tile)
    tiles_a_block = -(-tiles // min(tiles, multiprocessors()))
    tile_bytes = warps * rows * m * 4
    slots = min((MAX_SHARED - 128 * 1024) // tile_bytes, 1 << (tiles_a_block - 1).bit_length())
    rounding = {"float32": 0, "bfloat16": 1, "float16": 2}[dtype]
    constants = {
        "AFFINE": int(weight.affine), "SPAN": weight.span, "GROUPS": weight.groups, "HELD": held, "M": m, "ROWS": rows,
        "FOLD": int(weight.fold and not rounding and not weight.span), "SLICES": slices, "TILE": tile, "WARPS": warps,
        "SLOTS": slots, "ROUNDING": rounding,
    }  # fmt: skip
    kernel = Program(
        "gemv_float",
        (("x", "float32"), ("codes", "uint8"), ("scales", "float32"), ("points", "float32"), ("book", "float32")),
        (("y", "float32"),),
        BODY,
        warps * 32,
        tuple(constants.items()),
        128 * 1024 + slots * tile_bytes,
    )
    return kernel, tile
