"""Tile in float16 and bfloat16 for more rows of x: weights decoded in registers, x in shared memory, tensor cores.

A warpgroup (128 threads) makes 64 outputs of 16 to 128 rows of x. Its weights are decoded straight into fragments of
operand A; x is operand B, copied to shared memory ahead of its use, in the 128-byte swizzle that wgmma reads. On GPUs
without wgmma the same fragments go to mma.sync. Warpgroups of a block share x, or share K and add at the end. The
weight is never written out.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda import wgmma, wide_half
from lut4tool.kernels.cuda.program import CUDA_TYPE, MAX_SHARED, Program, hopper, multiprocessors
from lut4tool.kernels.cuda.thresholds import MOST_ROWS
from lut4tool.kernels.cuda.weights import DeviceWeight

ROWS = 64
COLUMNS = (16, 32, 64, 128)

BODY = r"""
  using namespace lut4tool;
  extern __shared__ uint4 dynamic[];
#if !AFFINE
  const float entry = load_entry(book, threadIdx.x);
#endif
  const int M = x_shape[0], chunks = codes_shape[1], N = __ldg(sizes);
  const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int group = tid >> 7, part = group % PARTS, team = group / PARTS;   // part: of K; team: of outputs
  constexpr int TEAM = THREADS / PARTS;                                     // threads that share x
  const int member = team * 128 + (tid & 127);
  const int row0 = (blockIdx.x * (THREADS / 128 / PARTS) + team) * 64 + (tid >> 5 & 3) * 16 + g;
  const int column0 = blockIdx.y * COLUMNS;
  const unsigned base = (unsigned)__cvta_generic_to_shared(dynamic);
#if AFFINE
  const unsigned bits = 0, stages = (base + 1023) & ~1023u;
#else
  const unsigned table = table_of(dynamic), bits = lane_bits(table, lane), stages = table + 65536;
#endif
  constexpr unsigned STAGE = DEEP * COLUMNS * 256;      // bytes of x: for each chunk 2 halves, [COLUMNS][64] each
  // With a table the first of all stages lies in what aligns it.
  auto stage_at = [&](int stage) -> unsigned {
    const int index = part * STAGES + stage - !AFFINE;
    return index < 0 ? (base + 1023) & ~1023u : stages + index * STAGE;
  };
  // Parts take chunks in turn, so that all are done together.
  const Half* x0 = x + (long long)column0 * chunks * 128;
  const int most = M - 1 - column0;
  auto copy_x = [&](int chunk, int stage) __attribute__((always_inline)) {
    constexpr int PIECES = DEEP * COLUMNS * 16;
    const unsigned at = stage_at(stage);
#pragma unroll
    for (int c = 0; c < (PIECES + TEAM - 1) / TEAM; ++c) {
      const int i = member + c * TEAM, m = i >> 4 & (COLUMNS - 1), piece = i & 15, deep = i / (COLUMNS * 16);
      if (PIECES % TEAM && i >= PIECES) break;
      const unsigned half = at + deep * (COLUMNS * 256) + (piece >> 3) * (COLUMNS * 128);
      const unsigned to = half + m * 128 + ((piece ^ m) & 7) * 16;
      const int from = min(chunk + deep * PARTS, chunks - 1);
      copy_wanted(to, x0 + (min(m, most) * chunks + from) * 128 + piece * 8, m <= most);
    }
  };
  uint4 codes_of[3][2];                                 // loaded two chunks ahead
#if SPAN
  float2 scale[16];
#else
  Scale scale[3][2 * GROUPS];                           // of rows g and g + 8
#endif
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
  int chunk = part;
  if (chunk < chunks) load(0, chunk);
  for (int i = 0; i < STAGES - 2; ++i) {
    if (chunk + i * DEEP * PARTS < chunks) copy_x(chunk + i * DEEP * PARTS, i);
    end_of_copies();
  }
  if (chunk + PARTS < chunks) load(1, chunk + PARTS);
#if !AFFINE
  build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, entry, tid);
