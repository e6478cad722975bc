// The Python module `lut4tool.native._native`: checks every bound, releases the GIL and calls the plain library.
// float32 and float16 arrays come as they are; bfloat16, which the buffer protocol does not know, as a uint16 view.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "decode.h"

namespace nb = nanobind;
using namespace lut4tool;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Array>
Float float_type(const Array &array, const char *what) {
    if (array.dtype() == nb::dtype<float>()) return Float::f32;
    if (array.dtype() == nb::dtype<std::uint16_t>()) return Float::bf16;
    if (array.dtype().code == std::uint8_t(nb::dlpack::dtype_code::Float) && array.dtype().bits == 16) return Float::f16;
    throw std::invalid_argument(std::string(what) + " must be float32, float16 or uint16 (bfloat16's bits)");
}

void check(bool holds, const std::string &message) {
    if (!holds) throw std::invalid_argument(message);
}

void at_least(std::size_t has, std::size_t needs, const char *what) {
    check(has >= needs, std::string(what) + " has " + std::to_string(has) + " values, and " + std::to_string(needs) +
                            " are needed");
}

void check_block_size(std::size_t block_size) {
    check(block_size >= 2 && block_size % 2 == 0 && block_size < (std::size_t(1) << 48),
          "block_size must be even and at least 2, not " + std::to_string(block_size));
}

void decode_elements(const Bytes &packed, const Values &scales, const Values &codebook, std::size_t block_size,
                     bool high_nibble_first, const Out &out, unsigned threads) {
    check_block_size(block_size);
    const Lookup4 weight{packed.data(),
                         {scales.data(), float_type(scales, "scales")},
                         {codebook.data(), float_type(codebook, "codebook")},
                         block_size,
                         out.size(),
                         high_nibble_first};
    check(codebook.size() == 16, "codebook must have 16 values, not " + std::to_string(codebook.size()));
    at_least(packed.size(), out.size() / 2 + out.size() % 2, "packed");
    at_least(scales.size(), (out.size() + block_size - 1) / block_size, "scales");
    const Float type = float_type(out, "out");
    void *data = out.data();
    nb::gil_scoped_release release;
    decode(weight, data, type, threads);
}

void decode_qmm(const Bytes &packed, const Values &scales, const Values &zero_points, std::size_t rows, std::size_t K,
                std::size_t block_size, const Out &out, unsigned threads) {
    check_block_size(block_size);
    const Float type = float_type(scales, "scales");
    const bool codes = zero_points.dtype() == nb::dtype<std::uint8_t>();
    check(codes || float_type(zero_points, "zero_points") == type, "zero_points must be uint8 or of the scales' type");
    check(float_type(out, "out") == type, "out must be of the scales' type");
    check(K > 0 && out.size() % K == 0 && out.size() / K == rows, "out must have rows x K values");
    const std::size_t blocks = rows * ((K - 1) / block_size + 1);
    check(zero_points.size() == 1 || zero_points.size() >= blocks, "zero_points must have one value, or one a block");
    at_least(scales.size(), blocks, "scales");
    at_least(packed.size() / (block_size / 2), blocks, "packed, in blocks,");
    const Qmm weight{packed.data(), {scales.data(), type}, zero_points.data(), codes, zero_points.size() == 1,
                     rows,          K,                     block_size};
    void *data = out.data();
    nb::gil_scoped_release release;
    decode(weight, data, threads);
}

}  // namespace

namespace lut4tool {
void add_dense(nb::module_ &m);  // dense_module.cpp
}

NB_MODULE(_native, m) {
    add_dense(m);
    m.def("decode_elements", &decode_elements, nb::arg("packed").noconvert(), nb::arg("scales").noconvert(), nb::arg("codebook").noconvert(),
          nb::arg("block_size"), nb::arg("high_nibble_first"), nb::arg("out").noconvert(), nb::arg("threads") = 1);
    m.def("decode_qmm", &decode_qmm, nb::arg("packed").noconvert(), nb::arg("scales").noconvert(), nb::arg("zero_points").noconvert(), nb::arg("rows"),
          nb::arg("K"), nb::arg("block_size"), nb::arg("out").noconvert(), nb::arg("threads") = 1);
    m.def("instruction_set", [] { return std::string(instruction_set()); });
    m.def("use_instruction_set", [](const std::string &name) {
        check(use_instruction_set(name.c_str()), "this machine has no instruction set " + name);
    });
}
