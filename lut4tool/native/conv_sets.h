// One instruction set's convolution kernels, which conv.cpp chooses from.
#pragma once

#include <cstddef>

namespace lut4tool {

struct ConvKernels {
    using Multiply = void (*)(const float *a, const float *bias, const float *x, std::size_t depth, std::size_t plane,
                              const std::size_t *taps, std::size_t count, float low, float high, float *out,
                              std::size_t stride);
    using Plane = void (*)(const float *a, float bias, const float *x, std::size_t width, const std::size_t *taps,
                           std::size_t count, std::size_t rows, std::size_t columns, float low, float high, float *out,
                           std::size_t stride);
    const char *name;
    std::size_t lanes, rows;              // of a vector; of a block of weights: less in the last, 1, 2 or 4
    std::size_t vectors, vectors_of_one;  // most vectors of a tile, and where a block has one row
    Multiply (*multiply)(std::size_t rows, std::size_t vectors);
    Plane plane;
};

extern const ConvKernels avx512_convs, avx2_convs, neon_convs, portable_convs;

}  // namespace lut4tool
