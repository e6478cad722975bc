"""Rows of x times a weight in tiles: its codes are decoded into threadgroup memory and multiplied there.

Threadgroups of four simdgroups make BM x BN outputs by 8 x 8 matrix products. In float32 every product of 8 terms is
added to a compensated sum; halves have float accumulators. The weight is never written to device memory.
"""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.metal.source import built
from lut4tool.kernels.metal.weights import INPUTS, DeviceWeight

THREADS = 128
#: Terms of the sums that a tile holds at a time.
BK = 64

# `inner` is where the weight's lines run: along K, a line is a column of the product (n), and along N, a row (k).
# Tiles' rows are padded by 16 bytes so that neighbours lie in different banks.
SOURCE = """
constexpr uint PAD = 16 / sizeof(C);
constexpr uint LINES = ALONG_K ? BK : BN, LENGTH = ALONG_K ? BN : BK, PITCH = LENGTH + PAD;
constexpr uint CODES = LINES * LENGTH / THREADS, PER_LINE = LENGTH / CODES;
constexpr uint TM = BM / 16, TN = BN / 16;
typedef vec<C, 4> C4;
threadgroup C4 x_tile[BM * (BK + PAD) / 4];
threadgroup C4 w_tile[LINES * PITCH / 4];
threadgroup C* xs = (threadgroup C*)x_tile;
threadgroup C* ws = (threadgroup C*)w_tile;
threadgroup float2 pairs[AFFINE ? 1 : 256];

uint M = x_shape[0], K = x_shape[1], N = dims[0];
ulong pitch = dims[1];
uint t = thread_index_in_threadgroup;
uint lane = thread_index_in_simdgroup;
uint n0 = threadgroup_position_in_grid.x * BN;
uint m0 = threadgroup_position_in_grid.y * BM;
uint m_sub = simdgroup_index_in_threadgroup / 2 * (BM / 2);
uint n_sub = simdgroup_index_in_threadgroup % 2 * (BN / 2);

if (!AFFINE) {
  for (uint i = t; i < 256; i += THREADS)
    pairs[i] = float2(
        float(levels[HIGH_FIRST ? i / 16 : i % 16]), float(levels[HIGH_FIRST ? i % 16 : i / 16]));
}
PairTable table = {pairs};

simdgroup_matrix<float, 8, 8> sums[TM][TN];
float2 low[TM][TN];
UNROLL for (uint i = 0; i < TM; ++i) {
  UNROLL for (uint j = 0; j < TN; ++j) {
    sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    low[i][j] = float2(0.0f);
  }
}

for (uint k0 = 0; k0 < K; k0 += BK) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last tiles are used up, and `pairs` is there

  for (uint i = 4 * t; i < BM * BK; i += 4 * THREADS) {
    uint m = i / BK, k = i % BK;
    const device T* row = x + ulong(m0 + m) * K + k0 + k;
    uint count = m0 + m < M ? K - min(k0 + k, K) : 0;
    float4 four = float4(0.0f);
    if (FOURS) {
      if (count) four = four_of(row);
    } else {
      UNROLL for (uint j = 0; j < 4; ++j) four[j] = j < count ? float(row[j]) : 0.0f;
    }
    *(threadgroup C4*)(xs + m * (BK + PAD) + k) = C4(C(four.x), C(four.y), C(four.z), C(four.w));
  }

  uint line = t / PER_LINE, place = t % PER_LINE * CODES;
  uint outer = (ALONG_K ? k0 : n0) + line, inner = (ALONG_K ? n0 : k0) + place;
  uint outer_end = ALONG_K ? K : N, inner_end = ALONG_K ? N : K;
  bool live = outer < outer_end && inner < inner_end;
  ulong first = outer * pitch + inner;
  threadgroup C* to = ws + line * PITCH + place;
  uint4 chunk = uint4(0);
  if (ALIGNED && live) {
    if (CODES == 32) chunk = ((const device uint4*)packed)[first / 32];
    else chunk.xy = ((const device uint2*)packed)[first / 16];
  }
  float scale = 0.0f;
  float zero = 0.0f;
  UNROLL for (uint word = 0; word < CODES / 8; ++word) {
    if (ALIGNED) {
      if (live && (word == 0 || BLOCK % 32 != 0)) {
        uint block = block_of_word<BLOCK>(first / 8 + word);
        scale = float(scales[block]);
        zero = AFFINE ? float(levels[ONE_ZERO ? 0 : block]) : 0.0f;
      }
      C4 four = C4(C(0.0f));
      UNROLL for (uint byte = 0; byte < 4; ++byte) {
        uint codes = (chunk[word] >> (8 * byte)) & 255;
        float2 both = AFFINE ? float2(float(W(float(codes & 15) - zero)), float(W(float(codes >> 4) - zero)))
                             : pairs[AFFINE ? 0 : codes];
        four[byte % 2 * 2] = C(live ? float(W(both.x * scale)) : 0.0f);
        four[byte % 2 * 2 + 1] = C(live ? float(W(both.y * scale)) : 0.0f);
        if (byte % 2 == 1) *(threadgroup C4*)(to + 8 * word + 2 * byte - 2) = four;
      }
    } else {
      uint count = live ? min(8u, inner_end - min(inner + 8 * word, inner_end)) : 0;
      float weights[8];
      weights_from<W, AFFINE, HIGH_FIRST, ONE_ZERO, BLOCK>(
          first + 8 * word, count, packed, scales, levels, table, weights);
      UNROLL for (uint i = 0; i < 8; ++i) to[8 * word + i] = C(weights[i]);
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);

  uint depth = min(uint(BK), K - k0);
  for (uint k = 0; k < depth; k += 8) {
    simdgroup_matrix<C, 8, 8> a[TM];
    simdgroup_matrix<C, 8, 8> b[TN];
    UNROLL for (uint i = 0; i < TM; ++i)
      simdgroup_load(a[i], xs + (m_sub + 8 * i) * (BK + PAD) + k, BK + PAD);
    UNROLL for (uint j = 0; j < TN; ++j) {
      uint n = n_sub + 8 * j;
      if (ALONG_K) simdgroup_load(b[j], ws + k * PITCH + n, PITCH);
      else simdgroup_load(b[j], ws + n * PITCH + k, PITCH, ulong2(0), true);
    }
    UNROLL for (uint i = 0; i < TM; ++i) {
      UNROLL for (uint j = 0; j < TN; ++j) {
        if (EXACT) {
          simdgroup_matrix<float, 8, 8> part = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
          simdgroup_multiply_accumulate(part, a[i], b[j], part);
          add_exactly(elements_of(sums[i][j]), low[i][j], elements_of(part));
        } else {
          simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
        }
      }
    }
  }
}

// Lane l of a simdgroup holds two neighbours of one row of an 8 x 8 matrix (Apple's layout, as MLX's own GEMM has it).
uint row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
UNROLL for (uint i = 0; i < TM; ++i) {
  UNROLL for (uint j = 0; j < TN; ++j) {
    uint m = m0 + m_sub + 8 * i + row, n = n0 + n_sub + 8 * j + column;
    float2 sum = elements_of(sums[i][j]);
    if (m < M && n < N) y[ulong(m) * N + n] = T(total(sum.x, low[i][j].x));
    if (m < M && n + 1 < N) y[ulong(m) * N + n + 1] = T(total(sum.y, low[i][j].y));
  }
}
"""


def tile(x: mx.array, weight: DeviceWeight, multiply_in: mx.Dtype | None = None) -> mx.array:
    """Multiply x [M, K] by the weight's matrix [K, N] -> [M, N] of x's type.

    multiply_in: the type of the tiles, x's where it is None; another one rounds x and the weight once more.
    """
    M, N = x.shape[0], weight.N
    exact = x.dtype == mx.float32
    bm = 16 if M <= 16 else 32 if M <= 32 or exact else 64  # float32 tiles of 64 rows would not fit in 32 KB
    bn = 64 if multiply_in is None else 32
    (y,) = built("tile", ("x", *INPUTS), ("y",), SOURCE)(
        inputs=[x, *weight.inputs],
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
        grid=(-(-N // bn) * THREADS, -(-M // bm), 1),
        threadgroup=(THREADS, 1, 1),
        template=[
            ("T", x.dtype),
            ("C", multiply_in or x.dtype),
            *weight.template,
            ("ALONG_K", weight.along_k),
            ("FOURS", weight.K % 4 == 0),
            ("BM", bm),
            ("BN", bn),
            ("BK", BK),
            ("THREADS", THREADS),
            ("EXACT", exact),
        ],
    )
    return y
