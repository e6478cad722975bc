// The dense part of the module `_native`: checks what memory safety needs, releases the GIL and calls dense.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <climits>
#include <algorithm>
#include <stdexcept>

#include "dense.h"

namespace nb = nanobind;

namespace lut4tool {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Blas blas;

void check(bool holds, const char *message) {
    if (!holds) throw std::invalid_argument(message);
}

Strided strided(const Matrix &matrix) {
    const std::int64_t rows = std::int64_t(matrix.shape(0)), columns = std::int64_t(matrix.shape(1));
    check(rows <= INT_MAX && columns <= INT_MAX, "a matrix has at most 2^31 - 1 rows and columns");
    if ((matrix.stride(1) == 1 || columns == 1) && (matrix.stride(0) >= columns || rows == 1))
        return {matrix.data(), std::size_t(std::max(matrix.stride(0), columns)), false};
    if ((matrix.stride(0) == 1 || rows == 1) && (matrix.stride(1) >= rows || columns == 1))
        return {matrix.data(), std::size_t(std::max(matrix.stride(1), rows)), true};
    throw std::invalid_argument("a matrix must have contiguous rows or columns");
}

void matmul(const Matrix &a, const Matrix &b, const MatrixOut &out, unsigned threads) {
    check(blas.sgemm != nullptr, "no BLAS was given");
    check(a.shape(1) == b.shape(0) && out.shape(0) == a.shape(0) && out.shape(1) == b.shape(1), "shapes do not fit");
    check(a.shape(0) > 0 && a.shape(1) > 0 && b.shape(1) > 0, "an empty matrix has no product");
    const Strided left = strided(a), right = strided(b);
    check(left.stride <= INT_MAX && right.stride <= INT_MAX, "rows are at most 2^31 - 1 apart");
    float *target = out.data();
    const std::size_t M = a.shape(0), N = b.shape(1), K = a.shape(1);
    nb::gil_scoped_release release;
    multiply_dense(blas, left, right, M, N, K, target, threads);
}

}  // namespace

void add_dense(nb::module_ &m) {
    m.def("use_blas", [](std::uintptr_t sgemm, std::uintptr_t sgemv) {
        blas = {reinterpret_cast<Sgemm>(sgemm), reinterpret_cast<Sgemv>(sgemv)};
    });
    m.def("matmul", &matmul, nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("out").noconvert(),
          nb::arg("threads"));
}

}  // namespace lut4tool
