"""Tile in float16 and bfloat16 for many rows of x, on Hopper: x by the copy engine, weights decoded into registers.

Two blocks of a cluster make 128 outputs each of the same COLUMNS rows of x. A warp of each copies half of what x they
need to both; two warpgroups decode weights into fragments of operand A, as in tile_half.py, and multiply. Where that
leaves multiprocessors idle, PARTS such pairs share K, and add their sums through the shared memory of the cluster.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda import wgmma
from lut4tool.kernels.cuda.program import CUDA_TYPE, MAX_SHARED, Program, multiprocessors
from lut4tool.kernels.cuda.weights import DeviceWeight

ROWS, THREADS = 128, 384
#: Rows of x of a tile, and parts of K of a cluster.
COLUMNS, PARTS = (32, 64, 96, 128, 160, 192, 224, 256), (1, 2)
MOST_STAGES = 8
#: Bytes of shared memory in front of the stages: barriers, and where 8 warps turn their results.
SMALL = 9 * 1024

# x [M, K] -> [tiles of COLUMNS rows][K / 64][COLUMNS][64], zeros past M; 16 bytes at p of a row lie at p ^ row % 8.
ARRANGE = r"""
  const int M = x_shape[0], K = x_shape[1], steps = K / 64;
  const long long pieces = (long long)((M + COLUMNS - 1) / COLUMNS) * COLUMNS * steps * 8;
  for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < pieces; i += gridDim.x * (long long)THREADS) {
    const unsigned row = (unsigned)(i >> 3), r = row % COLUMNS, step = row / COLUMNS % steps;
    const unsigned m = row / COLUMNS / steps * COLUMNS + r;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (m < M) v = __ldg(reinterpret_cast<const uint4*>(x + (long long)m * K + step * 64) + ((i ^ r) & 7));
    reinterpret_cast<uint4*>(tiles)[i] = v;
  }
"""

HEADER = r"""
#if HOPPER
#undef __global__
#define __global__ \
  __attribute__((global)) __attribute__((launch_bounds(THREADS, 1))) __attribute__((cluster_dims(2 * PARTS, 1, 1)))
namespace lut4tool {
__device__ __forceinline__ unsigned rank_in_cluster() {
  unsigned v;
  asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(v));
  return v;
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ unsigned address_in(unsigned address, unsigned rank) {
  unsigned v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(v) : "r"(address), "r"(rank));
  return v;
}
__device__ __forceinline__ float load_cluster(unsigned from) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0,[%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void pass(int barrier, int threads) {  // to who meets there
  asm volatile("bar.arrive %0,%1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void start_barrier(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(barrier), "r"(count) : "memory");
}
// Of what is read alone: a release to the cluster would wait for all loads that are on their way.
__device__ __forceinline__ void arrive(unsigned barrier_in_cluster) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" ::"r"(barrier_in_cluster) : "memory");
}
__device__ __forceinline__ void wait_for(unsigned barrier, unsigned phase) {
  unsigned done;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
                 : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  while (!done);
}
// To the same place in the blocks of `mask`; the barrier there counts the bytes.
__device__ __forceinline__ void copy_to_all(unsigned to, const void* from, int bytes, unsigned barrier, int mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0],[%1],%2,[%3],%4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((short)mask) : "memory");
}
// Four 8 x 8 matrices of halves, each turned; lane 8 i + j gives where column j of matrix i goes.
__device__ __forceinline__ void store_turned(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
}  // namespace lut4tool
#endif
"""

BODY = r"""
#if HOPPER
  using namespace lut4tool;
  extern __shared__ uint4 dynamic[];
  const int M = x_shape[0], chunks = codes_shape[1], N = __ldg(sizes);
  const int tid = threadIdx.x, lane = tid & 31, warp = warp_of(tid), g = lane >> 2, t = lane & 3;
  const int rank = rank_in_cluster(), member = rank & 1, part = rank >> 1;
  const unsigned base = (unsigned)__cvta_generic_to_shared(dynamic), small = (base + 1023) & ~1023u;
  constexpr unsigned STAGE = COLUMNS * 128;               // 64 k of x
#if AFFINE
  const unsigned bits = 0, behind = small + SMALL;
#else
  const unsigned table = table_of(dynamic), bits = lane_bits(table, lane), behind = table + 65536;