#endif
  __syncthreads();
  // Half a chunk is decoded while the tensor cores multiply the half before it. Where registers allow (EARLY), entries
  // of the half after it are looked up meanwhile.
  unsigned a[2][4][4];
#if EARLY
  float2 entries[4][4];
  auto look_up = [&](int b, int half) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < 16; ++i)                        // step i / 4; rows g and g + 8, then k + 8 of both
      entries[i / 4][i % 4] =
          pair_at(word_of(codes_of[b][i % 2], (half * 4 + i / 4) / 2), i / 4 % 2 * 2 + i % 4 / 2, bits);
  };
  if (chunk < chunks) look_up(0, 0);
#endif
  auto multiply = [&](int b, unsigned x_at) __attribute__((always_inline)) {
#if SPAN
    const float* along = scales + ((long long)(tile * 16 / SPAN) * chunks + chunk) * 128 + 2 * t;
#pragma unroll
    for (int i = 0; i < 16; ++i) scale[i] = *reinterpret_cast<const float2*>(along + i * 8);
#endif
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned from = x_at + half * (COLUMNS * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = half * 4 + i;
        unsigned (&to)[4] = a[half][i];
#if SPAN
        const float2 s0 = scale[2 * s], s1 = scale[2 * s + 1], s2 = s0, s3 = s1;
#else
        const Block s0 = block_of(scale[b][s * GROUPS / 8]), s1 = s0;
        const Block s2 = block_of(scale[b][GROUPS + s * GROUPS / 8]), s3 = s2;
#endif
#if EARLY
        to[0] = scaled(entries[i][0], s0); to[1] = scaled(entries[i][1], s2);
        to[2] = scaled(entries[i][2], s1); to[3] = scaled(entries[i][3], s3);
#else
        const unsigned w0 = word_of(codes_of[b][0], s / 2), w1 = word_of(codes_of[b][1], s / 2), j = s % 2 * 2;
        to[0] = weights(w0, j, s0, bits); to[1] = weights(w1, j, s2, bits);
        to[2] = weights(w0, j + 1, s1, bits); to[3] = weights(w1, j + 1, s3, bits);
#endif
      }
#if EARLY
      if (half == 0) look_up(b, 1);
      else if (chunk + PARTS < chunks) look_up((b + 1) % 3, 0);
#endif
#if HOPPER
      fence_operands();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma(acc, a[half][i], descriptor(from) + i * 2);
      commit();
      wait<1>();
#else
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
          unsigned v[4];
          const int m = n + (lane & 7) + (lane >> 4) * 8, piece = i * 2 + (lane >> 3 & 1);
          load_matrices(v, from + m * 128 + ((piece ^ m) & 7) * 16);
          float (&low)[4] = *reinterpret_cast<float (*)[4]>(acc + n / 2);
          float (&high)[4] = *reinterpret_cast<float (*)[4]>(acc + n / 2 + 4);
          mma(low, a[half][i][0], a[half][i][1], a[half][i][2], a[half][i][3], v[0], v[1]);
          mma(high, a[half][i][0], a[half][i][1], a[half][i][2], a[half][i][3], v[2], v[3]);
        }
