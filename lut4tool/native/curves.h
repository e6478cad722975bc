// Curves of float32 that vectorize: no table, no branch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lut4tool {

// e^x within 2 units in the last place: 2^n times Cephes' polynomial of the rest; 0 under
// -87, infinity over 88.
inline float exponential(float value) {
    const float x = value < -87.0f ? -87.0f : (value > 88.0f ? 88.0f : value);
    const float n = std::rint(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const std::int32_t bits = (std::int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return value < -87.0f ? 0.0f : (value > 88.0f ? HUGE_VALF : p * scale);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Near 0 Cephes' odd polynomial: a difference of exponentials would lose digits there.
inline float hyperbolic_tangent(float x) {
    const float square = x * x;
    float p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const float near = p * square * x + x;
    const float far = 1.0f - 2.0f / (1.0f + exponential(2.0f * x));
    return square < 0.390625f ? near : far;
}

enum class Curve { sigmoid, tanh };

// out [count] = the curve of x, in pieces that the pool's threads take.
void map_curve(Curve curve, const float *x, std::size_t count, float *out, unsigned threads);

}  // namespace lut4tool
