"""GEMV in float32 for 1 to 4 rows of x, on plain float32 arithmetic.

A warp owns 1024 k of 4 outputs at a time, a lane 32 of them, so that its part of x stays in registers. Codes and scales
are copied ahead into a ring of STAGES tiles that each warp has for itself. No running sum is longer than 8 products:
those are scaled (or the weights were), added in a tree over the lanes, then over the slices of K. What 8 roundings and
a tree lose is far below 2^-21 * sum |x||w|.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import MAX_SHARED, Program, multiprocessors, shared_for_rings
from lut4tool.kernels.cuda.weights import TILE, DeviceWeight

MOST_ROWS = 4
#: Most tiles that a block sums before it adds the slices of K. Stages of a ring: with more, the first comes later.
MOST_SLOTS, STAGES = 32, 2
#: Consecutive k that a lane holds x for.
HELD = 32

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
  const float entry = load_entry(book, threadIdx.x);
  const int N = __ldg(sizes), chunks = codes_shape[1];
  const int tid = threadIdx.x, lane = tid & 31, warp = warp_of(tid), grid = gridDim.x;
  const int slice = warp % SLICES, fours = codes_shape[0], tiles = (fours + TILE / 4 - 1) / (TILE / 4);
  const unsigned bits = lane_bits(table_of(dynamic), lane);
  constexpr int SETS = GROUPS > 1 ? GROUPS : 1, PAIRS = 16 / SETS;          // scales of a lane, pairs of each
  // A stage: codes [8 chunks][ROWS][64 bytes], scales [8][ROWS][GROUPS].
  typedef Ring<STAGES, ROWS * 512, SPAN ? 0 : ROWS * 32 * GROUPS> WarpRing;
  constexpr int CODES = ROWS * 512;
  const unsigned to = ring_of<WarpRing::BYTES>(dynamic, warp);
  float* sums = reinterpret_cast<float*>(after_rings<WarpRing::BYTES>(reinterpret_cast<char*>(dynamic), WARPS));
  WarpRing ring;
  ring.start(to);
  const int t = lane & 3;
  float xs[M][32];
  int chunk = 0, count = 0, first = blockIdx.x;
  int next = 0, next_chunk = 0;                      // the tile of this round and the slice of K that are copied next
  auto copy_next = [&]() __attribute__((always_inline)) {
    if (next_chunk < chunks) {
      const int many = min(8, chunks - next_chunk), four = (first + next * grid) * (TILE / 4) + warp / SLICES;
      const long long piece = ((long long)min(four, fours - 1) * chunks + next_chunk) * ROWS;
      ring.fill(codes + piece * 64, many * ROWS * 64, scales + piece * GROUPS, many * ROWS * GROUPS * 4, lane);
      if (++next == count) {
        next = 0;
        next_chunk += SLICES * 8;
      }
    }
    ring.end_of_fill();
  };
  // What each lane has of the tile before, and where its sum goes: the lanes are added amid the products of the next
  // tile, which hide how long that takes.
  float before[ROWS * M] = {};
  float* to_add = nullptr;
  bool again = false;
  auto add_before = [&]() __attribute__((always_inline)) {
    int index = 0;
    add_lanes<ROWS * M, 16>(before, lane, index);
    if (to_add != nullptr && (lane & (32 / (ROWS * M) - 1)) == 0)
      to_add[index] = !ONCE && again ? to_add[index] + before[0] : before[0];
  };
  auto multiply = [&](unsigned from, int slot, int tile, bool add) __attribute__((always_inline)) {
    float v[ROWS * M];
    uint4 codes_of[ROWS];
    float scale[ROWS][SETS], point[SETS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {                 // odd chunks have rows exchanged
      codes_of[r] = load_shared_16(from + (lane / 4 * ROWS + (r ^ (lane / 4 & 1))) * 64 + t * 16);
      if (!SPAN) load_all_shared(scale[r], from + CODES + (lane / 4 * ROWS + r) * GROUPS * 4);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r == 1) add_before();
      const int row = min(tile * TILE + warp / SLICES * ROWS + r, N - 1), c = min(chunk, chunks - 1);
#if SPAN
      const float* along = scales + ((long long)(row / SPAN) * chunks + c) * 128 + 2 * t;
#elif AFFINE
      load_all(point, points + (((long long)(row / 4) * chunks + c) * 4 + row % 4) * GROUPS);
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
          float2 w = pair_at(word_of(codes_of[r], p / 4), p % 4, bits);
          if (AFFINE) { w.x = ROUND(w.x - point[i]); w.y = ROUND(w.y - point[i]); }
#if SPAN
          const float2 s = *reinterpret_cast<const float2*>(along + p * 8);
          w.x = ROUND(w.x * s.x); w.y = ROUND(w.y * s.y);
#elif !FOLD
          w.x = ROUND(w.x * scale[r][i]); w.y = ROUND(w.y * scale[r][i]);
#endif
#pragma unroll
          for (int m = 0; m < M; ++m) {
            a[m][0] = fmaf(w.x, xs[m][2 * p], a[m][0]);
            a[m][1] = fmaf(w.y, xs[m][2 * p + 1], a[m][1]);
          }
          if (q % 8 == 7 || q == PAIRS - 1) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
              v[r * M + m] = FOLD ? fmaf(a[m][0] + a[m][1], scale[r][i], v[r * M + m])
                                           : v[r * M + m] + (a[m][0] + a[m][1]);
              a[m][0] = a[m][1] = 0.f;
            }
          }
        }
      }
    }
    if (RAGGED && chunk >= chunks)                   // what lies in the ring there is of no tile
#pragma unroll
      for (int i = 0; i < ROWS * M; ++i) v[i] = 0.f;
    to_add = sums + (slot * WARPS + warp) * ROWS * M;
    again = add;
#pragma unroll
    for (int i = 0; i < ROWS * M; ++i) before[i] = v[i];
  };
  auto load_x = [&]() {                              // lanes past the last chunk take zeros
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int p = 0; p < 16; ++p) {
        float2 v = make_float2(0.f, 0.f);
        if (chunk < chunks && m < x_shape[0])
          v = *reinterpret_cast<const float2*>(x + ((long long)m * chunks + chunk) * 128 + p * 8 + 2 * t);
        xs[m][2 * p] = v.x; xs[m][2 * p + 1] = v.y;
      }
  };
  bool ready = false;
  for (; first < tiles; first += SLOTS * grid) {
    count = min(SLOTS, (tiles - first + grid - 1) / grid);
    next = 0;
    next_chunk = slice * 8;
    chunk = slice * 8 + lane / 4;
    load_x();
    for (int i = 0; i < STAGES - 1; ++i) copy_next();
    for (int start = 0; start < chunks; start += SLICES * 8) {
      chunk = start + slice * 8 + lane / 4;
      if (start > 0) load_x();
      if (!ready) {
        build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, entry, tid);
        __syncthreads();
        ready = true;
      }
      for (int i = 0; i < count; ++i) {
        __syncwarp();                                // all lanes are done with the stage that is filled
        copy_next();
        multiply(start + slice * 8 < chunks ? ring.next() : to, i, first + i * grid, start > 0);
      }
    }
    add_before();
    to_add = nullptr;
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
    arrays = [x, weight.codes, weight.scales, weight.points, weight.book, weight.sizes]
    (y,) = kernel.launch(arrays, [(len(x), weight.rows)], (grid,))
    return y


def program(weight: DeviceWeight, m: int, dtype: str) -> tuple[Program, int]:
    """The program for 1, 2 or 4 rows of x and every N, and the outputs that a block makes at a time."""
    most_warps = 16 if m == 1 else 8  # as registers allow
    slices = -(-weight.chunks * 4 // HELD)  # of 32 * HELD k, one a warp
    passes = -(-slices // most_warps)
    slices = -(-slices // passes)
    teams = most_warps // slices
    rows = TILE[False]  # of a warp
    warps, tile = slices * teams, teams * rows
    stage = rows * (512 + (0 if weight.span else 32 * weight.groups))
    tile_bytes = warps * rows * m * 4
    rings = shared_for_rings(warps, STAGES, stage, table=True)
    slots = min((MAX_SHARED - rings) // tile_bytes, MOST_SLOTS)
    rounding = {"float32": 0, "bfloat16": 1, "float16": 2}[dtype]
    constants = {
        "AFFINE": int(weight.affine), "SPAN": weight.span, "GROUPS": weight.groups, "M": m, "ROWS": rows,
        "FOLD": int(weight.fold and not rounding and not weight.span), "SLICES": slices, "TILE": tile, "WARPS": warps,
        "SLOTS": slots, "STAGES": STAGES, "ONCE": int(passes == 1), "RAGGED": int(weight.chunks % (slices * 8) > 0),
        "ROUNDING": rounding,
    }  # fmt: skip
    kernel = Program(
        "gemv_float",
        (("x", "float32"), ("codes", "uint8"), ("scales", "float32"), ("points", "float32"), ("book", "float32"),
         ("sizes", "int32")),
        (("y", "float32"),),
        BODY,
        warps * 32,
        tuple(constants.items()),
        rings + slots * tile_bytes,
    )  # fmt: skip
    return kernel, tile
