"""Products in float32 for several rows of x on tensor cores: each float32 is the sum of three bfloat16, exactly.

w = w1 + w2 + w3 and x = x1 + x2 + x3, each part rounded to the nearest from what the parts before it leave: a product
of two parts is exact in float32, and the six with w1 x1, w1 x2, w2 x1, w2 x2, w1 x3, w3 x1 leave less than
2^-24 * |x||w| out. The largest, w1 x1, is summed 16 terms at a time from zero by the tensor cores, which keep two bits
below float32's last and truncate; from there on sums are rounded to the nearest. The other five are 2^-8 of it.

Where codebook entries need no rounding of entry * scale (`fold`), the parts of the 256 pairs of entries lie in shared
memory and the scale multiplies a sum; otherwise weights are split in registers. Each warp holds the parts of its 128 k
of x in registers and walks over tiles of 16 outputs; the parts of K are added at the end through shared memory.

A row of x that holds Inf or NaN is summed again without tensor cores, over those elements alone.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import MAX_SHARED, Program, multiprocessors
from lut4tool.kernels.cuda.weights import DeviceWeight

TILE = 16
#: Rows of x that a block multiplies, and its warps: as many as the registers for x allow.
COLUMNS = {8: 16, 16: 8}
#: Passes over K whose sums are added plainly; longer ones keep what each addition loses.
PLAIN_PASSES = 4
ROUNDING = {"float32": 0, "bfloat16": 1, "float16": 2}

HEADER = r"""
#if ROUNDING == 1
#define ROUND(v) round_bf16(v)
#elif ROUNDING == 2
#define ROUND(v) round_f16(v)
#else
#define ROUND(v) (v)
#endif
namespace lut4tool {
// d = a * b + c or, from zero, d = a * b.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_first(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ float within_bf16(float v) {  // what rounds to a finite bfloat16
  return fminf(fmaxf(v, as_float(0xff7f0000u)), as_float(0x7f7f0000u));
}
// The first COUNT parts of two floats, the first float's in the low half.
template <int COUNT> __device__ __forceinline__ void split(float first, float second, unsigned (&parts)[COUNT]) {
  parts[0] = pack_bf16(within_bf16(first), within_bf16(second));
#pragma unroll
  for (int i = 1; i < COUNT; ++i) {
    first -= as_float(parts[i - 1] << 16);
    second -= as_float(parts[i - 1] & 0xffff0000u);
    parts[i] = pack_bf16(first, second);
  }
}
__device__ __forceinline__ unsigned load_shared(unsigned at) {
  unsigned v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(at));
  return v;
}
}  // namespace lut4tool
"""

BODY = r"""
  using namespace lut4tool;
  constexpr int Q = COLUMNS / 8;
  constexpr int SETS = GROUPS > 2 ? GROUPS : 2;                // sums of a chunk, of 64 k at most
  extern __shared__ uint4 dynamic[];
  __shared__ int special[COLUMNS];                             // rows of x with Inf or NaN
  const int M = x_shape[0], N = __ldg(sizes), chunks = codes_shape[1], column0 = blockIdx.y * COLUMNS;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int grid = gridDim.x, fours = codes_shape[0], tiles = (fours + 3) / 4;
  const unsigned base = (unsigned)__cvta_generic_to_shared(dynamic);
#if IN_PARTS
  // Part i of the pair of entries of byte e, for each lane: i * 32 KB + e * 128 + lane * 4 from a multiple of 32 KB.
  const unsigned table = (base + 32767u) & ~32767u, bits = table | lane * 4;
  float* sums = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + (table - base) + 98304);
#else
  const unsigned bits = lane_bits(table_of(dynamic), lane);
  float* sums = reinterpret_cast<float*>(after_table(reinterpret_cast<char*>(dynamic)));
#endif
#if COMPENSATED
  float* losses = sums + SLOTS * WARPS * 16 * COLUMNS;         // what the additions to `sums` lost