#endif
    }
  };
  // At the first chunk of a stage: its copy has arrived for everyone. The stage that is copied to next was used two
  // stages ago: only half a chunk is still being multiplied. Without wgmma nothing is.
  int deep = 0, stage = 0;
  auto advance = [&](int b) __attribute__((always_inline)) {
    if (deep == 0) {
      wait_for_copies<STAGES - 3>();
#if HOPPER
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
      meet(part + 1, TEAM);
      const int later = chunk + (STAGES - 2) * DEEP * PARTS;
      if (later < chunks) copy_x(later, stage < 2 ? stage + STAGES - 2 : stage - 2);
      end_of_copies();
    }
    if (chunk + 2 * PARTS < chunks) load((b + 2) % 3, chunk + 2 * PARTS);
    multiply(b, stage_at(stage) + deep * (COLUMNS * 256));
    chunk += PARTS;
    if (++deep == DEEP) {
      deep = 0;
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
  };
  while (chunk < chunks) {
    advance(0);
    if (chunk >= chunks) break;
    advance(1);
    if (chunk >= chunks) break;
    advance(2);
  }
#if HOPPER
  wait<0>();
#endif
  if (PARTS > 1) {                                       // the other parts' sums, through shared memory
    __syncthreads();
    float* sums = reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + (stages - base));
    for (int p = 1; p < PARTS; ++p) {
      float* out = sums + team * 128 + (tid & 127);
      if (part == p)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) out[i * (THREADS / PARTS)] = acc[i];
      __syncthreads();
      if (part == 0)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) acc[i] += out[i * (THREADS / PARTS)];
      __syncthreads();
    }
  }
  if (part == 0) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      const int n = row0 + (i >> 1 & 1) * 8, m = column0 + i / 4 * 8 + 2 * t + (i & 1);
      if (n < N && m < M) y[(long long)m * N + n] = (Half)acc[i];
    }
  }
"""


def product(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128] of a half type -> [M, N], on Hopper by wide_half.py where M is large."""
    wide = hopper() and len(x) > MOST_ROWS["half"]["narrow_qmm" if weight.affine else "narrow"]
    return wide_half.product(x, weight, dtype) if wide else narrow(x, weight, dtype)


def narrow(x: mx.array, weight: DeviceWeight, dtype: str) -> mx.array:
    """Multiply x [M, chunks * 128] of a half type -> [M, N], by this kernel whatever M is."""
    m = len(x)
    columns = next((c for c in COLUMNS if c >= m), COLUMNS[-1])
    kernel, outputs = program(dtype, weight, columns, -(-m // columns))
    grid = (-(-weight.rows // outputs), -(-m // columns))
    (y,) = kernel.launch([x, weight.codes, weight.scales, weight.book, weight.sizes], [(m, weight.rows)], grid)
    return y


def program(dtype: str, weight: DeviceWeight, columns: int, column_tiles: int) -> tuple[Program, int]:
    """The program and the outputs of a block: the parts of K that leave the fewest waves, then the fewest parts."""
    warpgroups = 4 if columns < 64 else 2  # as many as the registers of their sums allow

    def cost(parts: int) -> tuple[float, int]:
        outputs = ROWS * warpgroups // parts
        waves = -(-(-(-weight.rows // outputs) * column_tiles) // multiprocessors())
        return waves / parts, parts

    def shared(parts: int, deep: int = 1, stages: int = 3) -> int:
        size = deep * columns * 256 * (stages * parts - (not weight.affine))  # one more lies in front of the table
        return size + (1024 if weight.affine else 127 * 1024)

    parts = min((p for p in (1, 2, 4) if p <= warpgroups and shared(p) <= MAX_SHARED and p <= weight.chunks), key=cost)
    # Chunks of a stage: fewer barriers where a chunk of x is small. Then as many stages as fit.
    deep = next(d for d in (4, 2, 1) if d == 1 or (d * columns <= 64 and shared(parts, d) <= MAX_SHARED))
    stages = next(s for s in (6, 5, 4, 3) if s == 3 or shared(parts, deep, s) <= MAX_SHARED)
    constants = {
        "AFFINE": int(weight.affine), "FLOAT_POINTS": int(weight.float_points),
        "SPAN": weight.span, "GROUPS": weight.groups, "COLUMNS": columns, "PARTS": parts, "DEEP": deep,
        "STAGES": stages, "EARLY": int(columns == 128 and not weight.affine),
    }  # fmt: skip
    kernel = Program(
        "tile_half",
        (("x", dtype), ("codes", "uint8"), ("scales", "uint32" if weight.affine else "float32"), ("book", "float32"),
         ("sizes", "int32")),
        (("y", dtype),),
        BODY.replace("Half", CUDA_TYPE[dtype]),
        warpgroups * 128,
        tuple(constants.items()),
        shared(parts, deep, stages),
        dtype,
        wgmma.header(columns, dtype),
    )  # fmt: skip
    return kernel, ROWS * warpgroups // parts
