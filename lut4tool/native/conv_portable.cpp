#include <cstring>
#include <type_traits>

#include "conv_sets.h"
#include "lanes_portable.h"

namespace lut4tool {
namespace {
#include "conv_kernels.h"
}  // namespace

const ConvKernels portable_convs{"portable", L, ROWS, VECTORS, VECTORS_OF_ONE, chosen_multiply, multiply_plane};

}  // namespace lut4tool
