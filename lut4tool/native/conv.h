// Convolutions and pools over two spatial axes, and what follows them element by element while their result is cached.
//
// The input is copied to a scratch with its padding, its columns (and rows) of each stride phase side by side. There a
// kernel position is a shift: one output point's neighbours read the neighbours of what it reads, with no unrolling.
#pragma once

#include <cstddef>
#include <vector>

namespace lut4tool {

// x [batch, groups * depth, size], weights [groups * kernels, depth, kernel], y [batch, groups * kernels, out]; what
// lies outside x is 0.
struct Convolution {
    std::size_t batch, groups, depth, kernels;
    std::size_t size[2], kernel[2], out[2], stride[2], dilation[2], before[2];
};

// What is done to a value v of channel c, in this order, one after the other.
struct Stage {
    enum Kind {
        affine,          // v * a + b
        channel_affine,  // v * scale[c] + shift[c]
        point_affine,    // v * scale[p] + shift[p] for point p of a plane
        clip,            // between a and b; NaN stays
        leaky,           // v < 0 ? a * v : v
        sigmoid,
        tanh,
        erf,
        save,            // v is remembered
        add_saved,       // v + what was remembered
        mul_saved,
        add_operand,     // v + the operand's value
        mul_operand,
    } kind;
    float a = 0, b = 0;
    std::vector<float> scale = {}, shift = {};
};

using Stages = std::vector<Stage>;

// Operand number i of the stages that take one, in their order: of y's shape, or (plane) [batch, channels].
struct Operand {
    const float *data;
    bool plane;
};

struct ConvKernels;

// Weights [groups * kernels, depth, kernel] in the order that the kernels of `set` read: blocks of rows, each
// [depth, kernel, row]; a group's last block is padded with zeros.
struct PackedWeights {
    const ConvKernels *set;
    std::size_t groups, kernels, depth, area, padded;
    std::vector<float> data, bias;

    const float *block(std::size_t group, std::size_t row) const;
    const float *offsets(std::size_t group, std::size_t row) const;
};

PackedWeights pack_weights(const float *w, const float *bias, std::size_t groups, std::size_t kernels,
                           std::size_t depth, std::size_t area);

void convolve(const Convolution &shape, const PackedWeights &weights, const float *x, float *y, const Stages &stages,
              const std::vector<Operand> &operands, unsigned threads);

// The stages alone: y [planes, points] = stages(x), plane p being channel p % channels. y may be x.
void run_stages(const Stages &stages, const std::vector<Operand> &operands, const float *x, std::size_t planes,
                std::size_t channels, std::size_t points, float *y, unsigned threads);

// The instruction set that serves; `force` takes a name of those the machine has.
std::vector<const char *> conv_sets();
const char *conv_set();
bool force_conv_set(const char *name);

}  // namespace lut4tool
