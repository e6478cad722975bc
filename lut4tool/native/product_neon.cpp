#include "lanes_neon.h"

namespace lut4tool {
namespace {
#include "product_kernels.h"
#include "panel_kernels.h"
}  // namespace

const ProductKernels neon_products{"neon", L, Lanes::rows_of_tile, gemv, tile, panel_products, nullptr};

}  // namespace lut4tool
