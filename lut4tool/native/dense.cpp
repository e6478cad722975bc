#include "dense.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "clones.h"
#include "threads.h"

namespace lut4tool {
namespace {

constexpr int ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112;
constexpr std::size_t SMALL = std::size_t(1) << 21;    // multiplications that are not worth a second thread: 50 us
constexpr std::size_t PIECES = 4;                      // pieces a thread: what a late thread delays is one of them
constexpr std::size_t CACHED = std::size_t(1) << 17;   // floats of an unrolled panel, half a megabyte
constexpr std::size_t FEW = 2;                         // rows that are multiplied one by one
constexpr std::size_t LINE = 16;                       // floats of a cache line: panels begin at multiples of it

std::size_t divided(std::size_t value, std::size_t by) { return (value + by - 1) / by; }

// The length of pieces that divide `length`, multiples of a line, at least `least`.
std::size_t piece(std::size_t length, std::size_t pieces, std::size_t least) {
    return std::max(divided(divided(length, pieces), LINE) * LINE, least);
}

const float *at(const Strided &matrix, std::size_t row, std::size_t column) {
    return matrix.data + (matrix.transposed ? column * matrix.stride + row : row * matrix.stride + column);
}

// The outputs of one axis that a kernel position reads inside the input: [first, last).
void inside(std::size_t out, std::size_t size, std::size_t stride, std::size_t offset, std::size_t before,
            std::size_t &first, std::size_t &last) {
    first = offset >= before ? 0 : divided(before - offset, stride);
    last = size + before > offset ? std::min(out, divided(size + before - offset, stride)) : 0;
    first = std::min(first, last);
}

LUT4TOOL_CLONES void add_scaled(float *y, const float *x, float factor, std::size_t count, std::size_t stride) {
    if (stride == 1) {
        for (std::size_t i = 0; i < count; ++i) y[i] += factor * x[i];
    } else if (stride == 2) {
        for (std::size_t i = 0; i < count; ++i) y[i] += factor * x[2 * i];
    } else {
        for (std::size_t i = 0; i < count; ++i) y[i] += factor * x[i * stride];
    }
}

LUT4TOOL_CLONES void add_constant(float *y, float value, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) y[i] += value;
}

// One channel of a depthwise convolution: x [size], w [kernel], y [out].
void convolve_channel(const Convolution &s, const float *x, const float *w, float bias, float *y) {
    std::fill(y, y + s.out[0] * s.out[1], bias);
    for (std::size_t i = 0; i < s.kernel[0]; ++i) {
        std::size_t top, bottom;
        inside(s.out[0], s.size[0], s.stride[0], i * s.dilation[0], s.before[0], top, bottom);
        for (std::size_t row = top; row < bottom; ++row) {
            const float *line = x + (row * s.stride[0] + i * s.dilation[0] - s.before[0]) * s.size[1];
            for (std::size_t j = 0; j < s.kernel[1]; ++j) {
                std::size_t left, right;
                inside(s.out[1], s.size[1], s.stride[1], j * s.dilation[1], s.before[1], left, right);
                const std::size_t start = left * s.stride[1] + j * s.dilation[1] - s.before[1];
                add_scaled(y + row * s.out[1] + left, line + start, w[i * s.kernel[1] + j], right - left, s.stride[1]);
            }
        }
    }
}

// Columns [first, last) of `depth` unrolled channels: panel [depth * kernel, last - first].
void unroll(const Convolution &s, const float *x, std::size_t depth, std::size_t first, std::size_t last, float *panel) {
    const std::size_t width = last - first, plane = s.size[0] * s.size[1];
    for (std::size_t d = 0; d < depth; ++d) {
        for (std::size_t i = 0; i < s.kernel[0]; ++i) {
            for (std::size_t j = 0; j < s.kernel[1]; ++j, panel += width) {
                std::size_t left, right;
                inside(s.out[1], s.size[1], s.stride[1], j * s.dilation[1], s.before[1], left, right);
                float *target = panel;
                for (std::size_t at = first; at < last;) {
                    const std::size_t row = at / s.out[1], from = at % s.out[1];
                    const std::size_t to = std::min(s.out[1], from + (last - at));
                    const std::size_t y = row * s.stride[0] + i * s.dilation[0] - s.before[0];  // wraps where outside
                    const std::size_t begin = std::clamp(left, from, to), end = std::clamp(right, begin, to);
                    if (y >= s.size[0] || begin == end) {
                        std::fill(target, target + (to - from), 0.0f);
                    } else {
                        const float *line = x + d * plane + y * s.size[1];
                        const std::size_t start = begin * s.stride[1] + j * s.dilation[1] - s.before[1];
                        std::fill(target, target + (begin - from), 0.0f);
                        if (s.stride[1] == 1) {
                            std::memcpy(target + (begin - from), line + start, (end - begin) * sizeof(float));
                        } else {
                            for (std::size_t k = 0; k < end - begin; ++k)
                                target[begin - from + k] = line[start + k * s.stride[1]];
                        }
                        std::fill(target + (end - from), target + (to - from), 0.0f);
                    }
                    target += to - from;
                    at += to - from;
                }
            }
        }
    }
}

// out [rows, N] = a [rows, K] @ b [N, K].T, for so few rows that a call of the BLAS would cost more.
LUT4TOOL_CLONES void multiply_rows(const float *a, std::size_t a_stride, const float *b, std::size_t b_stride,
                                   std::size_t rows, std::size_t N, std::size_t K, float *out) {
    constexpr std::size_t LANES = 16, COLUMNS = 4;
    for (std::size_t n = 0; n < N; n += COLUMNS) {
        const std::size_t columns = std::min(COLUMNS, N - n);
        for (std::size_t m = 0; m < rows; ++m) {
            const float *left = a + m * a_stride;
            float sums[COLUMNS][LANES] = {};
            std::size_t k = 0;
            if (columns == COLUMNS) {
                for (; k + LANES <= K; k += LANES)
                    for (std::size_t column = 0; column < COLUMNS; ++column)
                        for (std::size_t lane = 0; lane < LANES; ++lane)
                            sums[column][lane] += left[k + lane] * b[(n + column) * b_stride + k + lane];
            }
            for (std::size_t column = 0; column < columns; ++column) {
                float *lanes = sums[column];
                for (std::size_t rest = k; rest < K; ++rest) lanes[0] += left[rest] * b[(n + column) * b_stride + rest];
                for (std::size_t half = LANES / 2; half > 0; half /= 2)
                    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
                out[m * N + n + column] = lanes[0];
            }
        }
    }
}

}  // namespace

