// The Python module `lut4tool.native._native`: checks every bound, releases the GIL and calls the plain library.
// float32 and float16 arrays come as they are; bfloat16, which the buffer protocol does not know, as a uint16 view.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "conv.h"
#include "decode.h"
#include "pages.h"
#include "product.h"
#include "product_bf16.h"

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

const char *name_of(ProductKernel kernel) {
    return kernel == ProductKernel::gemv ? "gemv" : kernel == ProductKernel::digits ? "digits" : "tile";
}

ProductKernel product_kernel(const std::string &name) {
    if (name.empty()) return ProductKernel::automatic;
    for (const ProductKernel kernel : {ProductKernel::gemv, ProductKernel::tile, ProductKernel::digits}) {
        if (name == name_of(kernel)) return kernel;
    }
    throw std::invalid_argument("there is no kernel " + name);
}

Float float_name(const std::string &name) {
    if (name == "float32") return Float::f32;
    check(name == "float16" || name == "bfloat16", "there is no float type " + name);
    return name == "float16" ? Float::f16 : Float::bf16;
}

// A weight whose buffers were checked; it keeps them alive.
struct Matrix {
    Packed4 weight;
    nb::object packed, scales, zero_points;
};

void check_rows(const Packed4 &weight, std::size_t bytes, std::size_t scales) {
    check_block_size(weight.block_size);
    check(weight.rows > 0 && weight.cols > 0 && weight.cols <= weight.stride, "rows and cols must be positive");
    check(weight.stride < (std::size_t(1) << 62) / weight.rows, "the weight is too large");
    const std::size_t flat = (weight.rows - 1) * weight.stride + weight.cols;
    at_least(bytes, flat / 2 + flat % 2, "packed");
    at_least(scales, (flat + weight.block_size - 1) / weight.block_size, "scales");
}

Matrix *lookup4_matrix(nb::object packed, nb::object scales, const Values &codebook, std::size_t rows, std::size_t cols,
                       std::size_t block_size, bool along_k, bool high_nibble_first, const std::string &rounding) {
    const Bytes bytes = nb::cast<Bytes>(packed, false);
    const Values values = nb::cast<Values>(scales, false);
    check(codebook.size() == 16, "codebook must have 16 values, not " + std::to_string(codebook.size()));
    Packed4 weight{bytes.data(), {values.data(), float_type(values, "scales")}, nullptr, Packed4::Zeros::none, false, {},
                   rows, cols, cols, block_size, high_nibble_first, along_k, float_name(rounding)};
    const Floats entries{codebook.data(), float_type(codebook, "codebook")};
    for (std::size_t code = 0; code < 16; ++code) weight.table[code] = load(entries, code);
    check_rows(weight, bytes.size(), values.size());
    return new Matrix{weight, packed, scales, nb::none()};
}

Matrix *qmm_matrix(nb::object packed, nb::object scales, nb::object zero_points, std::size_t N, std::size_t K,
                   std::size_t block_size) {
    const Bytes bytes = nb::cast<Bytes>(packed, false);
    const Values values = nb::cast<Values>(scales, false), points = nb::cast<Values>(zero_points, false);
    const Float type = float_type(values, "scales");
    const bool codes = points.dtype() == nb::dtype<std::uint8_t>();
    check(codes || float_type(points, "zero_points") == type, "zero_points must be uint8 or of the scales' type");
    check_block_size(block_size);
    check(K > 0 && K < (std::size_t(1) << 48), "K must be positive");
    const std::size_t blocks = (K - 1) / block_size + 1;
    Packed4 weight{bytes.data(), {values.data(), type}, points.data(), codes ? Packed4::Zeros::codes : Packed4::Zeros::floats,
                   points.size() == 1, {}, N, K, blocks * block_size, block_size, false, true, type};
    for (std::size_t code = 0; code < 16; ++code) weight.table[code] = float(code);
    check_rows(weight, bytes.size(), values.size());
    at_least(bytes.size() / (block_size / 2), N * blocks, "packed, in blocks,");
    check(points.size() == 1 || points.size() >= N * blocks, "zero_points must have one value, or one a block");
    return new Matrix{weight, packed, scales, zero_points};
}

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const char *multiply_rows(const Matrix &matrix, const Rows &x, const RowsOut &y, const std::string &kernel, unsigned threads) {
    const Packed4 &weight = matrix.weight;
    check(x.shape(1) == weight.depth() && y.shape(1) == weight.outputs() && x.shape(0) == y.shape(0),
          "x must be [M, K] and y [M, N] for this weight");
    const ProductKernel chosen = product_kernel(kernel);
    check(chosen != ProductKernel::gemv || serves_gemv(weight), "gemv does not serve this weight");
    const float *values = x.data();
    float *out = y.data();
    const std::size_t M = x.shape(0);
    nb::gil_scoped_release release;
    return name_of(multiply(weight, values, M, out, chosen, threads));
}

