"""Any shape, block and layout, from the producer's own bytes: correct, for what the arranged kernels do not hold.

A warp makes one output of 4 rows of x; each lane sums every 32nd k with Kahan's correction.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels.cuda.program import CUDA_TYPE, Program
from lut4tool.kernels.transfer import copied, copied_floats

ROWS, THREADS = 4, 256

# facts: N, K, steps of the flat index along n and k, block size, high nibble first.
BODY = r"""
  using namespace lut4tool;
#if ROUNDING == 1
#define ROUND(v) round_bf16(v)
#elif ROUNDING == 2
#define ROUND(v) round_f16(v)
#else
#define ROUND(v) (v)
#endif
  const long long N = facts[0], K = facts[1], row_step = facts[2], k_step = facts[3], size = facts[4], high = facts[5];
  const int M = x_shape[0], lane = threadIdx.x & 31;
  const long long groups = (M + ROWS - 1) / ROWS, tasks = N * groups;
  for (long long task = blockIdx.x * (THREADS / 32ll) + (threadIdx.x >> 5); task < tasks;
       task += gridDim.x * (THREADS / 32ll)) {
    const long long n = task % N, m0 = task / N * ROWS;
    float total[ROWS] = {}, lost[ROWS] = {};
    for (long long k = lane; k < K; k += 32) {
      const long long flat = n * row_step + k * k_step, block = flat / size;
      const unsigned byte = packed[flat >> 1];
      float w = book[((flat & 1) != high ? byte >> 4 : byte) & 15];
      if (AFFINE) w = ROUND(w - points[POINTS ? block : 0]);
      w = ROUND(w * scales[block]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float v = m0 + r < M ? (float)x[(m0 + r) * K + k] : 0.f;
        const float term = __fsub_rn(__fmul_rn(w, v), lost[r]), next = __fadd_rn(total[r], term);
        const float error = __fsub_rn(__fsub_rn(next, total[r]), term);
        lost[r] = fabsf(next) < as_float(0x7f800000u) ? error : 0.f;
        total[r] = next;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sum = total[r] - lost[r];
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane == 0 && m0 + r < M) y[(m0 + r) * N + n] = (Out)sum;
    }
  }
"""

Weight = Lookup4Weight | QmmWeight
Leaves = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
_ON_DEVICE: WeakKeyDictionary[Weight, Leaves] = WeakKeyDictionary()


def product(x: mx.array, weight: Weight, dtype: str) -> mx.array:
    """Multiply x [M, K] -> [M, N], both of `dtype`."""
    if weight not in _ON_DEVICE:
        _ON_DEVICE[weight] = _leaves(weight)
    columns = weight.N if isinstance(weight, QmmWeight) else weight.shape[1]
    tasks = columns * -(-len(x) // ROWS)
    blocks = min(1 << 16, -(-tasks * 32 // THREADS))
    (y,) = program(weight, dtype).launch([x, *_ON_DEVICE[weight]], [(len(x), columns)], (blocks,))
    return y


def program(weight: Weight, dtype: str) -> Program:
    """The program for a kind of weight and the type of x."""
    affine = isinstance(weight, QmmWeight)
    constants = {
        "AFFINE": int(affine), "POINTS": int(isinstance(weight, QmmWeight) and weight.zero_points.size > 1),
        "ROUNDING": {"float32": 0, "bfloat16": 1, "float16": 2}[weight.weight_dtype], "ROWS": ROWS,
    }  # fmt: skip
    return Program(
        "general",
        (("x", dtype), ("packed", "uint8"), ("scales", "float32"), ("points", "float32"), ("book", "float32"),
         ("facts", "int64")),
        (("y", dtype),),
        BODY.replace("Out", CUDA_TYPE[dtype]),
        THREADS,
        tuple(constants.items()),
    )  # fmt: skip


def _leaves(weight: Weight) -> Leaves:
    # Two dimensions, as MLX has none over 2^31; the kernel reads by address.
    packed = copied(weight.packed.reshape(-1, math.gcd(weight.packed.size, 1 << 20)), mx.uint8)
    scales = copied_floats(weight.scales.reshape(-1))
    if isinstance(weight, QmmWeight):
        points = copied_floats(weight.zero_points.reshape(-1))
        book = mx.arange(16, dtype=mx.float32)
        facts = [weight.N, weight.K, weight.packed.shape[1] * weight.block_size, 1, weight.block_size, 0]
    else:
        depth, columns = weight.shape
        steps = (1, columns) if tuple(weight.perm) == (0, 1) else (depth, 1)
        points, book = scales, mx.array(weight.codebook.astype(np.float32))
        facts = [columns, depth, *steps, weight.block_size, int(weight.high_nibble_first)]
    return packed, scales, points, book, mx.array(facts, mx.int64)