void multiply_dense(const Blas &blas, const Strided &a, const Strided &b, std::size_t M, std::size_t N, std::size_t K,
                    float *out, unsigned threads) {
    if (M <= FEW && N * K <= SMALL / 8 && b.transposed && !a.transposed)
        return multiply_rows(a.data, a.stride, b.data, b.stride, M, N, K, out);
    const std::size_t pieces = M * N * K <= SMALL ? 1 : PIECES * threads;
    const bool tall = M > N && M > FEW;
    const std::size_t length = piece(tall ? M : N, pieces, 4 * LINE);
    const auto multiply = [&](std::size_t index) {
        const std::size_t first = index * length, last = std::min(first + length, tall ? M : N);
        const std::size_t row = tall ? first : 0, column = tall ? 0 : first;
        if (M <= FEW) {  // sgemm would copy b first
            const int height = int(b.transposed ? last - first : K), width = int(b.transposed ? K : last - first);
            for (std::size_t m = 0; m < M; ++m)
                blas.sgemv(ROW_MAJOR, b.transposed ? PLAIN : TRANSPOSED, height, width, 1.0f, at(b, 0, first),
                           int(b.stride), at(a, m, 0), a.transposed ? int(a.stride) : 1, 0.0f, out + m * N + first, 1);
            return;
        }
        blas.sgemm(ROW_MAJOR, a.transposed ? TRANSPOSED : PLAIN, b.transposed ? TRANSPOSED : PLAIN,
              int(tall ? last - first : M), int(tall ? N : last - first), int(K), 1.0f, at(a, row, 0), int(a.stride),
              at(b, 0, column), int(b.stride), 0.0f, out + row * N + column, int(N));
    };
    parallel(divided(tall ? M : N, length), threads, multiply);
}

