// Pools over two spatial axes: first across the lines, then along them.
#pragma once

#include <cstddef>

namespace lut4tool {

// x [planes, size], y [planes, out]; what lies outside x takes no part.
struct Pool {
    std::size_t planes;
    std::size_t size[2], kernel[2], out[2], stride[2], dilation[2], before[2];
};

// The maximum (NaN where a window has one) or the sum of each window; -Inf or 0 where it lies outside x.
void pool_planes(const Pool &shape, const float *x, float *y, bool maximum, unsigned threads);

}  // namespace lut4tool
