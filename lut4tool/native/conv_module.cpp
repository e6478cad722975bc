// The convolutions of the module `_native`: checks what memory safety needs, releases the GIL and calls conv.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "conv.h"
#include "pool.h"

namespace nb = nanobind;

namespace lut4tool {
namespace {

using Tensor = nb::ndarray<const float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using AnyOut = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Planes = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using PlanesOut = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void check(bool holds, const char *message) {
    if (!holds) throw std::invalid_argument(message);
}

// What `Stages` of Python is: the stages, and how many of them take an operand.
struct Program {
    Stages stages;
    std::size_t operands = 0, channels = 0, points = 0;  // those of the stages that have a value each, 0 where none has

    void add(const std::string &name, float a, float b, const std::optional<Vector> &scale,
             const std::optional<Vector> &shift) {
        static const char *const names[] = {"affine",    "channel_affine", "point_affine", "clip",
                                            "leaky",     "sigmoid",        "tanh",         "erf",
                                            "save",      "add_saved",      "mul_saved",    "add_operand",
                                            "mul_operand"};
        std::size_t kind = 0;
        while (kind < std::size(names) && name != names[kind]) ++kind;
        check(kind < std::size(names), "there is no such stage");
        Stage stage{Stage::Kind(kind), a, b};
        if (stage.kind == Stage::channel_affine || stage.kind == Stage::point_affine) {
            std::size_t &known = stage.kind == Stage::channel_affine ? channels : points;
            check(scale && shift && scale->size() == shift->size() && scale->size() > 0, "scale and shift do not fit");
            check(known == 0 || known == scale->size(), "stages differ in their sizes");
            known = scale->size();
            stage.scale.assign(scale->data(), scale->data() + known);
            stage.shift.assign(shift->data(), shift->data() + known);
        }
        if (stage.kind == Stage::add_saved || stage.kind == Stage::mul_saved) {
            bool saved = false;
            for (const Stage &before : stages) saved = saved || before.kind == Stage::save;
            check(saved, "nothing was saved");
        }
        operands += stage.kind == Stage::add_operand || stage.kind == Stage::mul_operand;
        stages.push_back(std::move(stage));
    }
};

std::vector<Operand> checked(const Program &program, const std::vector<Any> &given, std::size_t planes,
                             std::size_t channels, std::size_t points) {
    check(planes == 0 || points <= SIZE_MAX / planes, "there are too many elements");
    check(given.size() == program.operands, "the operands do not fit the stages");
    check(program.channels == 0 || program.channels == channels, "the stages' channels do not fit");
    check(program.points == 0 || program.points == points, "the stages' points do not fit");
    std::vector<Operand> operands;
    for (const Any &operand : given) {
        const bool plane = operand.size() != planes * points;
        check(!plane || operand.size() == planes, "an operand has a value an element, or one a plane");
        operands.push_back({operand.data(), plane});
    }
    return operands;
}

void run_program(const Program &program, const Planes &x, const std::vector<Any> &given, const PlanesOut &y,
                 unsigned threads) {
    const std::size_t planes = x.shape(0) * x.shape(1), channels = x.shape(1), points = x.shape(2);
    for (std::size_t axis = 0; axis < 3; ++axis) check(x.shape(axis) == y.shape(axis), "y does not fit");
    const std::vector<Operand> operands = checked(program, given, planes, channels, points);
    const float *input = x.data();
    float *output = y.data();
    if (planes * points == 0) return;
    nb::gil_scoped_release release;
    run_stages(program.stages, operands, input, planes, channels, points, output, threads);
}

PackedWeights *pack(const Tensor &w, const std::optional<Vector> &bias, std::size_t groups) {
    check(groups > 0 && w.size() > 0 && w.shape(0) % groups == 0, "kernels do not fit the groups");
    check(!bias || bias->size() == w.shape(0), "bias does not fit");
    const std::size_t kernels = w.shape(0) / groups, area = w.shape(2) * w.shape(3);
    const float *data = w.data(), *offset = bias ? bias->data() : nullptr;
    const std::size_t depth = w.shape(1);
    nb::gil_scoped_release release;
    return new PackedWeights(pack_weights(data, offset, groups, kernels, depth, area));
}

// Weights over inputs of one size, which was checked.
struct Placed {
    const PackedWeights &weights;
    Convolution s;

