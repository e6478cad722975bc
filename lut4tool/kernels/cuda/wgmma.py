"""Device functions of the tiles in halves: wgmma with operand A in registers and B in the 128-byte swizzle."""

from __future__ import annotations

PTX = {"bfloat16": "bf16", "float16": "f16"}

HEADER = r"""
namespace lut4tool {
__device__ __forceinline__ void copy_wanted(unsigned to, const void* from, bool wanted) {  // zeros where not wanted
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0,%1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void load_matrices(unsigned (&v)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
}
#if HOPPER
// K-major rows of 128 bytes in the 128-byte swizzle: 8 rows are 1024 bytes.
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void fence_operands() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void wgmma(float (&d)[COLUMNS / 2], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n@COLUMNS@k16.f32.@HALF@.@HALF@ {@D@},{%@A0@,%@A1@,%@A2@,%@A3@},%@B@,"
               "1,1,1,0;"
               : @OUT@
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
}  // namespace lut4tool
"""


def header(columns: int, dtype: str) -> str:
    """The device functions of tiles with that many rows of x."""
    count = columns // 2
    operands = {
        "@COLUMNS@": str(columns), "@HALF@": PTX[dtype],
        "@D@": ",".join(f"%{i}" for i in range(count)), "@B@": str(count + 4),
        "@OUT@": ", ".join(f'"+f"(d[{i}])' for i in range(count)),
    }  # fmt: skip
    operands |= {f"@A{i}@": str(count + i) for i in range(4)}
    text = HEADER
    for name, value in operands.items():
        text = text.replace(name, value)
    return text
