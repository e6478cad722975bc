// Conversions between float32 and the halves: IEEE round to nearest, ties to even; NaN stays NaN.
// All static: a file built for a newer instruction set must not lend its copies to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lut4tool {

enum class Float { f32, f16, bf16 };

// A run of float32, float16 or bfloat16 values; the address need not be aligned.
struct Floats {
    const void *data;
    Float type;
};

static inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
        const float magnitude = float(mantissa) * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return std::uint16_t(sign | 0x7e00);   // NaN
    if (magnitude >= 0x477ff000) return std::uint16_t(sign | 0x7c00);  // 65520 and above round to Inf
    if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24 in the low bits
        return std::uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
    }
    return std::uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

static inline std::uint16_t float_to_bfloat(float value) {
    const std::uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t(bits >> 16 | 0x40);
    return std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float load(const Floats &values, std::size_t index) {
    if (values.type == Float::f32) {
        std::uint32_t bits;
        std::memcpy(&bits, static_cast<const char *>(values.data) + 4 * index, 4);
        return float_of(bits);
    }
    std::uint16_t half;
    std::memcpy(&half, static_cast<const char *>(values.data) + 2 * index, 2);
    return values.type == Float::f16 ? half_to_float(half) : float_of(std::uint32_t(half) << 16);
}

static inline float rounded(float value, Float type) {
    if (type == Float::f16) return half_to_float(float_to_half(value));
    if (type == Float::bf16) return float_of(std::uint32_t(float_to_bfloat(value)) << 16);
    return value;
}

}  // namespace lut4tool
