#include "lanes_avx512.h"

namespace lut4tool {
namespace {
#include "product_kernels.h"
#include "panel_kernels.h"
}  // namespace

const ProductKernels avx512_products{"avx512", L, Lanes::rows_of_tile, gemv, tile, panel_products, nullptr};

}  // namespace lut4tool
