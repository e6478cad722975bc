"""A CUDA kernel as text: its signature, the constants it is built with, and the device functions that all of them use.

MLX wraps the body in `__global__ void name(inputs, outputs)`, compiles it at the first evaluation and keeps the module
by its name alone, in memory and on disk: the name therefore ends in a hash of everything that the module depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

#: Shared memory that a block may ask for on the smallest GPU served with a full pair table (sm_80: 163 KB), in bytes.
MIN_SHARED, MAX_SHARED = 163 * 1024, 227 * 1024

CUDA_TYPE: Mapping[str, str] = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "uint8": "uint8_t", "uint32": "uint32_t",
    "int64": "int64_t",
}  # fmt: skip
#: How a half is spelled in PTX, and the bits of 1.0, -0.0 twice, and of the number to whose mantissa a code is or-ed.
_HALF = {
    "bfloat16": ("bf16", 0x3F803F80, 0x43004300, "-128.f"),
    "float16": ("f16", 0x3C003C00, 0x64006400, "-1024.f"),
}

HEADER = r"""
#undef __global__
#define __global__ __attribute__((global)) __attribute__((launch_bounds(THREADS, BLOCKS)))
namespace lut4tool {
__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
__device__ __forceinline__ uint4 load_streamed(const void* p) {  // read once: not kept in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ unsigned word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// COUNT values of 4 bytes in as few loads as their alignment allows.
template <int COUNT, typename T> __device__ __forceinline__ void load_all(T (&to)[COUNT], const T* from) {
  unsigned* out = reinterpret_cast<unsigned*>(to);
  if (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from) + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[(4 * i + j) % COUNT] = word_of(v, j);
    }
  } else if (COUNT == 2) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
    out[0] = v.x; out[COUNT - 1] = v.y;
  } else {
    to[0] = __ldg(from);
  }
}
// Sums over lanes: each exchange halves the values while it serves two of them, then the lanes that are left. Lanes of
// equal `index` end with the sum of value `index`.
template <int COUNT, int MASK, int SIZE>
__device__ __forceinline__ void add_lanes(float (&v)[SIZE], int lane, int& index) {
  if constexpr (COUNT > 1) {
    const bool upper = lane & MASK;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const float keep = upper ? v[i + COUNT / 2] : v[i], give = upper ? v[i] : v[i + COUNT / 2];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, MASK);
    }
    if (upper) index += COUNT / 2;
  } else {
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], MASK);
  }
  if constexpr (MASK > 1) add_lanes<(COUNT > 1 ? COUNT / 2 : 1), MASK / 2>(v, lane, index);
}
__device__ __forceinline__ float as_float(unsigned bits) { return __uint_as_float(bits); }
// Two floats rounded to halves, the first one in the low bits.
__device__ __forceinline__ unsigned pack_bf16(float first, float second) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(second), "f"(first));
  return d;
}
__device__ __forceinline__ unsigned pack_f16(float first, float second) {
  unsigned d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(second), "f"(first));
  return d;
}
__device__ __forceinline__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }
__device__ __forceinline__ float round_f16(float v) { return __half2float(__float2half_rn(v)); }