void convolve(const Blas &blas, const Convolution &s, const float *x, const float *w, const float *bias, float *y,
              unsigned threads) {
    const std::size_t plane = s.size[0] * s.size[1], points = s.out[0] * s.out[1];
    const std::size_t area = s.kernel[0] * s.kernel[1], depth = s.depth * area;
    const std::size_t work = s.batch * s.groups * s.kernels * points * depth;
    if (work <= SMALL) threads = 1;
    if (s.depth == 1 && s.kernels <= FEW) {  // a multiplication a point: no product would be worth its unrolled input
        const std::size_t channels = s.groups * s.kernels, all = s.batch * channels;
        const std::size_t some = divided(all, PIECES * threads);
        parallel(divided(all, some), threads, [&](std::size_t index) {
            for (std::size_t at = index * some; at < std::min(all, (index + 1) * some); ++at) {
                const std::size_t image = at / channels, channel = at % channels;
                convolve_channel(s, x + (image * s.groups + channel / s.kernels) * plane, w + channel * area,
                                 bias ? bias[channel] : 0.0f, y + at * points);
            }
        });
        return;
    }
    const bool whole = area == 1 && s.stride[0] * s.stride[1] == 1 && s.before[0] + s.before[1] == 0 && plane == points;
    const std::size_t parts = s.batch * s.groups, wanted = divided(PIECES * threads, parts);
    std::size_t width = piece(points, wanted, 4 * LINE);
    if (!whole) width = std::min(width, std::max(CACHED / depth / LINE * LINE, 4 * LINE));
    const std::size_t across = divided(points, width);
    // Kernels [row, row + count) of a part times the columns [first, last) of its unrolled input.
    const auto multiply = [&](std::size_t part, std::size_t row, std::size_t count, std::size_t first, std::size_t last,
                              const float *panel, std::size_t stride) {
        const std::size_t channel = part % s.groups * s.kernels + row;
        float *target = y + (part / s.groups * s.groups * s.kernels + channel) * points + first;
        blas.sgemm(ROW_MAJOR, PLAIN, PLAIN, int(count), int(last - first), int(depth), 1.0f, w + channel * depth,
                   int(depth), panel, int(stride), 0.0f, target, int(points));
        for (std::size_t k = 0; bias && k < count; ++k) add_constant(target + k * points, bias[channel + k], last - first);
    };
    if (s.groups == 1 && s.batch > 1 && points < 4 * LINE) {  // small images: several to a product
        const std::size_t some = std::min(divided(4 * LINE, points), divided(s.batch, threads));
        parallel(divided(s.batch, some), threads, [&](std::size_t index) {
            const std::size_t first = index * some, images = std::min(some, s.batch - first), columns = images * points;
            thread_local std::vector<float> buffer, product;
            buffer.resize(std::max(buffer.size(), depth * points + depth * columns));
            product.resize(std::max(product.size(), s.kernels * columns));
            float *one = buffer.data(), *panel = one + depth * points;
            for (std::size_t image = 0; image < images; ++image) {
                unroll(s, x + (first + image) * s.depth * plane, s.depth, 0, points, one);
                for (std::size_t k = 0; k < depth; ++k)
                    std::copy_n(one + k * points, points, panel + k * columns + image * points);
            }
            blas.sgemm(ROW_MAJOR, PLAIN, PLAIN, int(s.kernels), int(columns), int(depth), 1.0f, w, int(depth), panel,
                       int(columns), 0.0f, product.data(), int(columns));
            for (std::size_t image = 0; image < images; ++image) {
                for (std::size_t k = 0; k < s.kernels; ++k) {
                    float *target = y + ((first + image) * s.kernels + k) * points;
                    std::copy_n(product.data() + k * columns + image * points, points, target);
                    if (bias) add_constant(target, bias[k], points);
                }
            }
        });
        return;
    }
    if (parts * across < threads && s.kernels > 2 * LINE) {  // few points: unrolled once, then the kernels are divided
        std::vector<float> buffer(whole ? 0 : depth * points);
        const std::size_t some = divided(s.depth, 2 * threads), rows = piece(s.kernels, PIECES * threads, 2 * LINE);
        for (std::size_t part = 0; part < parts; ++part) {
            const float *input = x + part * s.depth * plane, *panel = whole ? input : buffer.data();
            if (!whole)
                parallel(divided(s.depth, some), threads, [&](std::size_t index) {
                    const std::size_t d = index * some;
                    unroll(s, input + d * plane, std::min(some, s.depth - d), 0, points, &buffer[d * area * points]);
                });
            parallel(divided(s.kernels, rows), threads, [&](std::size_t index) {
                const std::size_t row = index * rows;
                multiply(part, row, std::min(rows, s.kernels - row), 0, points, panel, points);
            });
        }
        return;
    }
    parallel(parts * across, threads, [&](std::size_t index) {
        const std::size_t part = index / across, first = index % across * width;
        const std::size_t last = std::min(points, first + width);
        const float *input = x + part * s.depth * plane;
        if (whole) return multiply(part, 0, s.kernels, first, last, input + first, plane);
        thread_local std::vector<float> buffer;
        buffer.resize(std::max(buffer.size(), depth * (last - first)));
        unroll(s, input, s.depth, first, last, buffer.data());
        multiply(part, 0, s.kernels, first, last, buffer.data(), last - first);
    });
}

}  // namespace lut4tool
