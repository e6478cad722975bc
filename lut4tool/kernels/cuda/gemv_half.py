"""GEMV in float16 and bfloat16 for 1 to 16 rows of x: weights decoded in registers are the A operand of tensor cores.

A block stays on its multiprocessor and walks over tiles of 16 outputs. Each of its 16 warps owns a slice of K, so that
its part of x stays in registers; the slices are added once at the end, in float32, through shared memory. Codes are
loaded two tiles ahead.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import CUDA_TYPE, MAX_SHARED, Program, multiprocessors
from lut4tool.kernels.cuda.weights import DeviceWeight

MOST_ROWS = 16
TILE = 16

BODY = r"""
  using namespace lut4tool;
  extern __shared__ uint4 dynamic[];
  const int M = x_shape[0], N = OUTPUTS, chunks = codes_shape[1];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int grid = gridDim.x, tiles = (N + 15) / 16;
#if AFFINE
  float* sums = reinterpret_cast<float*>(dynamic);
  const unsigned bits = 0;
#else
  const unsigned table = table_of(dynamic), bits = lane_bits(table, lane);
  float* sums = reinterpret_cast<float*>(after_table(reinterpret_cast<char*>(dynamic)));
#endif
#if SPAN
  constexpr int COUNT = 16;               // scale pairs of a chunk: those of k = 16 s + 8 h + 2 t and k + 1
  float2 scale[2][HELD][COUNT];
#else
  Scale scale[2][HELD][2][GROUPS];
#endif
  uint4 codes_of[2][HELD][2];
  unsigned xs[HELD][COLUMNS / 8][16];
  int chunk = warp * HELD, held = 0;
  auto load = [&](int b, int tile) __attribute__((always_inline)) {
#pragma unroll
    for (int h = 0; h < HELD; ++h)
      if (EVEN || h < held) {
        const long long piece = ((long long)tile * chunks + chunk + h) * 16 + g;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          codes_of[b][h][r] = load_streamed(codes + piece * 64 + r * 512 + t * 16);
#if !SPAN
          load_all(scale[b][h][r], scales + piece * GROUPS + r * 8 * GROUPS);
#endif
        }
#if SPAN
        const float* s = scales + ((long long)(tile * 16 / SPAN) * chunks + chunk + h) * 128 + 2 * t;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) scale[b][h][i] = *reinterpret_cast<const float2*>(s + i * 8);
#endif
      }
  };
  auto load_x = [&]() {
#pragma unroll
    for (int h = 0; h < HELD; ++h)
#pragma unroll
      for (int q = 0; q < COLUMNS / 8; ++q) {
        const int m = q * 8 + g;
        const Half* from = x + ((long long)m * chunks + chunk + h) * 128 + 2 * t;
#pragma unroll
        for (int i = 0; i < 16; ++i)
          xs[h][q][i] = m < M && (EVEN || h < held) ? *reinterpret_cast<const unsigned*>(from + i * 8) : 0;
      }
  };
  auto multiply = [&](int b, int slot, bool add) __attribute__((always_inline)) {
    float acc[COLUMNS / 8][2][4] = {};
#pragma unroll
    for (int h = 0; h < HELD; ++h)
      if (EVEN || h < held) {
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          const unsigned w0 = word_of(codes_of[b][h][0], s / 2), w1 = word_of(codes_of[b][h][1], s / 2);
          const int j = s % 2 * 2;
#if SPAN
          const float2 s0 = scale[b][h][2 * s], s1 = scale[b][h][2 * s + 1];
          const unsigned a0 = weights(w0, j, s0, bits), a1 = weights(w1, j, s0, bits);
          const unsigned a2 = weights(w0, j + 1, s1, bits), a3 = weights(w1, j + 1, s1, bits);
#else
          const Block s0 = block_of(scale[b][h][0][s * GROUPS / 8]), s1 = block_of(scale[b][h][1][s * GROUPS / 8]);
          const unsigned a0 = weights(w0, j, s0, bits), a1 = weights(w1, j, s1, bits);
          const unsigned a2 = weights(w0, j + 1, s0, bits), a3 = weights(w1, j + 1, s1, bits);
#endif
#pragma unroll
          for (int q = 0; q < COLUMNS / 8; ++q)
            mma(acc[q][s & 1], a0, a1, a2, a3, xs[h][q][2 * s], xs[h][q][2 * s + 1]);
        }
      }
    float* out = sums + (slot * WARPS + warp) * 16 * M;
