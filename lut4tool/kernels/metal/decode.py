"""A weight written out in its own type, for products so large that a dense one is the faster."""

from __future__ import annotations

import mlx.core as mx

from lut4tool.kernels.metal.source import built
from lut4tool.kernels.metal.weights import INPUTS, DeviceWeight

THREADS, WORDS = 256, 4

# A thread decodes WORDS words of 8 codes, a threadgroup's apart, so that neighbours load and store side by side.
# Positions are flat: blocks do not know lines. Words of one block and whole words take the fast way.
SOURCE = """
threadgroup float2 pairs[AFFINE ? 1 : 256];
uint t = thread_index_in_threadgroup;
ulong total = ulong(extent[0]) * dims[1];
if (!AFFINE)
  pairs[t] = float2(float(levels[HIGH_FIRST ? t / 16 : t % 16]), float(levels[HIGH_FIRST ? t % 16 : t / 16]));
PairTable table = {pairs};
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint i = 0; i < WORDS; ++i) {
  ulong word = (ulong(threadgroup_position_in_grid.x) * WORDS + i) * THREADS + t;
  ulong first = 8 * word;
  uint count = uint(min(ulong(8), total - min(first, total)));
  float weights[8];
  if (BLOCK % 8 == 0 && count == 8) {
    uint block = block_of_word<BLOCK>(word);
    float scale = float(scales[block]);
    float zero = AFFINE ? float(levels[ONE_ZERO ? 0 : block]) : 0.0f;
    uint codes = packed[word];
    UNROLL for (uint byte = 0; byte < 4; ++byte) {
      uint two = (codes >> (8 * byte)) & 255;
      float2 both = AFFINE ? float2(float(W(float(two & 15) - zero)), float(W(float(two >> 4) - zero)))
                           : pairs[AFFINE ? 0 : two];
      weights[2 * byte] = both.x * scale;
      weights[2 * byte + 1] = both.y * scale;
    }
    UNROLL for (uint half_word = 0; half_word < 2; ++half_word) {
      vec<W, 4> four = vec<W, 4>(W(0.0f));
      UNROLL for (uint j = 0; j < 4; ++j) four[j] = W(weights[4 * half_word + j]);
      ((device vec<W, 4>*)w)[2 * word + half_word] = four;
    }
  } else {
    weights_from<W, AFFINE, HIGH_FIRST, ONE_ZERO, BLOCK>(first, count, packed, scales, levels, table, weights);
    for (uint j = 0; j < count; ++j) w[first + j] = W(weights[j]);
  }
}
"""


def decode(weight: DeviceWeight) -> mx.array:
    """Decode the weight's lines -> [lines, pitch] of its weight_dtype, the padding of an affine weight included."""
    words = -(-weight.lines * weight.pitch // 8)
    groups = -(-words // (THREADS * WORDS))
    facts = [fact for fact in weight.template if fact[0] != "ALIGNED"] + [("THREADS", THREADS), ("WORDS", WORDS)]
    (w,) = built("decode", (*INPUTS, "extent"), ("w",), SOURCE)(
        inputs=[*weight.inputs, mx.array([weight.lines], mx.uint32)],
        output_shapes=[(weight.lines, weight.pitch)],
        output_dtypes=[weight.weight_dtype],
        grid=(groups * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=facts,
    )
    return w