#endif
  uint4 codes_of[2][2];
  float scale[2][2][GROUPS], point[2][2][GROUPS];
  unsigned xs[Q][16][3];
  int chunk = 0;
  auto load = [&](int b, int tile) __attribute__((always_inline)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int c = min(chunk, chunks - 1);                    // odd chunks have rows exchanged
      const long long first_of_four = ((long long)min(tile * 4 + g / 4 + r * 2, fours - 1) * chunks + c) * 4;
      codes_of[b][r] = load_streamed(codes + (first_of_four + (g % 4 ^ (c & 1))) * 64 + t * 16);
#if !SPAN
      load_all(scale[b][r], scales + (first_of_four + g % 4) * GROUPS);
      if (AFFINE) load_all(point[b][r], points + (first_of_four + g % 4) * GROUPS);
#endif
    }
  };
  auto load_x = [&]() {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const int m = column0 + q * 8 + g;
      const float* from = x + ((long long)min(m, M - 1) * chunks + min(chunk, chunks - 1)) * 128 + 2 * t;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float2 v = __ldg(reinterpret_cast<const float2*>(from + i * 8));
        const bool whole = fabsf(v.x) < as_float(0x7f800000u) && fabsf(v.y) < as_float(0x7f800000u);
        if (!whole && m < M) special[q * 8 + g] = 1;
        if (!whole || m >= M || chunk >= chunks) v = make_float2(0.f, 0.f);
        split(v.x, v.y, xs[q][i]);
      }
    }
  };
#if SPAN
  const float* along = nullptr;
#endif
  // The parts of the weights of byte 2 s + h of row g + 8 r.
  auto decode = [&](int b, int r, int s, int h, unsigned (&parts)[PARTS]) __attribute__((always_inline)) {
    const unsigned word = word_of(codes_of[b][r], s / 2);
    const int j = s % 2 * 2 + h;
#if IN_PARTS
    const unsigned at = ((j == 0 ? word << 7 : word >> (j == 0 ? 0 : 8 * j - 7)) & 0x7f80u) | bits;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) parts[i] = load_shared(at + i * 32768);
#else
    float2 w = pair_at(word, j, bits);
    const int group = s * GROUPS / 8;
    if (AFFINE) { w.x = ROUND(w.x - point[b][r][group]); w.y = ROUND(w.y - point[b][r][group]); }
#if SPAN
    const float2 by = *reinterpret_cast<const float2*>(along + s * 16 + h * 8);
    w.x = ROUND(w.x * by.x); w.y = ROUND(w.y * by.y);
#elif !FOLD
    w.x = ROUND(w.x * scale[b][r][group]); w.y = ROUND(w.y * scale[b][r][group]);
#endif
    split(w.x, w.y, parts);
#endif
  };
  auto multiply = [&](int b, int slot, int tile, bool add) __attribute__((always_inline)) {
    float total[Q][4] = {};
#if SPAN
    along = scales + ((long long)(tile * 16 / SPAN) * chunks + min(chunk, chunks - 1)) * 128 + 2 * t;
#endif
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      float large[Q][4], small[2][Q][4] = {};
#pragma unroll
      for (int i = 0; i < 8 / SETS; ++i) {
        const int s = set * (8 / SETS) + i;
        unsigned parts[4][PARTS], a[PARTS][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {                          // rows g and g + 8, then k + 8 of both
          decode(b, e % 2, s, e / 2, parts[e]);
#pragma unroll
          for (int p = 0; p < PARTS; ++p) a[p][e] = parts[e][p];
        }
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          const unsigned (&x0)[3] = xs[q][2 * s], (&x1)[3] = xs[q][2 * s + 1];
          float d[4];
          mma_first(d, a[0], x0[0], x1[0]);
          mma(small[0][q], a[0], x0[2], x1[2]);
          if (PARTS > 2) mma(small[1][q], a[PARTS - 1], x0[0], x1[0]);
          if (PARTS > 1) mma(small[1][q], a[PARTS > 1], x0[1], x1[1]);
          mma(small[0][q], a[0], x0[1], x1[1]);
          if (PARTS > 1) mma(small[1][q], a[PARTS > 1], x0[0], x1[0]);
#pragma unroll
          for (int c = 0; c < 4; ++c) large[q][c] = i == 0 ? d[c] : large[q][c] + d[c];
        }
      }
#pragma unroll
      for (int q = 0; q < Q; ++q)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float sum = large[q][c] + (small[0][q][c] + small[1][q][c]);
          total[q][c] = FOLD ? fmaf(sum, scale[b][c / 2][set * GROUPS / SETS], total[q][c]) : total[q][c] + sum;
        }
    }
    float2* out = reinterpret_cast<float2*>(sums) + (slot * WARPS + warp) * 8 * COLUMNS + lane;