using HalfRows = nb::ndarray<const std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using HalfRowsOut = nb::ndarray<std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

bool multiply_bf16_rows(const Matrix &matrix, const HalfRows &x, const HalfRowsOut &y, unsigned threads) {
    const Packed4 &weight = matrix.weight;
    check(x.shape(1) == weight.depth() && y.shape(1) == weight.outputs() && x.shape(0) == y.shape(0),
          "x must be [M, K] and y [M, N] for this weight");
    if (!serves_bf16(weight)) return false;
    const std::uint16_t *values = x.data();
    std::uint16_t *out = y.data();
    const std::size_t M = x.shape(0);
    nb::gil_scoped_release release;
    return multiply_bf16(weight, values, M, out, threads);
}

}  // namespace

namespace lut4tool {
void add_conv(nb::module_ &m);       // conv_module.cpp
void add_dense(nb::module_ &m);      // dense_module.cpp
void add_recurrent(nb::module_ &m);  // recurrent_module.cpp
}

NB_MODULE(_native, m) {
    add_conv(m);
    add_dense(m);
    add_recurrent(m);
    m.def("decode_elements", &decode_elements, nb::arg("packed").noconvert(), nb::arg("scales").noconvert(), nb::arg("codebook").noconvert(),
          nb::arg("block_size"), nb::arg("high_nibble_first"), nb::arg("out").noconvert(), nb::arg("threads") = 1);
    m.def("decode_qmm", &decode_qmm, nb::arg("packed").noconvert(), nb::arg("scales").noconvert(), nb::arg("zero_points").noconvert(), nb::arg("rows"),
          nb::arg("K"), nb::arg("block_size"), nb::arg("out").noconvert(), nb::arg("threads") = 1);
    nb::class_<Matrix>(m, "Matrix")
        .def("serves_gemv", [](const Matrix &matrix) { return serves_gemv(matrix.weight); })
        .def("kernel", [](const Matrix &matrix, std::size_t M) {
            return name_of(chosen_kernel(matrix.weight, M));
        })
        .def("serves_bf16", [](const Matrix &matrix) { return serves_bf16(matrix.weight); })
        .def("multiply_bf16", &multiply_bf16_rows, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("threads") = 1)
        .def("multiply", &multiply_rows, nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("kernel") = "",
             nb::arg("threads") = 1);
    m.def("lookup4_matrix", &lookup4_matrix, nb::arg("packed"), nb::arg("scales"), nb::arg("codebook").noconvert(),
          nb::arg("rows"), nb::arg("cols"), nb::arg("block_size"), nb::arg("along_k"), nb::arg("high_nibble_first"),
          nb::arg("rounding"));
    m.def("qmm_matrix", &qmm_matrix, nb::arg("packed"), nb::arg("scales"), nb::arg("zero_points"), nb::arg("N"), nb::arg("K"),
          nb::arg("block_size"));
    m.def("watch_pages", [](const Bytes &map) { return watch_pages(map.data(), map.size()); }, nb::arg("pages").noconvert());
    m.def("forget_pages", &forget_pages, nb::arg("number"));
    m.def("lost_pages", &lost_pages, nb::arg("number"));
    m.def("product_instruction_set", [] { return std::string(product_instruction_set()); });
    m.def("instruction_set", [] { return std::string(instruction_set()); });
    m.def("use_instruction_set", [](const std::string &name) {
        check(use_product_instruction_set(name.c_str()), "this machine has no instruction set " + name);
        const std::string decode = name == "neon" ? "portable" : name == "amx" ? "avx512" : name;
        check(use_instruction_set(decode.c_str()), "no decode for " + name);
        check(force_conv_set((name == "amx" ? "avx512" : name).c_str()), "no convolution for " + name);
    });
}
