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

#: Shared memory that a block may ask for on an H100, in bytes. Where less is to be had a kernel does not start, which
#: its probe finds, and the reference serves.
MAX_SHARED = 227 * 1024

CUDA_TYPE: Mapping[str, str] = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "uint8": "uint8_t", "uint32": "uint32_t",
    "int32": "int32_t", "int64": "int64_t",
}  # fmt: skip
#: How a half is spelled in PTX, and the bits of 1.0, -0.0 twice, and of the number to whose mantissa a code is or-ed.
_HALF = {
    "bfloat16": ("bf16", 0x3F803F80, 0x43004300, "-128.f"),
    "float16": ("f16", 0x3C003C00, 0x64006400, "-1024.f"),
}

HEADER = r"""
#if !defined(OLDER) && __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#endif
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
__device__ __forceinline__ void copy_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(unsigned from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
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
// COUNT values of 4 bytes, contiguous and aligned to their size up to 16 bytes.
template <int COUNT, typename T> __device__ __forceinline__ void load_all_shared(T (&to)[COUNT], unsigned from) {
  unsigned* out = reinterpret_cast<unsigned*>(to);
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const uint4 v = load_shared_16(from + 16 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[4 * i + j] = word_of(v, j);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i)
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(out[2 * i]), "=r"(out[2 * i + 1]) : "r"(from + 8 * i));
    if (COUNT % 2) asm volatile("ld.shared.u32 %0,[%1];" : "=r"(out[COUNT - 1]) : "r"(from + 4 * COUNT - 4));
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
// A ring of DEPTH stages of a warp, each of C bytes of codes and S of scales, filled ahead of their use. Loads to
// registers would not do: all of them share a scoreboard, and to wait for one tile is to wait for the next one too.
// On Hopper one lane asks for a stage and a barrier in shared memory counts its bytes; before, all lanes copy.
template <int DEPTH, int C, int S> struct Ring {
  static constexpr int STAGE = C + S, BYTES = DEPTH * STAGE + (DEPTH + 1) / 2 * 16;
  unsigned at;
  int filled = 0, used = 0;
  unsigned phase = 0;
#if HOPPER
  __device__ __forceinline__ bool elected() {  // one lane, in words that the compiler knows to be one
    unsigned one;
    asm volatile("{.reg .pred p; elect.sync _|p,0xffffffff; selp.u32 %0,1,0,p;}" : "=r"(one));
    return one;
  }
#endif
  __device__ __forceinline__ void start(unsigned to) {
    at = to;
#if HOPPER
    if (elected())
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)
        asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(at + DEPTH * STAGE + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
#endif
  }
  // Every lane calls it, after __syncwarp behind the last use of the stage.
  __device__ __forceinline__ void fill(const void* codes, int codes_bytes, const void* scales, int scales_bytes,
                                       int lane) {
    const unsigned to = at + filled * STAGE;
#if HOPPER
    if (elected()) {
      const unsigned barrier = at + DEPTH * STAGE + 8 * filled;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier),
                   "r"(codes_bytes + (S ? scales_bytes : 0)) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to),
                   "l"(codes), "r"(codes_bytes), "r"(barrier) : "memory");
      if (S)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                         to + C), "l"(scales), "r"(scales_bytes), "r"(barrier) : "memory");
    }
#else
    for (int i = lane * 16; i < codes_bytes; i += 512) copy_16(to + i, static_cast<const char*>(codes) + i);
    if (S)
      for (int i = lane * 16; i < scales_bytes; i += 512) copy_16(to + C + i, static_cast<const char*>(scales) + i);
#endif
    filled = filled == DEPTH - 1 ? 0 : filled + 1;
  }
  __device__ __forceinline__ void end_of_fill() {  // once before each wait, whether there was something to fill or not
#if !HOPPER
    end_of_copies();
#endif
  }
  // Wait for the next stage, with DEPTH - 1 behind it on their way; then move on. Returns its address.
  __device__ __forceinline__ unsigned next() {
    const unsigned stage = at + used * STAGE;
#if HOPPER
    unsigned done;
    do
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
                   : "=r"(done) : "r"(at + DEPTH * STAGE + 8 * used), "r"(phase) : "memory");
    while (!done);
#else
    wait_for_copies<DEPTH - 1>();
    __syncwarp();
#endif
    if (++used == DEPTH) { used = 0; phase ^= 1; }
    return stage;
  }
};
// Rings of BYTES for each warp: as many as fit lie in front of the table, the others behind it.
template <int BYTES> __device__ __forceinline__ unsigned ring_of(const void* dynamic, int warp) {
  const unsigned base = (unsigned)__cvta_generic_to_shared(dynamic), table = table_of(dynamic);
  const int in_front = (table - base) / BYTES;
  return warp < in_front ? base + warp * BYTES : table + 65536 + (warp - in_front) * BYTES;
}
template <int BYTES> __device__ __forceinline__ char* after_rings(char* dynamic, int warps) {
  const int in_front = (table_of(dynamic) - (unsigned)__cvta_generic_to_shared(dynamic)) / BYTES;
  return after_table(dynamic) + max(warps - in_front, 0) * BYTES;
}
// A lane's codebook entry, to be asked for before anything else: the table waits for it.
__device__ __forceinline__ float load_entry(const float* book, int lane) {
  float v;
  asm volatile("ld.global.nc.f32 %0,[%1];" : "=f"(v) : "l"(book + (lane & 15)));
  return v;
}
template <int COUNT> __device__ __forceinline__ void build_table(char* table, float entry, int tid) {
  constexpr int ALL = COUNT / 32, STEP = ALL < 16 ? ALL : 16, TEAMS = ALL / STEP;
  const int warp = tid >> 5;
  for (int low = warp % STEP; low < 16; low += STEP) {
    const float first = __shfl_sync(0xffffffffu, entry, low);
#pragma unroll
    for (int i = 0; i < 16 / TEAMS; ++i) {
      const int high = i * TEAMS + warp / STEP % TEAMS;
      reinterpret_cast<float2*>(table)[(high * 16 + low) * 32 + (tid & 31)] =
          make_float2(first, __shfl_sync(0xffffffffu, entry, high));
    }
  }
}
// The number of this warp, which the compiler then knows to be one for all lanes.
__device__ __forceinline__ int warp_of(int tid) { return __shfl_sync(0xffffffffu, tid >> 5, 0); }
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
__device__ __forceinline__ unsigned scaled(float2 f, float scale) { return pack_@HALF@(f.x * scale, f.y * scale); }
__device__ __forceinline__ unsigned scaled(float2 f, float2 scale) {
  return pack_@HALF@(f.x * scale.x, f.y * scale.y);
}
template <typename S> __device__ __forceinline__ unsigned weights(unsigned word, int j, S scale, unsigned bits) {
  return scaled(pair_at(word, j, bits), scale);
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


def shared_for_rings(warps: int, stages: int, stage: int, *, table: bool) -> int:
    """Bytes of shared memory of a ring a warp, and of the pair table: what aligns it holds rings, less what is left."""
    ring = stages * stage + (stages + 1) // 2 * 16
    return warps * ring + (64 * 1024 + max(64 * 1024 - warps * ring, ring + 1024) if table else 0)


@cache
def multiprocessors() -> int:
    """Blocks of a persistent grid: one for each multiprocessor of the GPU."""
    info = mx.device_info()
    for key in ("multiprocessor_count", "multi_processor_count", "sm_count"):
        if key in info:
            return int(info[key])
    return 132


@cache
def hopper() -> bool:
    """Whether the GPU has wgmma and the copy engine: compute capability 9.0."""
    return mx.device_info().get("compute_capability_major") == 9
