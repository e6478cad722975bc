// Products of 8-bit integers with weights prepared once, and DynamicQuantizeLinear's rounding.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lut4tool {

// Bytes of a row of K elements, and rows of packed weights: K rounded up to a multiple of 64.
std::size_t packed_depth(std::size_t K);

// A matrix [K, N] of int8 less zero points, in panels of 16 columns: [N / 16, packed_depth(K) / 4, 16, 4], zero beyond K
// and N. zero, sums: of each column, [N]; a zero point is subtracted from the column's elements, the sum is of them as
// they are.
struct ByteMatrix {
    std::size_t K, N;
    const std::int8_t *panels;
    const std::int32_t *zero, *sums;
};

// Where a product goes, one of the two, [M, N]: integers that wrap; or floats, total * (step * factors[n]).
struct ByteResult {
    std::int32_t *integers;
    float *floats;
    const float *factors;
    float step;
};

// (a [M, K] - a_zero [M]) @ (b - zero); a is uint8 with rows of packed_depth(K) bytes, zero beyond K.
// Columns [16 * first, 16 * last) of the result, on this thread.
void multiply_bytes(const std::uint8_t *a, const std::int32_t *a_zero, std::size_t M, const ByteMatrix &b,
                    std::size_t first, std::size_t last, const ByteResult &out);

// The same for all columns, by several threads where that pays.
void multiply_bytes(const std::uint8_t *a, const std::int32_t *a_zero, std::size_t M, const ByteMatrix &b,
                    const ByteResult &out, unsigned threads);

// "avx512 amx", "avx512 vnni", "avx2" or "portable": what multiplies bytes here; the second is false where this machine lacks it.
const char *byte_instruction_set();
bool use_byte_instruction_set(const char *name);

// values = rint(x / scale) + zero between low and high, a byte each; NaN becomes 0.
void quantize(const float *x, std::size_t count, float scale, float zero, float low, float high, std::uint8_t *values);

// What ONNX's DynamicQuantizeLinear makes of x [count]: its scale and zero point; false where x has a NaN or Inf.
bool quantization(const float *x, std::size_t count, float &scale, std::uint8_t &zero);

}  // namespace lut4tool