    void run(const Any &x, const AnyOut &y, const Program &program, const std::vector<Any> &given, unsigned threads) const {
        const std::size_t points = s.out[0] * s.out[1], channels = s.groups * s.kernels;
        check(x.size() == s.batch * s.groups * s.depth * s.size[0] * s.size[1], "x does not fit");
        check(y.size() == s.batch * channels * points, "y does not fit");
        const std::vector<Operand> operands = checked(program, given, s.batch * channels, channels, points);
        const float *input = x.data();
        float *target = y.data();
        nb::gil_scoped_release release;
        convolve(s, weights, input, target, program.stages, operands, threads);
    }
};

// x: batch, channels and two sizes; geometry: kernel sizes, strides, dilations and padding before, two of each; out: two sizes.
Placed place(const PackedWeights &weights, const std::vector<std::size_t> &x, const std::vector<std::size_t> &geometry,
             const std::vector<std::size_t> &out) {
    check(x.size() == 4 && geometry.size() == 8 && out.size() == 2, "x has four sizes, the geometry and out are of two axes");
    Convolution s{x[0], weights.groups, weights.depth, weights.kernels, {}, {}, {}, {}, {}, {}};
    check(x[1] == s.groups * s.depth, "channels do not fit the groups");
    check(x[0] > 0 && x[0] <= INT_MAX && x[1] <= INT_MAX, "an empty tensor has no convolution, nor one that is too large");
    for (std::size_t axis = 0; axis < 2; ++axis) {
        s.size[axis] = x[2 + axis], s.out[axis] = out[axis], s.kernel[axis] = geometry[axis];
        s.stride[axis] = geometry[2 + axis], s.dilation[axis] = geometry[4 + axis], s.before[axis] = geometry[6 + axis];
        check(s.stride[axis] > 0 && s.dilation[axis] > 0 && s.kernel[axis] > 0, "strides and dilations are positive");
        check(s.size[axis] > 0 && s.out[axis] > 0, "an empty tensor has no convolution");
        check(s.size[axis] <= INT_MAX && s.out[axis] <= INT_MAX && s.before[axis] <= INT_MAX, "an axis is too long");
        check(s.stride[axis] <= INT_MAX && s.dilation[axis] <= INT_MAX, "an axis is too long");
    }
    check(s.kernel[0] * s.kernel[1] == weights.area, "the kernel does not fit");
    check(s.size[0] * s.size[1] <= INT_MAX && s.out[0] * s.out[1] <= INT_MAX, "a plane is too large");
    const std::size_t largest = SIZE_MAX / std::max(s.size[0] * s.size[1], s.out[0] * s.out[1]);
    check(x[0] * x[1] <= largest && x[0] * s.groups * s.kernels <= largest, "there are too many elements");
    return {weights, s};
}

// geometry: kernel sizes, strides, dilations and padding before, two of each.
void pool(const Planes &x, const std::vector<std::size_t> &geometry, const PlanesOut &y, bool maximum, unsigned threads) {
    check(geometry.size() == 8 && x.shape(0) == y.shape(0), "geometry is kernel, strides, dilations and padding");
    Pool s{x.shape(0), {}, {}, {}, {}, {}, {}};
    for (std::size_t axis = 0; axis < 2; ++axis) {
        s.size[axis] = x.shape(1 + axis), s.out[axis] = y.shape(1 + axis), s.kernel[axis] = geometry[axis];
        s.stride[axis] = geometry[2 + axis], s.dilation[axis] = geometry[4 + axis], s.before[axis] = geometry[6 + axis];
        check(s.stride[axis] > 0 && s.dilation[axis] > 0 && s.kernel[axis] > 0, "strides and dilations are positive");
    }
    const float *input = x.data();
    float *target = y.data();
    if (x.size() == 0 || y.size() == 0) return;
    nb::gil_scoped_release release;
    pool_planes(s, input, target, maximum, threads);
}

}  // namespace

void add_conv(nb::module_ &m) {
    nb::class_<Program>(m, "Stages")
        .def(nb::init<>())
        .def("add", &Program::add, nb::arg("name"), nb::arg("a") = 0.0f, nb::arg("b") = 0.0f,
             nb::arg("scale").noconvert().none() = nb::none(), nb::arg("shift").noconvert().none() = nb::none())
        .def("__len__", [](const Program &program) { return program.stages.size(); })
        .def("run", &run_program, nb::arg("x").noconvert(), nb::arg("operands"), nb::arg("y").noconvert(),
             nb::arg("threads"));
    nb::class_<PackedWeights>(m, "PackedWeights")
        .def("place", &place, nb::arg("x"), nb::arg("geometry"), nb::arg("out"), nb::keep_alive<0, 1>());
    nb::class_<Placed>(m, "PlacedWeights")
        .def("run", &Placed::run, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("stages"),
             nb::arg("operands"), nb::arg("threads"));
    m.def("pack_weights", &pack, nb::arg("w").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("groups"));
    m.def("pool", &pool, nb::arg("x").noconvert(), nb::arg("geometry"), nb::arg("y").noconvert(), nb::arg("maximum"),
          nb::arg("threads"));
    m.def("conv_sets", [] {
        std::vector<std::string> names;
        for (const char *name : conv_sets()) names.emplace_back(name);
        return names;
    });
    m.def("conv_set", [] { return std::string(conv_set()); });
    m.def("use_conv_set", [](const std::string &name) {
        check(force_conv_set(name.c_str()), "this machine has no such instruction set");
    });
}

}  // namespace lut4tool
