#include "pool.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "clones.h"
#include "threads.h"

namespace lut4tool {
namespace {

using std::size_t;

constexpr size_t SMALL = size_t(1) << 18;  // elements read that are not worth a second thread

size_t divided(size_t value, size_t by) { return (value + by - 1) / by; }

// The outputs of one axis that a kernel position reads inside the input: [first, last).
void inside(size_t out, size_t size, size_t stride, size_t offset, size_t before, size_t &first, size_t &last) {
    first = offset >= before ? 0 : divided(before - offset, stride);
    last = size + before > offset ? std::min(out, divided(size + before - offset, stride)) : 0;
    first = std::min(first, last);
}

inline float greater(float a, float b) { return a > b || a != a ? a : b; }

LUT4TOOL_CLONES void raise(float *y, const float *x, size_t count, size_t stride) {
    if (stride == 1) {
        for (size_t i = 0; i < count; ++i) y[i] = greater(y[i], x[i]);
    } else if (stride == 2) {
        for (size_t i = 0; i < count; ++i) y[i] = greater(y[i], x[2 * i]);
    } else {
        for (size_t i = 0; i < count; ++i) y[i] = greater(y[i], x[i * stride]);
    }
}

LUT4TOOL_CLONES void add(float *y, const float *x, size_t count, size_t stride) {
    if (stride == 1) {
        for (size_t i = 0; i < count; ++i) y[i] += x[i];
    } else if (stride == 2) {
        for (size_t i = 0; i < count; ++i) y[i] += x[2 * i];
    } else {
        for (size_t i = 0; i < count; ++i) y[i] += x[i * stride];
    }
}

// lines [size 0, out 1]: each line of x reduced along itself; then y [out].
void pool_plane(const Pool &s, const float *x, float *lines, float *y, bool maximum) {
    const float none = maximum ? -HUGE_VALF : 0.0f;
    const auto combine = maximum ? raise : add;
    for (size_t row = 0; row < s.size[0]; ++row, x += s.size[1]) {
        float *line = lines + row * s.out[1];
        std::fill(line, line + s.out[1], none);
        for (size_t j = 0; j < s.kernel[1]; ++j) {
            size_t first, last;
            inside(s.out[1], s.size[1], s.stride[1], j * s.dilation[1], s.before[1], first, last);
            if (first < last)
                combine(line + first, x + first * s.stride[1] + j * s.dilation[1] - s.before[1], last - first, s.stride[1]);
        }
    }
    std::fill(y, y + s.out[0] * s.out[1], none);
    for (size_t row = 0; row < s.out[0]; ++row, y += s.out[1]) {
        for (size_t i = 0; i < s.kernel[0]; ++i) {
            const size_t from = row * s.stride[0] + i * s.dilation[0] - s.before[0];  // wraps where outside
            if (from < s.size[0]) combine(y, lines + from * s.out[1], s.out[1], 1);
        }
    }
}

}  // namespace

void pool_planes(const Pool &s, const float *x, float *y, bool maximum, unsigned threads) {
    const size_t work = s.planes * (s.size[0] * s.kernel[1] + s.out[0] * s.kernel[0]) * s.out[1];
    if (work <= SMALL) threads = 1;
    const size_t some = divided(s.planes, std::min<size_t>(s.planes, threads == 1 ? 1 : 4 * threads));
    parallel(divided(s.planes, some), threads, [&](size_t piece) {
        std::vector<float> lines(s.size[0] * s.out[1]);
        for (size_t plane = piece * some; plane < std::min(s.planes, (piece + 1) * some); ++plane)
            pool_plane(s, x + plane * s.size[0] * s.size[1], lines.data(), y + plane * s.out[0] * s.out[1], maximum);
    });
}

}  // namespace lut4tool