#pragma unroll
    for (int q = 0; q < COLUMNS / 8; ++q)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int m = q * 8 + 2 * t + (c & 1), at = (g + c / 2 * 8) * M + m;
        if (m < M) out[at] = acc[q][0][c] + acc[q][1][c] + (add ? out[at] : 0.f);
      }
  };
  bool ready = false;
  for (int first = blockIdx.x; first < tiles; first += SLOTS * grid) {
    const int count = min(SLOTS, (tiles - first + grid - 1) / grid);
    for (int start = 0; start < chunks; start += WARPS * HELD) {
      chunk = start + warp * HELD;
      held = min(HELD, chunks - chunk);
      load(0, first);
      if (count > 1) load(1, first + grid);
      load_x();
      if (!ready) {
#if !AFFINE
        build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, book, tid);
        __syncthreads();
#endif
        ready = true;
      }
      for (int i = 0; i < count; i += 2) {
        multiply(0, i, start > 0);
        if (i + 2 < count) load(0, first + (i + 2) * grid);
        if (i + 1 < count) {
          multiply(1, i + 1, start > 0);
          if (i + 3 < count) load(1, first + (i + 3) * grid);
        }
      }
    }
    __syncthreads();
    for (int o = tid; o < count * 16 * M; o += THREADS) {
      const int i = o / (16 * M), rest = o % (16 * M), m = rest / 16, r = rest % 16;
      const int n = (first + i * grid) * 16 + r;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[(i * WARPS + w) * 16 * M + r * M + m];
      if (n < N) y[(long long)m * N + n] = (Half)sum;
    }
    if (first + SLOTS * grid < tiles) __syncthreads();
  }
"""


def product(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128], M from 1 to 16, of a half type -> [M, N]."""
    grid = min(-(-weight.rows // TILE), multiprocessors())
    (y,) = program(dtype, weight, len(x)).launch(
        [x, weight.codes, weight.scales, weight.book], [(len(x), weight.rows)], (grid,)
    )
    return y


def shape(weight: DeviceWeight, m: int) -> tuple[int, int]:
    """Warps of a block, and chunks of K that each holds x for at a time, as registers allow."""
    return 16, 1 if weight.span or weight.groups > 4 or m > 8 else 2


def program(dtype: str, weight: DeviceWeight, m: int) -> Program:
    """The program for a kind of weight, with room for the sums of m rows of x."""
    warps, held = shape(weight, m)
    tiles = -(-weight.rows // TILE)
    tiles_a_block = -(-tiles // min(tiles, multiprocessors()))
    table = 0 if weight.affine else 128 * 1024  # itself, and what aligns it
    # Five programs serve all M.
    tile_bytes = warps * TILE * 4 * next(most for most in (1, 2, 4, 8, 16) if m <= most)
    slots = min((MAX_SHARED - table) // tile_bytes, 1 << (tiles_a_block - 1).bit_length())
    constants = {
        "OUTPUTS": weight.rows, "AFFINE": int(weight.affine), "FLOAT_POINTS": int(weight.float_points),
        "SPAN": weight.span, "GROUPS": weight.groups, "COLUMNS": 8 if m <= 8 else 16, "HELD": held,
        "EVEN": int(weight.chunks % (warps * held) == 0), "WARPS": warps, "SLOTS": slots,
    }  # fmt: skip
    return Program(
        "gemv_half",
        (("x", dtype), ("codes", "uint8"), ("scales", "uint32" if weight.affine else "float32"), ("book", "float32")),
        (("y", dtype),),
        BODY.replace("Half", CUDA_TYPE[dtype]),
        warps * 32,
        tuple(constants.items()),
        table + slots * tile_bytes,
        dtype,
    )
