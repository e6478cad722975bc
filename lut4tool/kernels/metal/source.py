"""Metal kernels as MLX takes them: the text that all of them share, and each one built on its first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

#: In front of every kernel. Weights are float32 values rounded to W; `zero` counts for an affine weight alone.
HEADER = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

// Arrays that such a loop indexes stay in registers.
#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

// high + low += term; low takes what the rounding of high loses (Knuth's two-sum).
template <typename F>
inline void add_exactly(thread F& high, thread F& low, F term) {
  F sum = high + term;
  F part = sum - high;
  low += (high - (sum - part)) + (term - part);
  high = sum;
}

// The same, without a correction where none is wanted.
template <bool EXACT>
inline void add_to(thread float& high, thread float& low, float term) {
  if (EXACT) add_exactly(high, low, term);
  else high += term;
}

// A sum that has left float32 has no correction: low is NaN then.
inline float total(float high, float low) {
  return isfinite(high) ? high + low : high;
}

// Code `i` of the 8 in a word.
template <bool HIGH_FIRST>
inline uint code_of(uint word, uint i) {
  return (word >> (4 * (HIGH_FIRST ? i ^ 1 : i))) & 15;
}

// The two elements of a matrix that a lane holds.
inline thread float2& elements_of(thread simdgroup_matrix<float, 8, 8>& matrix) {
  return reinterpret_cast<thread float2&>(matrix.thread_elements());
}

// Four neighbours with one load, of any alignment.
inline float4 four_of(const device float* from) {
  return *(const device packed_float4*)from;
}

template <typename Half>
inline float4 four_of(const device Half* from) {
  ushort4 bits = *(const device packed_ushort4*)from;
  return float4(
      float(as_type<Half>(bits.x)), float(as_type<Half>(bits.y)), float(as_type<Half>(bits.z)),
      float(as_type<Half>(bits.w)));
}

// A codebook spread over a simdgroup: lane l holds entry l % 16. All lanes must look up together.
struct LaneTable {
  float entry;
  float operator()(uint code) const { return simd_shuffle(entry, ushort(code)); }
};

// A codebook as the pairs of entries of all bytes, in threadgroup memory: one lookup a byte.
struct PairTable {
  const threadgroup float2* pairs;
  float operator()(uint code) const { return pairs[17 * code].x; }
};

// A codebook entry times the scale of its block, or a step from the zero point times it; rounded as the weight is.
template <typename W, bool AFFINE, typename Table>
inline float weight_of(uint code, Table table, float zero, float scale) {
  float level = AFFINE ? float(W(float(code) - zero)) : table(code);
  return float(W(level * scale));
}

// The block that holds a word of 8 codes, where blocks hold whole words.
template <int BLOCK>
inline uint block_of_word(ulong word) {
  return uint(word) / (max(BLOCK, 8) / 8);
}

// The 8 weights of a word that lies in one block.
template <typename W, bool AFFINE, bool HIGH_FIRST, typename Table>
inline void weights_of_word(uint word, Table table, float zero, float scale, thread float* weights) {
  UNROLL for (uint i = 0; i < 8; ++i)
    weights[i] = weight_of<W, AFFINE>(code_of<HIGH_FIRST>(word, i), table, zero, scale);
}

// The weights of `count` elements, at most 8, from any position on; 0 behind them.
template <typename W, bool AFFINE, bool HIGH_FIRST, bool ONE_ZERO, int BLOCK, typename S, typename L, typename Table>
inline void weights_from(
    ulong first, uint count, const device uint* packed, const device S* scales, const device L* levels, Table table,
    thread float* weights) {
  ulong block = first / BLOCK;
  uint inside = uint(first % BLOCK);
  UNROLL for (uint i = 0; i < 8; ++i) {
    bool live = i < count;
    ulong element = first + i;
    uint code = live ? code_of<HIGH_FIRST>(packed[element / 8], uint(element % 8)) : 0;
    float zero = AFFINE && live ? float(levels[ONE_ZERO ? 0 : block]) : 0.0f;
    float scale = live ? float(scales[block]) : 0.0f;
    float weight = weight_of<W, AFFINE>(code, table, zero, scale);
    weights[i] = live ? weight : 0.0f;
    inside += 1;
    if (inside == BLOCK) {
      inside = 0;
      block += 1;
    }
  }
}
"""


@cache
def built(name: str, inputs: Sequence[str], outputs: Sequence[str], source: str) -> Any:
    """Build a kernel with mx.fast.metal_kernel, once in a process; Apple's compiler sees it when it is first run."""
    return mx.fast.metal_kernel(
        name=f"lut4tool_{name}", input_names=list(inputs), output_names=list(outputs), source=source, header=HEADER
    )