// The pair table: entry e (a byte of codes) is the float2 of its low and high nibble, once for each lane at e * 256 +
// lane * 8, so that a lookup never meets a bank conflict. It starts at a multiple of 64 KB of the shared window: the
// address of an entry is then one byte permutation of the codes and `lane_bits`.
__device__ __forceinline__ unsigned table_of(const void* dynamic) {
  return ((unsigned)__cvta_generic_to_shared(dynamic) + 65535u) & ~65535u;
}
__device__ __forceinline__ char* after_table(char* dynamic) {
  return dynamic + (table_of(dynamic) - (unsigned)__cvta_generic_to_shared(dynamic)) + 65536;
}
__device__ __forceinline__ unsigned lane_bits(unsigned table, int lane) { return lane * 8 | (table >> 16) << 8; }
__device__ __forceinline__ float2 pair_at(unsigned word, int byte, unsigned bits) {
  float2 f;
  asm volatile("ld.shared.v2.f32 {%0,%1},[%2];"
               : "=f"(f.x), "=f"(f.y) : "r"(prmt(word, bits, 0x6504u | byte << 4)));
  return f;
}
template <int COUNT> __device__ __forceinline__ void build_table(char* table, const float* book, int tid) {
  if (COUNT % 512 == 0) {  // a thread keeps its low nibble, and asks for all that it writes at once
    constexpr int STEP = COUNT / 32, TIMES = COUNT % 512 ? 1 : 256 / STEP;
    float high[TIMES];
    const float low = book[tid >> 5 & 15];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) high[i] = book[((tid >> 5) + i * STEP) >> 4];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) reinterpret_cast<float2*>(table)[tid + i * COUNT] = make_float2(low, high[i]);
  } else {
    for (int i = tid; i < 256 * 32; i += COUNT)
      reinterpret_cast<float2*>(table)[i] = make_float2(book[i >> 5 & 15], book[i >> 9]);
  }
}
}  // namespace lut4tool
"""

HALF_HEADER = r"""
namespace lut4tool {
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.@HALF@x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.@HALF@.@HALF@.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#if AFFINE
// scale | -(magic + zero point) << 16, or -zero point where it is no small integer
typedef unsigned Scale;
struct Block { unsigned scale, base; };
__device__ __forceinline__ Block block_of(Scale s) { return {prmt(s, s, 0x1010u), prmt(s, s, 0x3232u)}; }
// Weights of pair j: (code - zero point) * scale, each step rounded once to the half.
__device__ __forceinline__ unsigned weights(unsigned word, int j, const Block& b, unsigned) {
  unsigned v = (word >> 4 * j & 0x000f000fu) | @MAGIC@u;
#if FLOAT_POINTS
  v = fma2(v, @ONE@u, pack_@HALF@(@BASE@, @BASE@));
#endif
  return fma2(fma2(v, @ONE@u, b.base), b.scale, 0x80008000u);
}
#else
typedef float Scale;
typedef float Block;
__device__ __forceinline__ Block block_of(Scale s) { return s; }
// Weights of pair j: codebook entry * scale in float32, then rounded to the half.
__device__ __forceinline__ unsigned weights(unsigned word, int j, float scale, unsigned bits) {
  const float2 f = pair_at(word, j, bits);
  return pack_@HALF@(f.x * scale, f.y * scale);
}
__device__ __forceinline__ unsigned weights(unsigned word, int j, float2 scale, unsigned bits) {
  const float2 f = pair_at(word, j, bits);
  return pack_@HALF@(f.x * scale.x, f.y * scale.y);
}
#endif
}  // namespace lut4tool
"""


def half_header(dtype: str) -> str:
    """The device functions that decode to halves and multiply them on tensor cores."""
    ptx, one, magic, base = _HALF[dtype]
    text = HALF_HEADER.replace("@HALF@", ptx).replace("@ONE@", hex(one)).replace("@MAGIC@", hex(magic))
    return text.replace("@BASE@", base)


@dataclass(frozen=True)
class Program:
    """The text of a kernel: `constants` are macros in front of the header; inputs and outputs are (name, dtype).

    threads of a block, blocks that a multiprocessor must hold, shared memory of a block in bytes.
    """

    name: str
    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    body: str
    threads: int
    constants: tuple[tuple[str, int], ...] = ()
    shared: int = 0
    half: str = ""
    functions: str = ""
    blocks: int = 1

    @property
    def header(self) -> str:
        """Everything in front of the kernel: macros, then device functions."""
        macros = [*self.constants, ("THREADS", self.threads), ("BLOCKS", self.blocks)]
        defines = "".join(f"#define {name} {value}\n" for name, value in macros)
        return defines + HEADER + (half_header(self.half) if self.half else "") + self.functions

    @property
    def unique_name(self) -> str:
        """The kernel's name, different wherever anything that MLX compiles or configures is."""
        facts = repr((self.header, self.body, self.shared, tuple(self.inputs), tuple(self.outputs)))
        return f"lut4tool_{self.name}_{hashlib.sha256(facts.encode()).hexdigest()[:16]}"

    def launch(
        self, arrays: Sequence[mx.array], shapes: Sequence[Sequence[int]], grid: Sequence[int]
    ) -> list[mx.array]:
        """Run on `arrays`, with `grid` in blocks; outputs have `shapes`."""
        x, y, z = (*grid, 1, 1)[:3]
        done: list[mx.array] = _built(self)(
            inputs=list(arrays),
            output_shapes=[tuple(shape) for shape in shapes],
            output_dtypes=[getattr(mx, dtype) for _, dtype in self.outputs],
            grid=(x * self.threads, y, z),
            threadgroup=(self.threads, 1, 1),
        )
        return done


@cache
def _built(program: Program) -> Any:
    kernel: Any = mx.fast.cuda_kernel(
        name=program.unique_name,
        input_names=[name for name, _ in program.inputs],
        output_names=[name for name, _ in program.outputs],
        source=program.body,
        header=program.header,
        shared_memory=program.shared,
    )
    return kernel


@cache
def multiprocessors() -> int:
    """Blocks of a persistent grid: one for each multiprocessor of the GPU."""
    info = mx.device_info()
    for key in ("multiprocessor_count", "multi_processor_count", "sm_count"):
        if key in info:
            return int(info[key])
    return 132
