// Dense products on a CPU: single-threaded BLAS calls on pieces that the pool's threads take in turn,
// so that a thread which the system does not run delays one piece, not the product.
#pragma once

#include <cstddef>

namespace lut4tool {

// Row-major cblas_sgemm with 32-bit sizes.
using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a,
                       int lda, const float *b, int ldb, float beta, float *c, int ldc);

// Row-major cblas_sgemv.
using Sgemv = void (*)(int order, int transpose, int m, int n, float alpha, const float *a, int lda, const float *x,
                       int incx, float beta, float *y, int incy);

struct Blas {
    Sgemm sgemm = nullptr;
    Sgemv sgemv = nullptr;
};

// A matrix whose rows (or, transposed, whose columns) are contiguous and `stride` apart.
struct Strided {
    const float *data;
    std::size_t stride;
    bool transposed;
};

// out [M, N] = a [M, K] @ b [K, N]; out's rows are contiguous.
void multiply_dense(const Blas &blas, const Strided &a, const Strided &b, std::size_t M, std::size_t N, std::size_t K,
                    float *out, unsigned threads);

}  // namespace lut4tool
