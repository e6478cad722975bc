// Products with float32 weights that are laid out once, as floats or as the bytes that they were made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lut4tool {

// A weight [depth, N], N padded to panels of 16 columns: floats [N / 16, depth, 16]; or where there are none bytes in that
// order, which stand for (byte - zero) * factor, a zero and a factor a column.
struct PreparedWeight {
    const float *floats;
    const std::int8_t *bytes;
    const float *zeros, *factors;
};

// out [rows, N] = x [rows, depth] times panels plus bias [N padded], which may be null; by several threads where that pays.
// Bytes give what the floats would that they stand for, bit for bit.
void multiply_prepared(const float *x, std::size_t rows, const PreparedWeight &panels, std::size_t N, std::size_t depth,
                       const float *bias, float *out, unsigned threads);

}  // namespace lut4tool
