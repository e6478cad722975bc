#include <cstring>
#include <type_traits>

#include "conv_sets.h"
#include "lanes_neon.h"

namespace lut4tool {
namespace {
#include "conv_kernels.h"
}  // namespace

const ConvKernels neon_convs{"neon", L, ROWS, VECTORS, VECTORS_OF_ONE, chosen_multiply, multiply_plane};

}  // namespace lut4tool
