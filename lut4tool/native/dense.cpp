#include "dense.h"

#include <algorithm>
#include <cstddef>

#include "clones.h"
#include "threads.h"

namespace lut4tool {
namespace {

constexpr int ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112;
constexpr std::size_t SMALL = std::size_t(1) << 21;    // multiplications that are not worth a second thread: 50 us
constexpr std::size_t PIECES = 4;                      // pieces a thread: what a late thread delays is one of them
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

}  // namespace lut4tool