#endif
  auto stage_at = [&](int stage) -> unsigned {            // IN_FRONT of them lie before the table
    return stage < IN_FRONT ? small + SMALL + stage * STAGE : behind + (stage - IN_FRONT) * STAGE;
  };
  auto filled = [&](int stage) -> unsigned { return small + stage * 8; };
  auto emptied = [&](int stage) -> unsigned { return small + 64 + stage * 8; };
  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i) {
      start_barrier(filled(i), 1);
      start_barrier(emptied(i), 16);                      // the warps that multiply, of both blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if !AFFINE
  const float entry = load_entry(book, threadIdx.x);
#endif
  meet_cluster();
  const int column_tiles = (M + COLUMNS - 1) / COLUMNS, pairs = (N + 2 * ROWS - 1) / (2 * ROWS);
  const int units = pairs * column_tiles, clusters = gridDim.x / (2 * PARTS);
  int stage = 0;
  unsigned phase = 0;
  auto advance = [&]() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  };
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 8 && lane == 0)
      for (int unit = blockIdx.x / (2 * PARTS); unit < units; unit += clusters) {
        const long long first_row = (long long)(unit % column_tiles) * chunks * 2 * COLUMNS + member * COLUMNS / 2;
        for (int chunk = part; chunk < chunks; chunk += PARTS)
          for (int half = 0; half < 2; ++half) {
            wait_for(emptied(stage), phase ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(filled(stage)), "r"(STAGE)
                         : "memory");
            const Half* from = tiles + (first_row + (chunk * 2 + half) * COLUMNS) * 64;
            copy_to_all(stage_at(stage) + member * STAGE / 2, from, STAGE / 2, filled(stage), 3 << (rank & ~1));
            advance();
          }
      }
    __syncwarp();
    if (PARTS > 1) meet_cluster();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#if !AFFINE
    build_table<256>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, entry, tid);
    meet(1, 256);
#endif
    uint4 codes_of[2][2];                                 // loaded a chunk ahead
#if SPAN
    float2 scale[8];
#else
    Scale scale[2][2 * GROUPS];                           // of rows g and g + 8
#endif
    const int row_in_pair = member * ROWS + warp * 16;
    if (TURNS && warp >= 4) pass(2, 256);                 // the other warpgroup is first
    for (int unit = blockIdx.x / (2 * PARTS); unit < units; unit += clusters) {
      const int row0 = unit / column_tiles * (2 * ROWS) + row_in_pair;
      const int tile = min(row0 / 16, codes_shape[0] - 1);
      auto load = [&](int b, int chunk) __attribute__((always_inline)) {
        const long long piece = ((long long)tile * chunks + chunk) * 16 + g;
#pragma unroll
        for (int r = 0; r < 2; ++r) codes_of[b][r] = load_streamed(codes + piece * 64 + r * 512 + t * 16);
#if !SPAN
        load_all(scale[b], scales + (piece + g) * GROUPS);
#endif
      };
      float acc[COLUMNS / 2] = {};
      unsigned a[2][4][4];
      int chunk = part, last = -1;                        // last: the stage that is being multiplied
      auto release = [&]() __attribute__((always_inline)) {
        if (last >= 0 && lane < 2) arrive(address_in(emptied(last), (rank & ~1) | lane));
      };
      // A half chunk is decoded while the tensor cores multiply the one before it, and, with lookups, while it is the
      // turn of the other warpgroup to be multiplied.
      auto multiply = [&](int b) __attribute__((always_inline)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#if SPAN
          const float* along = scales + ((long long)(tile * 16 / SPAN) * chunks + chunk) * 128 + half * 64 + 2 * t;
#pragma unroll
          for (int i = 0; i < 8; ++i) scale[i] = *reinterpret_cast<const float2*>(along + i * 8);
#endif
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int s = half * 4 + i, j = s % 2 * 2;
            const unsigned w0 = word_of(codes_of[b][0], s / 2), w1 = word_of(codes_of[b][1], s / 2);
            unsigned (&to)[4] = a[half][i];
#if SPAN
            const float2 s0 = scale[2 * i], s1 = scale[2 * i + 1], s2 = s0, s3 = s1;
#else
            const Block s0 = block_of(scale[b][s * GROUPS / 8]), s1 = s0;
            const Block s2 = block_of(scale[b][GROUPS + s * GROUPS / 8]), s3 = s2;
#endif
            to[0] = weights(w0, j, s0, bits); to[1] = weights(w1, j, s2, bits);
            to[2] = weights(w0, j + 1, s1, bits); to[3] = weights(w1, j + 1, s3, bits);
          }
          // All loads share a scoreboard: these follow the first use of those before, which would wait for both.
          if (half == 0 && chunk + PARTS < chunks) load(b ^ 1, chunk + PARTS);
          wait_for(filled(stage), phase);
          if (TURNS) meet(2 + warp / 4, 256);
          fence_operands();
#pragma unroll
          for (int i = 0; i < 4; ++i) wgmma(acc, a[half][i], descriptor(stage_at(stage)) + i * 2);
          commit();
          if (TURNS) pass(2 + (warp / 4 ^ 1), 256);
          wait<1>();
          release();
          last = stage;
          advance();
        }
        chunk += PARTS;
      };
      if (chunk < chunks) load(0, chunk);
      while (chunk < chunks) {
        multiply(0);
        if (chunk >= chunks) break;
        multiply(1);
      }
      wait<0>();
      release();
      // This thread's sums: of rows g and g + 8 by columns 8 j + 2 t and the next, from column0 on.
      int column0 = unit % column_tiles * COLUMNS;
#if PARTS == 1
      float (&sums)[COLUMNS / 2] = acc;
