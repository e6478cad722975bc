// Curves of float32 that vectorize: no table, no branch.
#pragma once

#include <cmath>
#include <cstddef>
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

// Under 1 an odd polynomial (a fit, 4e-11 off), above it 1 - e^(-x p(x)), p a fit of -log(1 - erf(x)) / x on 0..4.
inline float error_function(float x) {
    const float square = x * x, size = std::fabs(x), far = size < 4.0f ? size : 4.0f;
    float near = -9.67359392e-6f;
    near = near * square + 1.12682581e-4f;
    near = near * square - 8.48439755e-4f;
    near = near * square + 5.22105349e-3f;
    near = near * square - 2.68654376e-2f;
    near = near * square + 1.12837829e-1f;
    near = near * square - 3.76126379e-1f;
    near = near * square + 1.12837923f;
    float p = -1.0052351786e-7f;
    p = p * far + 2.5351787111e-6f;
    p = p * far - 2.8485549756e-5f;
    p = p * far + 1.8657195768e-4f;
    p = p * far - 7.6655049257e-4f;
    p = p * far + 1.8115379037e-3f;
    p = p * far - 2.4301272405e-4f;
    p = p * far - 1.9133016787e-2f;
    p = p * far + 1.0277807149e-1f;
    p = p * far + 6.3661875455e-1f;
    p = p * far + 1.1283792052f;
    const float rest = std::copysign(1.0f - exponential(-p * far), x);
    return square < 1.0f ? near * x : (x == x ? rest : x);
}

inline float gelu(float x) { return 0.5f * x * (1.0f + error_function(x * 0.70710678f)); }

enum class Curve { sigmoid, tanh, erf, gelu };

// out [count] = the curve of x, in pieces that the pool's threads take.
void map_curve(Curve curve, const float *x, std::size_t count, float *out, unsigned threads);

// Each row of x [rows, columns] to e^x over the sum of the row's, or to the logarithm of that.
void softmax(const float *x, std::size_t rows, std::size_t columns, bool logarithm, float *out, unsigned threads);

// Each row of x [rows, columns] less its mean, times 1 / sqrt(variance + epsilon), times scale plus bias [columns] (bias
// may be null); mean and inverse [rows] get those two.
void normalize(const float *x, std::size_t rows, std::size_t columns, const float *scale, const float *bias, float epsilon,
               float *out, float *mean, float *inverse, unsigned threads);

}  // namespace lut4tool
