#include "lanes_portable.h"

namespace lut4tool {
namespace {
#include "product_kernels.h"
}  // namespace

const ProductKernels portable_products{"portable", L, Lanes::rows_of_tile, gemv, tile};

}  // namespace lut4tool
