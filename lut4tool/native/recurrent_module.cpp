// The part of the module `_native` on bytes, cells and curves: checks what memory safety needs, releases the GIL and
// calls int8.h, recurrent.h and curves.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <climits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "curves.h"
#include "panels.h"
#include "product.h"
#include "recurrent.h"

namespace nb = nanobind;

namespace lut4tool {
namespace {

template <typename Element, int RANK>
using Array = nb::ndarray<Element, nb::ndim<RANK>, nb::c_contig, nb::device::cpu>;
using Vector = Array<const float, 1>;

void check(bool holds, const char *message) {
    if (!holds) throw std::invalid_argument(message);
}

// Bytes as ByteMatrix wants them, with the arrays that hold them.
struct Bytes {
    Array<const std::int8_t, 1> panels;
    Array<const std::int32_t, 1> zero, sums;
    ByteMatrix matrix;

    Bytes(Array<const std::int8_t, 1> values, Array<const std::int32_t, 1> points, Array<const std::int32_t, 1> totals,
          std::size_t K, std::size_t N)
        : panels(std::move(values)), zero(std::move(points)), sums(std::move(totals)),
          matrix{K, N, panels.data(), zero.data(), sums.data()} {
        check(K > 0 && N > 0 && K <= INT_MAX && N <= INT_MAX, "a matrix is not empty");
        check(panels.size() == (N + 15) / 16 * 16 * packed_depth(K), "panels must be packed");
        check(zero.size() == N && sums.size() == N, "zero points and sums do not fit");
    }

    void multiply(const Array<const std::uint8_t, 2> &a, const Array<const std::int32_t, 1> &a_zero,
                  const Array<std::int32_t, 2> &out, unsigned threads) const {
        check_rows(a, a_zero, out.shape(0), out.shape(1));
        const std::uint8_t *left = a.data();
        const std::int32_t *points = a_zero.data();
        const ByteResult result{out.data(), nullptr, nullptr, 0};
        const std::size_t M = a.shape(0);
        nb::gil_scoped_release release;
        multiply_bytes(left, points, M, matrix, result, threads);
    }

    void multiply_scaled(const Array<const std::uint8_t, 2> &a, const Array<const std::int32_t, 1> &a_zero,
                         const Vector &factors, float step, const Array<float, 2> &out, unsigned threads) const {
        check_rows(a, a_zero, out.shape(0), out.shape(1));
        check(factors.size() == matrix.N, "factors do not fit");
        const std::uint8_t *left = a.data();
        const std::int32_t *points = a_zero.data();
        const ByteResult result{nullptr, out.data(), factors.data(), step};
        const std::size_t M = a.shape(0);
        nb::gil_scoped_release release;
        multiply_bytes(left, points, M, matrix, result, threads);
    }

  private:
    void check_rows(const Array<const std::uint8_t, 2> &a, const Array<const std::int32_t, 1> &a_zero, std::size_t rows,
                    std::size_t columns) const {
        check(a.shape(1) == packed_depth(matrix.K), "rows must have packed_depth(K) bytes");
        check(a_zero.size() == a.shape(0) && rows == a.shape(0) && columns == matrix.N, "out does not fit");
    }
};

// A weight of a cell as floats, or as bytes with factors; what is not there has no size.
struct Weight {
    std::optional<Vector> floats, factors;
    const Bytes *bytes = nullptr;

    Panels panels(std::size_t depth, std::size_t gates, std::size_t blocks) const {
        const std::size_t columns = blocks * gates * UNITS;
        if (bytes) {
            check(bytes->matrix.N == columns && bytes->matrix.K == depth && factors && factors->size() == columns,
                  "bytes of a weight do not fit");
            return {depth, gates, nullptr, bytes->matrix, factors->data()};
        }
        check(floats && floats->size() == columns * depth, "floats of a weight do not fit");
        return {depth, gates, floats->data(), {}, nullptr};
    }
};

Weight weight(nb::handle given) {
    if (nb::isinstance<nb::tuple>(given)) {
        const nb::tuple both = nb::cast<nb::tuple>(given);
        return {std::nullopt, nb::cast<Vector>(both[1]), nb::cast<const Bytes *>(both[0])};
    }
    return {nb::cast<Vector>(given), std::nullopt, nullptr};
}

// One direction, prepared, with the objects that hold its weights.
struct Direction {
    nb::object held;
    Vector bias, late_bias;
    Cell cell;

