// One product on the machine that this is built for: facts and arrays from stdin, y to stdout, the instruction set to
// stderr. tests/kernels/test_kernels_cpu.py writes them: scales and x are float32, zero points uint8.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "product.h"

template <typename Value>
std::vector<Value> read(std::size_t count) {
    std::vector<Value> values(count);
    if (std::fread(values.data(), sizeof(Value), count, stdin) != count) std::exit(2);
    return values;
}

int main() {
    using namespace lut4tool;
    const auto facts = read<std::int64_t>(11);
    const std::size_t rows = facts[0], cols = facts[1], block = facts[2], M = facts[6];
    const std::size_t points = facts[10];  // none: a codebook of 16 follows the scales
    const auto packed = read<std::uint8_t>(facts[8]);
    const auto scales = read<float>(facts[9]);
    const auto codebook = read<float>(points ? 0 : 16);
    const auto zeros = read<std::uint8_t>(points);
    const std::size_t stride = points ? (cols + block - 1) / block * block : cols;
    Packed4 weight{packed.data(), {scales.data(), Float::f32}, zeros.data(),
                   points ? Packed4::Zeros::codes : Packed4::Zeros::none, points == 1, {}, rows, cols, stride, block,
                   facts[4] != 0, facts[3] != 0, Float(facts[5])};
    for (std::size_t code = 0; code < 16; ++code) weight.table[code] = points ? float(code) : codebook[code];
    const auto x = read<float>(M * weight.depth());
    std::vector<float> y(M * weight.outputs());
    multiply(weight, x.data(), M, y.data(), ProductKernel(facts[7]), 2);
    std::fprintf(stderr, "%s\n", product_instruction_set());
    return std::fwrite(y.data(), sizeof(float), y.size(), stdout) == y.size() ? 0 : 3;
}
