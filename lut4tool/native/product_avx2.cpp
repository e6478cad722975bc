#include "lanes_avx2.h"

namespace lut4tool {
namespace {
#include "product_kernels.h"
#include "panel_kernels.h"
}  // namespace

const ProductKernels avx2_products{"avx2", L, Lanes::rows_of_tile, gemv, tile, panel_products, nullptr};

}  // namespace lut4tool
