// Products y = x W in bfloat16, a 4-bit weight that stays packed and is rounded to bfloat16: on the matrix unit that some
// x86 machines have (AMX). Each output is a float32 sum of exact products, rounded once; product_bf16.cpp has its bound.
#pragma once

#include <cstddef>
#include <cstdint>

#include "product.h"

namespace lut4tool {

#if defined(LUT4TOOL_AMX_KERNELS)

// Whether the instruction set in use has them, and they serve this weight.
bool serves_bf16(const Packed4 &weight);

// x [M, depth], y [M, outputs], both dense, of bfloat16's bits -> true where y was made: false where a value may be so small
// that the unit takes it for zero, or a result is not finite though its row of x is. `weight` must be served.
bool multiply_bf16(const Packed4 &weight, const std::uint16_t *x, std::size_t M, std::uint16_t *y, unsigned threads);

#else

inline bool serves_bf16(const Packed4 &) { return false; }
inline bool multiply_bf16(const Packed4 &, const std::uint16_t *, std::size_t, std::uint16_t *, unsigned) { return false; }

#endif

}  // namespace lut4tool
