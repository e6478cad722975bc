"""GEMV in float16 and bfloat16 for 1 to 16 rows of x: weights decoded in registers are the A operand of tensor cores.

A block stays on its multiprocessor and walks over tiles of 16 outputs. Each of its 16 warps owns a slice of K, so that
its part of x stays in registers; the slices are added once at the end, in float32, through shared memory. Codes and
scales are copied ahead into a ring of STAGES tiles that each warp has for itself.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import CUDA_TYPE, MAX_SHARED, Program, multiprocessors, shared_for_rings
from lut4tool.kernels.cuda.weights import DeviceWeight

MOST_ROWS = 16
TILE = 16
#: Most tiles that a block sums before it adds the slices of K. Stages of a ring: with more, the first comes later.
MOST_SLOTS, STAGES = 16, 2

BODY = r"""
  using namespace lut4tool;
  extern __shared__ uint4 dynamic[];
#if !AFFINE
  const float entry = load_entry(book, threadIdx.x);
#endif
  const int M = x_shape[0], chunks = codes_shape[1], N = __ldg(sizes);
  const int tid = threadIdx.x, lane = tid & 31, warp = warp_of(tid), g = lane >> 2, t = lane & 3;
  const int grid = gridDim.x, tiles = codes_shape[0];
  // A stage: codes [HELD][16][64 bytes], scales [HELD][8][2 rows 8 apart][GROUPS].
  typedef Ring<STAGES, HELD * 1024, SPAN ? 0 : HELD * 64 * GROUPS> WarpRing;
  constexpr int CODES = HELD * 1024;
#if AFFINE
  const unsigned bits = 0, to = (unsigned)__cvta_generic_to_shared(dynamic) + warp * WarpRing::BYTES;
  float* sums = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + WARPS * WarpRing::BYTES);
#else
  const unsigned bits = lane_bits(table_of(dynamic), lane), to = ring_of<WarpRing::BYTES>(dynamic, warp);
  float* sums = reinterpret_cast<float*>(after_rings<WarpRing::BYTES>(reinterpret_cast<char*>(dynamic), WARPS));
#endif
  WarpRing ring;
  ring.start(to);
  unsigned xs[HELD][COLUMNS / 8][16];
  int chunk = warp * HELD, held = 0;
  int count = 0, first = blockIdx.x;
  int next = 0, next_chunk = 0;                   // the tile of this round and the slice of K that are copied next
  auto copy_next = [&]() __attribute__((always_inline)) {
    if (next_chunk < chunks) {
      const int many = EVEN ? HELD : min(HELD, chunks - next_chunk);
      const long long piece = ((long long)(first + next * grid) * chunks + next_chunk) * 16;
      ring.fill(codes + piece * 64, many * 1024, scales + piece * GROUPS, many * 64 * GROUPS, lane);
      if (++next == count) {
        next = 0;
        next_chunk += WARPS * HELD;
      }
    }
    ring.end_of_fill();
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
  auto multiply = [&](unsigned from, int slot, int tile, bool add) __attribute__((always_inline)) {
    float acc[COLUMNS / 8][2][4] = {};
    uint4 codes_of[HELD][2];
    Scale scale[HELD][2 * GROUPS];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) codes_of[h][r] = load_shared_16(from + h * 1024 + r * 512 + lane * 16);
      if (!SPAN) load_all_shared(scale[h], from + CODES + (h * 8 + g) * 8 * GROUPS);
    }
#pragma unroll
    for (int h = 0; h < HELD; ++h)
      if (EVEN || h < held) {
#if SPAN
        const float* along = scales + ((long long)(tile * 16 / SPAN) * chunks + chunk + h) * 128 + 2 * t;
#endif
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          const unsigned w0 = word_of(codes_of[h][0], s / 2), w1 = word_of(codes_of[h][1], s / 2);
          const int j = s % 2 * 2;
#if SPAN
          const float2 s0 = *reinterpret_cast<const float2*>(along + s * 16);
          const float2 s1 = *reinterpret_cast<const float2*>(along + s * 16 + 8);
          const unsigned a0 = weights(w0, j, s0, bits), a1 = weights(w1, j, s0, bits);
          const unsigned a2 = weights(w0, j + 1, s1, bits), a3 = weights(w1, j + 1, s1, bits);
#else
          const Block s0 = block_of(scale[h][s * GROUPS / 8]);
          const Block s1 = block_of(scale[h][GROUPS + s * GROUPS / 8]);
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
  for (; first < tiles; first += SLOTS * grid) {
    count = min(SLOTS, (tiles - first + grid - 1) / grid);
    next = 0;
    next_chunk = warp * HELD;
    for (int i = 0; i < STAGES - 1; ++i) copy_next();
    for (int start = 0; start < chunks; start += WARPS * HELD) {
      chunk = start + warp * HELD;
      held = min(HELD, chunks - chunk);
      load_x();
      if (!ready) {
#if !AFFINE
        build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, entry, tid);
        __syncthreads();
#endif
        ready = true;
      }
      for (int i = 0; i < count; ++i) {
        __syncwarp();                             // all lanes are done with the stage that is filled
        copy_next();
        multiply(EVEN || held > 0 ? ring.next() : to, i, first + i * grid, start > 0);
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
        [x, weight.codes, weight.scales, weight.book, weight.sizes], [(len(x), weight.rows)], (grid,)
    )
    return y


def shape(weight: DeviceWeight, m: int) -> tuple[int, int]:
    """Warps of a block, and chunks of K that each holds x for at a time, as registers allow."""
    return 16, 1 if weight.span or weight.groups > 4 or m > 8 else 2


def program(dtype: str, weight: DeviceWeight, m: int) -> Program:
    """The program for a kind of weight, with room for the sums of m rows of x: five serve all m, and every N."""
    warps, held = shape(weight, m)
    stage = held * (1024 + (0 if weight.span else 64 * weight.groups))
    tile_bytes = warps * TILE * 4 * next(most for most in (1, 2, 4, 8, 16) if m <= most)
    rings = shared_for_rings(warps, STAGES, stage, table=not weight.affine)
    slots = min((MAX_SHARED - rings) // tile_bytes, MOST_SLOTS)
    constants = {
        "AFFINE": int(weight.affine), "FLOAT_POINTS": int(weight.float_points), "SPAN": weight.span,
        "GROUPS": weight.groups, "COLUMNS": 8 if m <= 8 else 16, "HELD": held,
        "EVEN": int(weight.chunks % (warps * held) == 0), "WARPS": warps, "SLOTS": slots, "STAGES": STAGES,
    }  # fmt: skip
    return Program(
        "gemv_half",
        (("x", dtype), ("codes", "uint8"), ("scales", "uint32" if weight.affine else "float32"), ("book", "float32"),
         ("sizes", "int32")),
        (("y", dtype),),
        BODY.replace("Half", CUDA_TYPE[dtype]),
        warps * 32,
        tuple(constants.items()),
        rings + slots * tile_bytes,
        dtype,
    )  # fmt: skip
