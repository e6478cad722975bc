#include "curves.h"

#include <algorithm>

#include "clones.h"
#include "threads.h"

namespace lut4tool {
namespace {

constexpr std::size_t PIECE = 1 << 15;  // elements that are worth a thread
constexpr std::size_t LANES = 16;

LUT4TOOL_CLONES void map_sigmoid(const float *x, std::size_t count, float *out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = sigmoid(x[i]);
}

LUT4TOOL_CLONES void map_tanh(const float *x, std::size_t count, float *out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = hyperbolic_tangent(x[i]);
}

LUT4TOOL_CLONES void map_erf(const float *x, std::size_t count, float *out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = error_function(x[i]);
}

LUT4TOOL_CLONES void map_gelu(const float *x, std::size_t count, float *out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = gelu(x[i]);
}

inline float sum_of(const float *lanes) {
    float sums[LANES];
    std::copy_n(lanes, LANES, sums);
    for (std::size_t half = LANES / 2; half > 0; half /= 2)
        for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}

LUT4TOOL_CLONES void softmax_row(const float *x, std::size_t count, bool logarithm, float *out) {
    float tops[LANES], lanes[LANES] = {};
    std::fill(tops, tops + LANES, x[0]);
    std::size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (std::size_t lane = 0; lane < LANES; ++lane) tops[lane] = x[i + lane] > tops[lane] ? x[i + lane] : tops[lane];
    for (; i < count; ++i) tops[0] = x[i] > tops[0] ? x[i] : tops[0];
    const float top = *std::max_element(tops, tops + LANES);
    for (std::size_t k = 0; k < count; ++k) out[k] = exponential(x[k] - top);
    for (i = 0; i + LANES <= count; i += LANES)
        for (std::size_t lane = 0; lane < LANES; ++lane) lanes[lane] += out[i + lane];
    for (; i < count; ++i) lanes[0] += out[i];
    const float sum = sum_of(lanes);
    if (logarithm) {
        const float log = std::log(sum);
        for (std::size_t k = 0; k < count; ++k) out[k] = (x[k] - top) - log;
    } else {
        for (std::size_t k = 0; k < count; ++k) out[k] /= sum;
    }
}

LUT4TOOL_CLONES void normalize_row(const float *x, std::size_t count, const float *scale, const float *bias,
                                   float epsilon, float *out, float &mean, float &inverse) {
    float lanes[LANES] = {}, squares[LANES] = {};
    std::size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (std::size_t lane = 0; lane < LANES; ++lane) lanes[lane] += x[i + lane];
    for (; i < count; ++i) lanes[0] += x[i];
    const float middle = mean = sum_of(lanes) / float(count);
    for (i = 0; i + LANES <= count; i += LANES) {
        for (std::size_t lane = 0; lane < LANES; ++lane) {
            const float apart = x[i + lane] - middle;
            squares[lane] += apart * apart;
        }
    }
    for (; i < count; ++i) squares[0] += (x[i] - middle) * (x[i] - middle);
    const float factor = inverse = 1.0f / std::sqrt(sum_of(squares) / float(count) + epsilon);
    if (bias) {
        for (std::size_t k = 0; k < count; ++k) out[k] = (x[k] - middle) * factor * scale[k] + bias[k];
    } else {
        for (std::size_t k = 0; k < count; ++k) out[k] = (x[k] - middle) * factor * scale[k];
    }
}

// Rows in pieces that are worth a thread.
template <typename Row>
void each_row(std::size_t rows, std::size_t columns, unsigned threads, const Row &row) {
    const std::size_t some = std::max<std::size_t>(1, PIECE / std::max<std::size_t>(columns, 1));
    parallel((rows + some - 1) / some, threads, [&](std::size_t index) {
        for (std::size_t r = index * some; r < std::min(rows, (index + 1) * some); ++r) row(r);
    });
}

}  // namespace

void map_curve(Curve curve, const float *x, std::size_t count, float *out, unsigned threads) {
    const auto map = curve == Curve::sigmoid ? map_sigmoid
                     : curve == Curve::tanh  ? map_tanh
                     : curve == Curve::erf   ? map_erf
                                             : map_gelu;
    parallel((count + PIECE - 1) / PIECE, threads, [&](std::size_t index) {
        map(x + index * PIECE, std::min(PIECE, count - index * PIECE), out + index * PIECE);
    });
}

void softmax(const float *x, std::size_t rows, std::size_t columns, bool logarithm, float *out, unsigned threads) {
    if (columns == 0) return;
    each_row(rows, columns, threads,
             [&](std::size_t r) { softmax_row(x + r * columns, columns, logarithm, out + r * columns); });
}

void normalize(const float *x, std::size_t rows, std::size_t columns, const float *scale, const float *bias, float epsilon,
               float *out, float *mean, float *inverse, unsigned threads) {
    each_row(rows, columns, threads, [&](std::size_t r) {
        normalize_row(x + r * columns, columns, scale, bias, epsilon, out + r * columns, mean[r], inverse[r]);
    });
}

}  // namespace lut4tool