#if COMPENSATED
    float2* lost = reinterpret_cast<float2*>(losses) + (slot * WARPS + warp) * 8 * COLUMNS + lane;
#endif
#pragma unroll
    for (int i = 0; i < 2 * Q; ++i) {                          // column q, rows g and g + 8: i = 2 q + r
      float2 v = make_float2(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1]);
#if COMPENSATED
      float2 gone = make_float2(0.f, 0.f);
      if (add) {
        const float2 had = out[i * 32], missing = lost[i * 32];
        const float2 term = make_float2(__fsub_rn(v.x, missing.x), __fsub_rn(v.y, missing.y));
        v = make_float2(__fadd_rn(had.x, term.x), __fadd_rn(had.y, term.y));
        gone = make_float2(__fsub_rn(__fsub_rn(v.x, had.x), term.x), __fsub_rn(__fsub_rn(v.y, had.y), term.y));
        if (!(fabsf(v.x) < as_float(0x7f800000u))) gone.x = 0.f;
        if (!(fabsf(v.y) < as_float(0x7f800000u))) gone.y = 0.f;
      }
      lost[i * 32] = gone;
#else
      if (add) {
        const float2 had = out[i * 32];
        v.x += had.x; v.y += had.y;
      }
#endif
      out[i * 32] = v;
    }
  };
  // The weight that a product with Inf or NaN needs, by its place.
  auto weight_at = [&](int n, int k) {
    const long long first_of_four = ((long long)(n / 4) * chunks + k / 128) * 4;
    const int rest = k % 128;
    const unsigned byte = codes[(first_of_four + (n % 4 ^ (k / 128 & 1))) * 64 + rest % 8 / 2 * 16 + rest / 8];
    float w = book[rest % 2 ? byte >> 4 : byte & 15];
#if SPAN
    return ROUND(w * scales[((long long)(n / SPAN) * chunks + k / 128) * 128 + rest]);
#else
    const long long group = (first_of_four + n % 4) * GROUPS + rest * GROUPS / 128;
    if (AFFINE) w = ROUND(w - points[group]);
    return ROUND(w * scales[group]);
#endif
  };
  if (tid < COLUMNS) special[tid] = 0;
#if !IN_PARTS
  const float entry = load_entry(book, lane);
