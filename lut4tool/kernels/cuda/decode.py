"""Decode of a whole weight to a dense [N, K]: what large products multiply by, written once and read once."""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.cuda.program import CUDA_TYPE, Program, multiprocessors
from lut4tool.kernels.cuda.weights import DeviceWeight

THREADS = 1024

# A thread decodes 8 consecutive k of each quarter of a chunk: byte q of word b of the 4 pieces, so that 4 threads
# write 64 bytes together.
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
  const int tid = threadIdx.x, N = __ldg(sizes), K = __ldg(sizes + 1);
  const long long chunks = codes_shape[1], pieces = N * chunks * 4;
  const unsigned bits = lane_bits(table_of(dynamic), tid & 31);
  build_table<THREADS>(after_table(reinterpret_cast<char*>(dynamic)) - 65536, entry, tid);
  __syncthreads();
  for (long long i = blockIdx.x * (long long)THREADS + tid; i < pieces; i += (long long)gridDim.x * THREADS) {
    const unsigned at = (unsigned)(i >> 2), n = at / (unsigned)chunks, c = at % (unsigned)chunks;  // N * K < 2^39
    const int q = i & 3;
    const long long tile = ((long long)(n / TILE) * chunks + c) * TILE;
    const long long piece = tile + (TILE == 16 ? n & 15 : (n & 3) ^ (c & 1));
    uint4 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) words[t] = __ldg(reinterpret_cast<const uint4*>(codes + piece * 64) + t);
    Out* out = dense + (long long)n * K + c * 128 + q * 8;
#pragma unroll
    for (int b = 0; b < 4; ++b) {                       // byte 4 b + q of piece t: k = 32 b + 8 q + 2 t and the next
#if !SPAN
      const long long row = tile + (TILE == 16 ? (n & 7) * 2 + (n >> 3 & 1) : n & 3);  // where its scales lie
      const long long group = row * GROUPS + (b * 2 + q / 2) * GROUPS / 8;
#if INTERLEAVED
      const unsigned both = __ldg(scales + group);
      const float scale = HALF_BITS(both), base = HALF_BITS(both >> 16) + MAGIC;
#else
      const float scale = __ldg(scales + group), base = AFFINE ? -__ldg(points + group) : 0.f;
#endif
#endif
      float w[8];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        // Interleaved: four first codes, then four second ones in each word.
        const unsigned word = word_of(words[t], b) >> (INTERLEAVED ? 4 : 8) * q;
        float2 f = pair_at(INTERLEAVED ? word & 15 | word >> 12 & 0xf0 : word, 0, bits);
#if SPAN
        const float2 scale = *reinterpret_cast<const float2*>(
            scales + ((long long)(n / SPAN) * chunks + c) * 128 + b * 32 + q * 8 + 2 * t);
        w[2 * t] = f.x * scale.x; w[2 * t + 1] = f.y * scale.y;
#else
        if (AFFINE) { f.x = ROUND(f.x + base); f.y = ROUND(f.y + base); }
        w[2 * t] = f.x * scale; w[2 * t + 1] = f.y * scale;
#endif
      }
      if (K % 8 == 0) {
        if ((int)c * 128 + b * 32 + q * 8 < K) {
#if ROUNDING == 1
          reinterpret_cast<uint4*>(out)[4 * b] = make_uint4(pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3]),
                                                        pack_bf16(w[4], w[5]), pack_bf16(w[6], w[7]));
#elif ROUNDING == 2
          reinterpret_cast<uint4*>(out)[4 * b] = make_uint4(pack_f16(w[0], w[1]), pack_f16(w[2], w[3]),
                                                        pack_f16(w[4], w[5]), pack_f16(w[6], w[7]));
#else
          reinterpret_cast<float4*>(out)[8 * b] = make_float4(w[0], w[1], w[2], w[3]);
          reinterpret_cast<float4*>(out)[8 * b + 1] = make_float4(w[4], w[5], w[6], w[7]);
#endif
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if ((int)c * 128 + b * 32 + q * 8 + e < K) out[b * 32 + e] = (Out)w[e];
      }
    }
  }
"""


def dense(weight: DeviceWeight, dtype: str) -> mx.array:
    """Decode to [N, K] of `dtype`, the type that the weight is rounded to."""
    blocks = min(multiprocessors(), -(-weight.rows * weight.chunks * 4 // THREADS))
    arrays = [weight.codes, weight.scales, weight.points, weight.book, weight.sizes]
    (values,) = program(weight, dtype).launch(arrays, [(weight.rows, weight.depth)], (blocks,))
    return values


def program(weight: DeviceWeight, dtype: str) -> Program:
    """The program for a weight's layout and type."""
    rounding = {"float32": 0, "bfloat16": 1, "float16": 2}[dtype]
    interleaved = weight.affine and weight.scales.dtype == mx.uint32
    kind = "uint32" if interleaved else "float32"
    magic = 0 if weight.float_points else {"float32": 0, "bfloat16": 128, "float16": 1024}[dtype]
    constants = {
        "TILE": weight.tile, "AFFINE": int(weight.affine),
        "INTERLEAVED": int(interleaved), "SPAN": weight.span, "GROUPS": weight.groups, "ROUNDING": rounding,
        "MAGIC": magic,
    }  # fmt: skip
    half_bits = ("as_float((b) << 16)", "__half2float(__ushort_as_half((unsigned short)(b)))")[rounding == 2]
    return Program(
        "decode",
        (("codes", "uint8"), ("scales", kind), ("points", kind), ("book", "float32"), ("sizes", "int32")),
        (("dense", dtype),),
        BODY.replace("Out", CUDA_TYPE[dtype]),
        THREADS,
        tuple(constants.items()),
        128 * 1024,
        functions=f"#define HALF_BITS(b) {half_bits}\n",
    )