#else
      // Each part of K adds some columns of all parts, through shared memory. There is one unit, its stages are used.
      float sums[COLUMNS / 2 / PARTS] = {};
      meet(1, 256);
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i)
        asm volatile("st.shared.f32 [%0],%1;" ::"r"(behind + (i * 256 + tid) * 4), "f"(acc[i]) : "memory");
      meet_cluster();
      column0 += part * (COLUMNS / PARTS);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const unsigned from = address_in(behind, p * 2 + member) + (part * (COLUMNS / 2 / PARTS) * 256 + tid) * 4;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2 / PARTS; ++i) sums[i] += load_cluster(from + i * 1024);
      }
#endif
#pragma unroll
      for (int i = 0; i < COLUMNS / PARTS / 16; ++i) {
        const unsigned turned = small + 1024 + warp * 1024 + i % 2 * 512;       // [16 columns][16 rows]
        const float* v = sums + 8 * i;
        store_turned(turned + (lane >> 4) * 256 + (lane & 7) * 32 + (lane >> 3 & 1) * 16, pack_@HALF@(v[0], v[1]),
                     pack_@HALF@(v[2], v[3]), pack_@HALF@(v[4], v[5]), pack_@HALF@(v[6], v[7]));
        __syncwarp();
        const uint4 piece = load_shared_16(turned + lane * 16);
        const int m = column0 + i * 16 + lane / 2, n = row0 + lane % 2 * 8;
        if (m < M) {
          Half* to = y + (long long)m * N + n;
          if (N % 8 == 0) {
            if (n < N) *reinterpret_cast<uint4*>(to) = piece;
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e)
              if (n + e < N) reinterpret_cast<unsigned short*>(to)[e] = word_of(piece, e / 2) >> e % 2 * 16;
          }
        }
      }
    }
  }
  meet_cluster();                                         // none leaves while another uses its shared memory
#endif
"""


def product(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128] of a half type -> [M, N]."""
    m, depth = x.shape
    columns, parts = shape(m, weight.rows, weight.chunks)
    tiles = -(-m // columns)
    arranger = arrange(dtype, columns)
    pieces = tiles * columns * depth // 8
    (arranged,) = arranger.launch([x], [(tiles, depth // 64, columns, 64)], (min(-(-pieces // 256), 1 << 16),))
    units = -(-weight.rows // (2 * ROWS)) * tiles
    clusters = units if parts > 1 else min(units, multiprocessors() // 2)
    arrays = [x, arranged, weight.codes, weight.scales, weight.book, weight.sizes]
    (y,) = program(dtype, weight, columns, parts).launch(arrays, [(m, weight.rows)], (clusters * 2 * parts,))
    return y


def shape(m: int, rows: int, chunks: int) -> tuple[int, int]:
    """Columns of a tile and parts of K that take the fewest cycles: those of chunks, and of the ends of a tile."""

    def cost(choice: tuple[int, int]) -> float:
        columns, parts = choice
        units = -(-rows // (2 * ROWS)) * -(-m // columns)
        waves = -(-units // (multiprocessors() // 2 if parts == 1 else int(multiprocessors() * 0.92) // (2 * parts)))
        return waves * (-(-chunks // parts) * (6 * columns + 900) + 5000 + 4000 * (parts > 1))

    choices = [(c, p) for c in COLUMNS for p in PARTS if p == 1 or (c <= 128 and c % 32 == 0 and p <= chunks)]
    return min(choices, key=cost)


def arrange(dtype: str, columns: int) -> Program:
    """The program that puts x into tiles."""
    return Program("arrange_x", (("x", dtype),), (("tiles", dtype),), ARRANGE, 256, (("COLUMNS", columns),))


def program(dtype: str, weight: DeviceWeight, columns: int, parts: int) -> Program:
    """The program for a kind of weight, rows of x of a tile and parts of K."""
    stage, sums = columns * 128, columns * ROWS * 4 if parts > 1 else 0
    if weight.affine:
        in_front, room = 0, MAX_SHARED - 1024 - SMALL
    else:  # a table of 64 KB at a multiple of that: 63 KB lie in front
        in_front, room = (63 * 1024 - SMALL) // stage, MAX_SHARED - 127 * 1024
    stages = min(MOST_STAGES, in_front + room // stage)
    shared = MAX_SHARED - room + max((stages - in_front) * stage, sums, 0)
    constants = {
        "AFFINE": int(weight.affine), "FLOAT_POINTS": int(weight.float_points), "SPAN": weight.span,
        "GROUPS": weight.groups, "COLUMNS": columns, "PARTS": parts, "STAGES": stages, "IN_FRONT": in_front,
        "SMALL": SMALL, "ROWS": ROWS, "TURNS": int(not weight.affine),
    }  # fmt: skip
    return Program(
        "wide_half",
        (("x", dtype), ("tiles", dtype), ("codes", "uint8"), ("scales", "uint32" if weight.affine else "float32"),
         ("book", "float32"), ("sizes", "int32")),
        (("y", dtype),),
        BODY.replace("Half", CUDA_TYPE[dtype]).replace("@HALF@", wgmma.PTX[dtype]),
        THREADS,
        tuple(constants.items()),
        shared,
        dtype,
        wgmma.header(columns, dtype) + HEADER,
    )  # fmt: skip
