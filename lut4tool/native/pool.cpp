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

struct Maximum {  // of numbers: one instruction
    static constexpr float none = -HUGE_VALF;
    static float of(float a, float b) { return a < b ? b : a; }
};

struct MaximumOrNaN {  // the compiler makes branches of the last few of a line
    static constexpr float none = -HUGE_VALF;
    static float of(float a, float b) { return (a < b) | (b != b) ? b : a; }
};

struct Sum {
    static constexpr float none = 0.0f;
    static float of(float a, float b) { return a + b; }
};

// Elements from the start of the first window of a line to the end of the last one.
size_t reach_of(const Pool &s) { return (s.out[1] - 1) * s.stride[1] + (s.kernel[1] - 1) * s.dilation[1] + 1; }

// Floats of a plane's scratch: two lines with their surroundings, one's elements by stride phase, and one of y.
size_t scratch_of(const Pool &s) {
    const size_t reach = reach_of(s), length = std::max(reach, s.before[1] + s.size[1]);
    return 2 * length + (divided(reach, s.stride[1]) + 1) * s.stride[1] + s.out[1];
}

// to = the reduction of a and b, which are elsewhere: where `to` is one of them, the compiler stores under a branch.
template <typename Reduction>
inline __attribute__((always_inline)) void reduce(float *__restrict to, const float *a, const float *b, size_t count) {
    for (size_t k = 0; k < count; ++k) to[k] = Reduction::of(a[k], b[k]);
}

// Each row of y: the lines of x under it reduced to one, that to its windows. Inlined into the loops for each processor.
template <typename Reduction>
inline __attribute__((always_inline)) void pool_plane(const Pool &s, const float *x, float *scratch, float *y) {
    const size_t reach = reach_of(s), width = s.size[1], length = std::max(reach, s.before[1] + width);
    const size_t phase = divided(reach, s.stride[1]) + 1, step = s.stride[1];
    float *lines[2] = {scratch, scratch + length}, *phases = scratch + 2 * length, *spare = phases + phase * step;
    std::fill(scratch, scratch + 2 * length, Reduction::none);
    for (size_t row = 0; row < s.out[0]; ++row, y += s.out[1]) {
        const float *line = nullptr;  // the reduction so far: a line of x, or in `lines`
        size_t into = 0;
        for (size_t i = 0; i < s.kernel[0]; ++i) {
            const size_t from = row * s.stride[0] + i * s.dilation[0] - s.before[0];  // wraps where outside
            if (from >= s.size[0]) continue;
            const float *other = x + from * width;
            if (line) {
                reduce<Reduction>(lines[into] + s.before[1], line, other, width);
                line = lines[into] + s.before[1], into = 1 - into;
            } else {
                line = other;
            }
        }
        float *whole = lines[1 - into];  // the last one written, if any was
        if (!line) {
            std::fill(whole + s.before[1], whole + s.before[1] + width, Reduction::none);
        } else if (line != whole + s.before[1]) {
            std::copy_n(line, width, whole + s.before[1]);
        }
        const float *parts = whole;
        if (step == 2) {
            for (size_t k = 0; 2 * k + 1 < reach; ++k) phases[k] = whole[2 * k], phases[phase + k] = whole[2 * k + 1];
            if (reach % 2) phases[reach / 2] = whole[reach - 1];
            parts = phases;
        } else if (step > 2) {
            for (size_t k = 0; k < reach; ++k) phases[k % step * phase + k / step] = whole[k];
            parts = phases;
        }
        const float *sum = parts;
        for (size_t j = 1; j < s.kernel[1]; ++j) {
            const size_t at = j * s.dilation[1];
            float *target = (s.kernel[1] - 1 - j) % 2 ? spare : y;  // the last one writes y
            reduce<Reduction>(target, sum, parts + at % step * phase + at / step, s.out[1]);
            sum = target;
        }
        if (s.kernel[1] == 1) std::copy_n(parts, s.out[1], y);
    }
}

LUT4TOOL_CLONES bool has_nan(const float *x, size_t count) {
    int found = 0;
    for (size_t i = 0; i < count; ++i) found |= x[i] != x[i];
    return found != 0;
}

LUT4TOOL_CLONES void maximum_plane_with_nan(const Pool &s, const float *x, float *scratch, float *y) {
    pool_plane<MaximumOrNaN>(s, x, scratch, y);
}

LUT4TOOL_CLONES void maximum_plane(const Pool &s, const float *x, float *scratch, float *y) {
    pool_plane<Maximum>(s, x, scratch, y);
}

LUT4TOOL_CLONES void sum_plane(const Pool &s, const float *x, float *scratch, float *y) {
    pool_plane<Sum>(s, x, scratch, y);
}

}  // namespace

void pool_planes(const Pool &s, const float *x, float *y, bool maximum, unsigned threads) {
    const size_t work = s.planes * (s.size[0] * s.kernel[1] + s.out[0] * s.kernel[0]) * s.out[1];
    if (work <= SMALL) threads = 1;
    const size_t some = divided(s.planes, std::min<size_t>(s.planes, threads == 1 ? 1 : 4 * threads));
    parallel(divided(s.planes, some), threads, [&](size_t piece) {
        std::vector<float> scratch(scratch_of(s));
        for (size_t plane = piece * some; plane < std::min(s.planes, (piece + 1) * some); ++plane) {
            const float *input = x + plane * s.size[0] * s.size[1];
            float *output = y + plane * s.out[0] * s.out[1];
            if (!maximum) {
                sum_plane(s, input, scratch.data(), output);
            } else if (has_nan(input, s.size[0] * s.size[1])) {
                maximum_plane_with_nan(s, input, scratch.data(), output);
            } else {
                maximum_plane(s, input, scratch.data(), output);
            }
        }
    });
}

}  // namespace lut4tool
