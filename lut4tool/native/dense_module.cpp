// The dense part of the module `_native`: checks what memory safety needs, releases the GIL and calls dense.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "dense.h"

namespace nb = nanobind;

namespace lut4tool {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tensor = nb::ndarray<const float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using TensorOut = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

// geometry: strides, dilations and padding before, two of each.
void conv(const Tensor &x, const Tensor &w, const std::optional<Vector> &bias, const std::vector<std::size_t> &geometry,
          std::size_t groups, const TensorOut &y, unsigned threads) {
    check(blas.sgemm != nullptr, "no BLAS was given");
    check(geometry.size() == 6 && groups > 0, "geometry is strides, dilations and padding of two axes");
    Convolution s{x.shape(0), groups, w.shape(1), w.shape(0) / groups, {}, {}, {}, {}, {}, {}};
    check(x.shape(1) == groups * s.depth && w.shape(0) == groups * s.kernels, "channels do not fit the groups");
    check(y.shape(0) == x.shape(0) && y.shape(1) == w.shape(0), "y does not fit");
    check(!bias || bias->size() == w.shape(0), "bias does not fit");
    for (std::size_t axis = 0; axis < 2; ++axis) {
        s.size[axis] = x.shape(2 + axis), s.kernel[axis] = w.shape(2 + axis), s.out[axis] = y.shape(2 + axis);
        s.stride[axis] = geometry[axis], s.dilation[axis] = geometry[2 + axis], s.before[axis] = geometry[4 + axis];
        check(s.stride[axis] > 0 && s.dilation[axis] > 0, "strides and dilations are positive");
        check(s.size[axis] <= INT_MAX && s.out[axis] <= INT_MAX && s.before[axis] <= INT_MAX, "an axis is too long");
    }
    check(x.size() > 0 && w.size() > 0 && y.size() > 0, "an empty tensor has no convolution");
    check(s.size[0] * s.size[1] <= INT_MAX && s.out[0] * s.out[1] <= INT_MAX, "a plane is too large");
    check(s.depth * s.kernel[0] * s.kernel[1] <= INT_MAX && s.kernels <= INT_MAX, "a kernel is too large");
    const float *input = x.data(), *weight = w.data(), *offset = bias ? bias->data() : nullptr;
    float *target = y.data();
    nb::gil_scoped_release release;
    convolve(blas, s, input, weight, offset, target, threads);
}

}  // namespace

void add_dense(nb::module_ &m) {
    m.def("use_blas", [](std::uintptr_t sgemm, std::uintptr_t sgemv) {
        blas = {reinterpret_cast<Sgemm>(sgemm), reinterpret_cast<Sgemv>(sgemv)};
    });
    m.def("matmul", &matmul, nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("out").noconvert(),
          nb::arg("threads"));
    m.def("conv", &conv, nb::arg("x").noconvert(), nb::arg("w").noconvert(), nb::arg("bias").noconvert().none(),
          nb::arg("geometry"), nb::arg("groups"), nb::arg("y").noconvert(), nb::arg("threads"));
}

}  // namespace lut4tool
