#include <cstring>
#include <type_traits>

#include "conv_sets.h"
#include "lanes_avx512.h"

namespace lut4tool {
namespace {
#include "conv_kernels.h"
}  // namespace

const ConvKernels avx512_convs{"avx512", L, ROWS, VECTORS, VECTORS_OF_ONE, chosen_multiply, multiply_plane};

}  // namespace lut4tool
