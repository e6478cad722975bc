#include "lanes_portable.h"

namespace lut4tool {
namespace {
#include "product_kernels.h"
#include "panel_kernels.h"
}  // namespace

const ProductKernels portable_products{"portable", L, Lanes::rows_of_tile, gemv, tile, panel_products, nullptr};

}  // namespace lut4tool