#endif
  bool ready = false;
  for (int first = blockIdx.x; first < tiles; first += SLOTS * grid) {
    const int count = min(SLOTS, (tiles - first + grid - 1) / grid);
    for (int start = 0; start < chunks; start += WARPS) {
      chunk = start + warp;
      load(0, first);
      if (count > 1) load(1, first + grid);
      if (!ready) {
#if IN_PARTS
        unsigned pair[3];                                      // THREADS / 256 threads share a pair of entries
        split(book[tid & 15], book[tid >> 4 & 15], pair);
        for (int i = tid >> 8; i < 24; i += THREADS / 256) {
          const unsigned v = pair[i >> 3], at = table + (i >> 3) * 32768 + (tid & 255) * 128 + ((i + lane) & 7) * 16;
          asm volatile("st.shared.v4.u32 [%0],{%1,%1,%1,%1};" ::"r"(at), "r"(v) : "memory");
        }
#else
        build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, entry, tid);
#endif
        __syncthreads();
        ready = true;
      }
      load_x();
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
    for (int o = tid; o < count * 8 * COLUMNS; o += THREADS) {
      const int i = o / (8 * COLUMNS), rest = o % (8 * COLUMNS), at = rest % 32, part = rest / 32;
      float2 v[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        v[w] = reinterpret_cast<float2*>(sums)[(i * WARPS + w) * 8 * COLUMNS + rest];
#if COMPENSATED
        const float2 gone = reinterpret_cast<float2*>(losses)[(i * WARPS + w) * 8 * COLUMNS + rest];
        v[w].x -= gone.x; v[w].y -= gone.y;
#endif
      }
#pragma unroll
      for (int step = WARPS / 2; step; step /= 2)
#pragma unroll
        for (int w = 0; w < step; ++w) { v[w].x += v[w + step].x; v[w].y += v[w + step].y; }
      const int n = (first + i * grid) * 16 + part % 2 * 8 + at / 4;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int m = part / 2 * 8 + at % 4 * 2 + e;
        if (n >= N || column0 + m >= M) continue;
        float sum = e ? v[0].y : v[0].x;
        if (special[m]) {
          sum = 0.f;
          for (int k = 0; k < chunks * 128; ++k) {
            const float xv = x[(column0 + m) * (chunks * 128ll) + k];
            if (!(fabsf(xv) < as_float(0x7f800000u))) sum += weight_at(n, k) * xv;
          }
        }
        y[(column0 + m) * (long long)N + n] = sum;
      }
    }
    if (first + SLOTS * grid < tiles) __syncthreads();
  }
"""


def product(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128] of float32 -> [M, N]; dtype: what the weight is rounded to."""
    m = len(x)
    columns = 8 if m <= 8 else 16
    grid = (min(-(-weight.rows // TILE), multiprocessors()), -(-m // columns))
    arrays = [x, weight.codes, weight.scales, weight.points, weight.book, weight.sizes]
    (y,) = program(weight, dtype, columns).launch(arrays, [(m, weight.rows)], grid)
    return y


def program(weight: DeviceWeight, dtype: str, columns: int) -> Program:
    """The program for a kind of weight and 8 or 16 rows of x a block."""
    warps = COLUMNS[columns]
    fold = bool(weight.fold and dtype == "float32" and not weight.span)
    in_parts = fold and not weight.affine
    # Codes less a zero point that is a small integer, and weights rounded to bfloat16, are one part; float16 is two.
    parts = 1 if dtype == "bfloat16" or (fold and weight.affine and not weight.float_points) else 3
    parts = 2 if dtype == "float16" else parts
    compensated = -(-weight.chunks // warps) > PLAIN_PASSES
    table = (96 + 32) * 1024  # parts or pairs, and what aligns them
    tile_bytes = warps * TILE * columns * 4 * (1 + compensated)
    slots = (MAX_SHARED - table - 256) // tile_bytes
    constants = {
        "AFFINE": int(weight.affine), "SPAN": weight.span, "GROUPS": weight.groups, "COLUMNS": columns, "WARPS": warps,
        "FOLD": int(fold), "IN_PARTS": int(in_parts), "PARTS": parts, "COMPENSATED": int(compensated), "SLOTS": slots,
        "ROUNDING": ROUNDING[dtype],
    }  # fmt: skip
    return Program(
        "tile_float",
        (("x", "float32"), ("codes", "uint8"), ("scales", "float32"), ("points", "float32"), ("book", "float32"),
         ("sizes", "int32")),
        (("y", "float32"),),
        BODY,
        warps * 32,
        tuple(constants.items()),
        table + slots * tile_bytes,
        functions=HEADER,
    )  # fmt: skip
