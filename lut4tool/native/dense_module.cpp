// The dense part of the module `_native`: checks what memory safety needs, releases the GIL and calls dense.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "curves.h"
#include "dense.h"
#include "recurrent.h"

namespace nb = nanobind;

namespace lut4tool {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tensor = nb::ndarray<const float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using TensorOut = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename Element>
using Rows = nb::ndarray<Element, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

void matmul_bytes(const Rows<const std::uint8_t> &a, const Rows<const std::int8_t> &b, const Integers &a_zero,
                  const Integers &b_zero, const Integers &b_sums, std::size_t K, const Rows<std::int32_t> &out,
                  unsigned threads) {
    const std::size_t M = a.shape(0), N = b.shape(0);
    check(a.shape(1) == packed_depth(K) && b.shape(1) == packed_depth(K), "rows must have packed_depth(K) bytes");
    check(a_zero.size() == M && b_zero.size() == N && b_sums.size() == N, "zero points and sums do not fit");
    check(out.shape(0) == M && out.shape(1) == N && M > 0 && N > 0, "out does not fit");
    const std::uint8_t *left = a.data();
    const std::int8_t *right = b.data();
    const std::int32_t *points = a_zero.data(), *offsets = b_zero.data(), *sums = b_sums.data();
    std::int32_t *target = out.data();
    nb::gil_scoped_release release;
    multiply_bytes(left, right, points, offsets, sums, M, N, K, target, threads);
}

using State = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Steps = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using StepsOut = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Sequence sequence(const Steps &x, const StepsOut &y, const State &h, const std::optional<Lengths> &lengths,
                  bool backward, std::size_t gates) {
    const std::size_t steps = x.shape(0), batch = x.shape(1), hidden = h.shape(1);
    check(blas.sgemm != nullptr, "no BLAS was given");
    check(hidden > 0 && batch > 0 && hidden <= INT_MAX / 4 && batch <= INT_MAX, "the state's shape is not served");
    check(x.shape(2) == gates * hidden && h.shape(0) == batch, "x and h do not fit");
    check(y.shape(0) == steps && y.shape(1) == batch && y.shape(2) == hidden, "y does not fit");
    check(!lengths || lengths->size() == batch, "lengths do not fit");
    return {steps, batch, hidden, x.data(), y.data(), h.data(), nullptr, lengths ? lengths->data() : nullptr, backward};
}

void lstm(const Steps &x, const Matrix &r, const StepsOut &y, const State &h, const State &c,
          const std::optional<Lengths> &lengths, bool backward, unsigned threads) {
    Sequence s = sequence(x, y, h, lengths, backward, 4);
    check(c.shape(0) == s.batch && c.shape(1) == s.hidden, "c does not fit");
    check(r.shape(0) == 4 * s.hidden && r.shape(1) == s.hidden && r.stride(1) == 1 && r.stride(0) == std::int64_t(s.hidden),
          "r must be [4 * H, H]");
    s.c = c.data();
    const Recurrent weights{r.data(), nullptr, nullptr, nullptr, nullptr};
    nb::gil_scoped_release release;
    run_lstm(blas, s, weights, threads);
}

void lstm_bytes(const Steps &x, const Rows<const std::int8_t> &r, const Integers &zero, const Integers &sums,
                const Vector &factors, const StepsOut &y, const State &h, const State &c,
                const std::optional<Lengths> &lengths, bool backward, unsigned threads) {
    Sequence s = sequence(x, y, h, lengths, backward, 4);
    check(c.shape(0) == s.batch && c.shape(1) == s.hidden, "c does not fit");
    const std::size_t rows = 4 * s.hidden;
    check(r.shape(0) == rows && r.shape(1) == packed_depth(s.hidden), "r must be packed [4 * H, H]");
    check(zero.size() == rows && sums.size() == rows && factors.size() == rows, "what a row of r has does not fit");
    s.c = c.data();
    const Recurrent weights{nullptr, r.data(), zero.data(), sums.data(), factors.data()};
    nb::gil_scoped_release release;
    run_lstm(blas, s, weights, threads);
}

void gru(const Steps &x, const Matrix &r, const Vector &bias, bool reset_after, const StepsOut &y, const State &h,
         const std::optional<Lengths> &lengths, bool backward, unsigned threads) {
    const Sequence s = sequence(x, y, h, lengths, backward, 3);
    check(r.shape(0) == 3 * s.hidden && r.shape(1) == s.hidden && r.stride(1) == 1 && r.stride(0) == std::int64_t(s.hidden),
          "r must be [3 * H, H]");
    check(bias.size() == s.hidden, "bias does not fit");
    const float *weights = r.data(), *offset = bias.data();
    nb::gil_scoped_release release;
    run_gru(blas, s, weights, offset, reset_after, threads);
}

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scale = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool quantize_bytes(const Vector &x, const Bytes &values, const Scale &scale, const Bytes &zero) {
    check(values.size() == x.size() && scale.size() == 1 && zero.size() == 1, "the results do not fit");
    const float *input = x.data();
    std::uint8_t *steps = values.data();
    float &factor = *scale.data();
    std::uint8_t &point = *zero.data();
    nb::gil_scoped_release release;
    return quantize(input, x.size(), steps, factor, point);
}

void quantize_linear(const Vector &x, float scale, float zero, float low, float high, const Bytes &values) {
    check(values.size() == x.size(), "the result does not fit");
    const float *input = x.data();
    std::uint8_t *steps = values.data();
    nb::gil_scoped_release release;
    quantize(input, x.size(), scale, zero, low, high, steps);
}

void curve(const std::string &name, const Vector &x, const Scale &out, unsigned threads) {
    check(out.size() == x.size(), "the result does not fit");
    check(name == "sigmoid" || name == "tanh", "there is no such curve");
    const float *input = x.data();
    float *target = out.data();
    nb::gil_scoped_release release;
    map_curve(name == "sigmoid" ? Curve::sigmoid : Curve::tanh, input, x.size(), target, threads);
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
    m.def("lstm", &lstm, nb::arg("x").noconvert(), nb::arg("r").noconvert(), nb::arg("y").noconvert(),
          nb::arg("h").noconvert(), nb::arg("c").noconvert(), nb::arg("lengths").noconvert().none(), nb::arg("backward"),
          nb::arg("threads"));
    m.def("lstm_bytes", &lstm_bytes, nb::arg("x").noconvert(), nb::arg("r").noconvert(), nb::arg("zero").noconvert(),
          nb::arg("sums").noconvert(), nb::arg("factors").noconvert(), nb::arg("y").noconvert(),
          nb::arg("h").noconvert(), nb::arg("c").noconvert(), nb::arg("lengths").noconvert().none(), nb::arg("backward"),
          nb::arg("threads"));
    m.def("gru", &gru, nb::arg("x").noconvert(), nb::arg("r").noconvert(), nb::arg("bias").noconvert(),
          nb::arg("reset_after"), nb::arg("y").noconvert(), nb::arg("h").noconvert(),
          nb::arg("lengths").noconvert().none(), nb::arg("backward"), nb::arg("threads"));
    m.def("quantize", &quantize_bytes, nb::arg("x").noconvert(), nb::arg("values").noconvert(),
          nb::arg("scale").noconvert(), nb::arg("zero").noconvert());
    m.def("quantize_linear", &quantize_linear, nb::arg("x").noconvert(), nb::arg("scale"), nb::arg("zero"),
          nb::arg("low"), nb::arg("high"), nb::arg("values").noconvert());
    m.def("curve", &curve, nb::arg("name"), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("threads"));
    m.def("packed_depth", &packed_depth);
    m.def("matmul_bytes", &matmul_bytes, nb::arg("a").noconvert(), nb::arg("b").noconvert(),
          nb::arg("a_zero").noconvert(), nb::arg("b_zero").noconvert(), nb::arg("b_sums").noconvert(), nb::arg("K"),
          nb::arg("out").noconvert(), nb::arg("threads"));
}

}  // namespace lut4tool