    Direction(const std::string &kind, std::size_t hidden, std::size_t depth, nb::object input, nb::object state,
              nb::object late, Vector biases, Vector late_biases)
        : held(nb::make_tuple(input, state, late)), bias(std::move(biases)), late_bias(std::move(late_biases)) {
        check(kind == "lstm" || kind == "gru" || kind == "gru_reset_after", "there is no such cell");
        check(hidden > 0 && hidden <= INT_MAX / 64 && depth > 0 && depth <= INT_MAX, "the sizes are not served");
        cell.kind = kind == "lstm"  ? Cell::Kind::lstm
                    : kind == "gru" ? Cell::Kind::gru
                                    : Cell::Kind::gru_reset_after;
        cell.hidden = hidden;
        const bool two = cell.kind == Cell::Kind::gru;
        const std::size_t blocks = cell.blocks(), gates = kind == "lstm" ? 4 : 3;
        cell.input = weight(input).panels(depth, gates, blocks);
        cell.state = weight(state).panels(hidden, two ? 2 : gates, blocks);
        cell.late = two ? weight(late).panels(hidden, 1, blocks) : Panels{};
        check(bias.size() == blocks * gates * UNITS && (kind == "lstm" || late_bias.size() == blocks * UNITS),
              "biases do not fit");
        cell.bias = bias.data(), cell.late_bias = late_bias.data();
    }
};

// x [T, B, I]; y [T, D, B, H]; h and c [D, B, H], the state before and after; the second direction goes backward.
void run(const nb::list &directions, const Array<const float, 3> &x, const Array<float, 4> &y, const Array<float, 3> &h,
         const std::optional<Array<float, 3>> &c, const std::optional<Array<const std::int32_t, 1>> &lengths,
         bool backward, unsigned threads) {
    const std::size_t steps = x.shape(0), batch = x.shape(1), count = nb::len(directions), hidden = h.shape(2);
    check(count == h.shape(0) && (count == 1 || count == 2) && batch > 0, "directions do not fit");
    check(h.shape(1) == batch && y.shape(0) == steps && y.shape(1) == count && y.shape(2) == batch &&
              y.shape(3) == hidden, "x, y and h do not fit");
    check(!c || (c->shape(0) == count && c->shape(1) == batch && c->shape(2) == hidden), "c does not fit");
    check(!lengths || lengths->size() == batch, "lengths do not fit");
    std::vector<Cell> cells;
    std::vector<Sequence> sequences;
    for (std::size_t d = 0; d < count; ++d) {
        cells.push_back(nb::cast<const Direction &>(directions[d]).cell);
        const Cell &cell = cells.back();
        check(cell.hidden == hidden && cell.kind == cells[0].kind && cell.input.depth == x.shape(2), "a cell does not fit");
        check((cell.kind == Cell::Kind::lstm) == c.has_value(), "c is the state of an LSTM");
        sequences.push_back({steps, batch, x.data(), y.data() + d * batch * hidden, count * batch * hidden, hidden,
                             h.data() + d * batch * hidden, c ? c->data() + d * batch * hidden : nullptr,
                             lengths ? lengths->data() : nullptr, backward || d == 1});
    }
    nb::gil_scoped_release release;
    run_cells(cells.data(), sequences.data(), count, threads);
}

bool quantize_bytes(const Vector &x, const Array<std::uint8_t, 1> &values, const Array<float, 1> &scale,
                    const Array<std::uint8_t, 1> &zero) {
    check(values.size() == x.size() && scale.size() == 1 && zero.size() == 1, "the results do not fit");
    const float *input = x.data();
    std::uint8_t *steps = values.data(), &point = *zero.data();
    float &factor = *scale.data();
    const std::size_t count = x.size();
    nb::gil_scoped_release release;
    if (!quantization(input, count, factor, point)) return false;
    quantize(input, count, factor, point, 0, 255, steps);
    return true;
}

void quantize_linear(const Vector &x, float scale, float zero, float low, float high,
                     const Array<std::uint8_t, 1> &values) {
    check(values.size() == x.size(), "the result does not fit");
    const float *input = x.data();
    std::uint8_t *steps = values.data();
    const std::size_t count = x.size();
    nb::gil_scoped_release release;
    quantize(input, count, scale, zero, low, high, steps);
}

// out [M, N] = x [M, K] times panels [ceil(N / 16), K, 16] plus bias [ceil(N / 16) * 16].
void multiply_any(const Array<const float, 2> &x, PreparedWeight panels, std::size_t size, const std::optional<Vector> &bias,
                  const Array<float, 2> &out, unsigned threads) {
    const std::size_t rows = x.shape(0), depth = x.shape(1), N = out.shape(1), padded = (N + UNITS - 1) / UNITS * UNITS;
    check(rows > 0 && depth > 0 && N > 0 && out.shape(0) == rows, "the result does not fit");
    check(size == padded * depth && (!bias || bias->size() == padded), "panels or bias do not fit");
    const float *input = x.data(), *offset = bias ? bias->data() : nullptr;
    float *target = out.data();
    nb::gil_scoped_release release;
    multiply_prepared(input, rows, panels, N, depth, offset, target, threads);
}

void multiply_floats(const Array<const float, 2> &x, const Vector &panels, const std::optional<Vector> &bias,
                     const Array<float, 2> &out, unsigned threads) {
    multiply_any(x, {panels.data(), nullptr, nullptr, nullptr}, panels.size(), bias, out, threads);
}

void multiply_widened(const Array<const float, 2> &x, const Array<const std::int8_t, 1> &panels, const Vector &zeros,
                      const Vector &factors, const std::optional<Vector> &bias, const Array<float, 2> &out,
                      unsigned threads) {
    const std::size_t padded = (out.shape(1) + UNITS - 1) / UNITS * UNITS;
    check(zeros.size() == padded && factors.size() == padded, "zeros or factors do not fit");
    multiply_any(x, {nullptr, panels.data(), zeros.data(), factors.data()}, panels.size(), bias, out, threads);
}

Curve curve_named(const std::string &name) {
    if (name == "sigmoid") return Curve::sigmoid;
    if (name == "tanh") return Curve::tanh;
    check(name == "erf" || name == "gelu", "there is no such curve");
    return name == "erf" ? Curve::erf : Curve::gelu;
}

void curve(const std::string &name, const Vector &x, const Array<float, 1> &out, unsigned threads) {
    check(out.size() == x.size(), "the result does not fit");
    const Curve which = curve_named(name);
    const float *input = x.data();
    float *target = out.data();
    const std::size_t count = x.size();
    nb::gil_scoped_release release;
    map_curve(which, input, count, target, threads);
}

void softmax_rows(const Array<const float, 2> &x, bool logarithm, const Array<float, 2> &out, unsigned threads) {
    const std::size_t rows = x.shape(0), columns = x.shape(1);
    check(out.shape(0) == rows && out.shape(1) == columns, "the result does not fit");
    const float *input = x.data();
    float *target = out.data();
    nb::gil_scoped_release release;
    softmax(input, rows, columns, logarithm, target, threads);
}

void normalize_rows(const Array<const float, 2> &x, const Vector &scale, const std::optional<Vector> &bias, float epsilon,
                    const Array<float, 2> &out, const Array<float, 1> &mean, const Array<float, 1> &inverse,
                    unsigned threads) {
    const std::size_t rows = x.shape(0), columns = x.shape(1);
    check(out.shape(0) == rows && out.shape(1) == columns, "the result does not fit");
    check(mean.size() == rows && inverse.size() == rows, "mean and inverse do not fit");
    check(scale.size() == columns && (!bias || bias->size() == columns), "scale and bias do not fit");
    const float *input = x.data(), *factor = scale.data(), *offset = bias ? bias->data() : nullptr;
    float *target = out.data(), *means = mean.data(), *inverses = inverse.data();
    nb::gil_scoped_release release;
    normalize(input, rows, columns, factor, offset, epsilon, target, means, inverses, threads);
}

}  // namespace

void add_recurrent(nb::module_ &m) {
    nb::class_<Bytes>(m, "Bytes")
        .def(nb::init<Array<const std::int8_t, 1>, Array<const std::int32_t, 1>, Array<const std::int32_t, 1>, std::size_t,
                      std::size_t>(),
             nb::arg("panels").noconvert(), nb::arg("zero").noconvert(), nb::arg("sums").noconvert(), nb::arg("K"),
             nb::arg("N"))
        .def("multiply", &Bytes::multiply, nb::arg("a").noconvert(), nb::arg("a_zero").noconvert(),
             nb::arg("out").noconvert(), nb::arg("threads"))
        .def("multiply_scaled", &Bytes::multiply_scaled, nb::arg("a").noconvert(), nb::arg("a_zero").noconvert(),
             nb::arg("factors").noconvert(), nb::arg("step"), nb::arg("out").noconvert(), nb::arg("threads"));
    nb::class_<Direction>(m, "Direction")
        .def(nb::init<const std::string &, std::size_t, std::size_t, nb::object, nb::object, nb::object, Vector, Vector>(),
             nb::arg("kind"), nb::arg("hidden"), nb::arg("depth"), nb::arg("input"), nb::arg("state"),
             nb::arg("late").none(), nb::arg("bias").noconvert(), nb::arg("late_bias").noconvert());
    m.def("run_cells", &run, nb::arg("directions"), nb::arg("x").noconvert(), nb::arg("y").noconvert(),
          nb::arg("h").noconvert(), nb::arg("c").noconvert().none(), nb::arg("lengths").noconvert().none(),
          nb::arg("backward"), nb::arg("threads"));
    m.def("multiply_panels", &multiply_floats, nb::arg("x").noconvert(), nb::arg("panels").noconvert(),
          nb::arg("bias").noconvert().none(), nb::arg("out").noconvert(), nb::arg("threads"));
    m.def("multiply_byte_panels", &multiply_widened, nb::arg("x").noconvert(), nb::arg("panels").noconvert(),
          nb::arg("zeros").noconvert(), nb::arg("factors").noconvert(), nb::arg("bias").noconvert().none(),
          nb::arg("out").noconvert(), nb::arg("threads"));
    m.def("packed_depth", &packed_depth);
    m.def("byte_instruction_set", &byte_instruction_set);
    m.def("use_byte_instruction_set", [](const std::string &name) {
        check(use_byte_instruction_set(name.c_str()), "this machine has no such instruction set");
    });
    m.def("quantize", &quantize_bytes, nb::arg("x").noconvert(), nb::arg("values").noconvert(),
          nb::arg("scale").noconvert(), nb::arg("zero").noconvert());
    m.def("quantize_linear", &quantize_linear, nb::arg("x").noconvert(), nb::arg("scale"), nb::arg("zero"),
          nb::arg("low"), nb::arg("high"), nb::arg("values").noconvert());
    m.def("curve", &curve, nb::arg("name"), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("threads"));
    m.def("softmax", &softmax_rows, nb::arg("x").noconvert(), nb::arg("logarithm"), nb::arg("out").noconvert(),
          nb::arg("threads"));
    m.def("normalize", &normalize_rows, nb::arg("x").noconvert(), nb::arg("scale").noconvert(),
          nb::arg("bias").noconvert().none(), nb::arg("epsilon"), nb::arg("out").noconvert(), nb::arg("mean").noconvert(),
          nb::arg("inverse").noconvert(), nb::arg("threads"));
}

}  // namespace lut4tool
