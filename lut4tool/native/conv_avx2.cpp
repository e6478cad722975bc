#include <cstring>
#include <type_traits>

#include "conv_sets.h"
#include "lanes_avx2.h"

namespace lut4tool {
namespace {
#include "conv_kernels.h"
}  // namespace

const ConvKernels avx2_convs{"avx2", L, ROWS, VECTORS, VECTORS_OF_ONE, chosen_multiply, multiply_plane};

}  // namespace lut4tool
