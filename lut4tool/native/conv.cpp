#include "conv.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "clones.h"
#include "conv_sets.h"
#include "curves.h"
#include "threads.h"

namespace lut4tool {
namespace {

using std::size_t;

constexpr size_t SMALL = size_t(1) << 20;      // multiplications that are not worth a second thread
constexpr size_t CACHED = size_t(1) << 17;     // floats of a scratch that stays near its core: half a megabyte
constexpr size_t POINTS = 2048, FEW_POINTS = 192;  // of a region: at most, and least where it is made smaller
constexpr size_t WEIGHTS = size_t(1) << 17;    // floats of weights that a tile passes: a quarter of a second cache
constexpr size_t LINE = 16;                    // floats of a cache line
constexpr size_t PIECES = 4;                   // pieces a thread
constexpr size_t CHANNELS = 4;                  // with kernels of their own that are gathered at a time
constexpr size_t SEGMENT = 1024;               // elements of stages at a time: what the first cache holds

size_t divided(size_t value, size_t by) { return (value + by - 1) / by; }

std::vector<const ConvKernels *> supported() {
    std::vector<const ConvKernels *> sets;
#if defined(LUT4TOOL_X86_KERNELS)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        if (__builtin_cpu_supports("avx512f")) sets.push_back(&avx512_convs);
        sets.push_back(&avx2_convs);
    }
#elif defined(LUT4TOOL_NEON_KERNELS)
    sets.push_back(&neon_convs);
#endif
    sets.push_back(&portable_convs);
    return sets;
}

const ConvKernels *chosen = supported().front();

size_t rows_of_block(const ConvKernels &set, size_t left) {
    if (left >= set.rows || left > 4) return set.rows;
    return left > 2 ? 4 : left;
}

// ---- stages

LUT4TOOL_CLONES void affine(float *v, size_t count, float a, float b) {
    for (size_t i = 0; i < count; ++i) v[i] = v[i] * a + b;
}

LUT4TOOL_CLONES void affine_of_each(float *v, size_t count, const float *a, const float *b) {
    for (size_t i = 0; i < count; ++i) v[i] = v[i] * a[i] + b[i];
}

LUT4TOOL_CLONES void clip(float *v, size_t count, float low, float high) {
    for (size_t i = 0; i < count; ++i) {
        const float raised = v[i] < low ? low : v[i];
        v[i] = raised > high ? high : raised;
    }
}

LUT4TOOL_CLONES void leaky(float *v, size_t count, float a) {
    for (size_t i = 0; i < count; ++i) v[i] = v[i] < 0.0f ? a * v[i] : v[i];
}

LUT4TOOL_CLONES void sigmoids(float *v, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] = sigmoid(v[i]);
}

LUT4TOOL_CLONES void tangents(float *v, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] = hyperbolic_tangent(v[i]);
}

LUT4TOOL_CLONES void error_functions(float *v, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] = error_function(v[i]);
}

LUT4TOOL_CLONES void add(float *v, const float *by, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] += by[i];
}

LUT4TOOL_CLONES void multiply_by(float *v, const float *by, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] *= by[i];
}

// The stages but the first `done` on elements [first, first + count) of plane `plane`, which v holds.
void run_segment(const Stages &stages, size_t done, const std::vector<Operand> &operands, float *v, size_t count,
                 size_t plane, size_t channel, size_t points, size_t first) {
    float saved[SEGMENT];
    size_t operand = 0;
    for (size_t number = done; number < stages.size(); ++number) {
        const Stage &stage = stages[number];
        switch (stage.kind) {
            case Stage::affine: affine(v, count, stage.a, stage.b); break;
            case Stage::channel_affine: affine(v, count, stage.scale[channel], stage.shift[channel]); break;
            case Stage::point_affine: affine_of_each(v, count, &stage.scale[first], &stage.shift[first]); break;
            case Stage::clip: clip(v, count, stage.a, stage.b); break;
            case Stage::leaky: leaky(v, count, stage.a); break;
            case Stage::sigmoid: sigmoids(v, count); break;
            case Stage::tanh: tangents(v, count); break;
            case Stage::erf: error_functions(v, count); break;
            case Stage::save: std::copy_n(v, count, saved); break;
            case Stage::add_saved: add(v, saved, count); break;
            case Stage::mul_saved: multiply_by(v, saved, count); break;
            case Stage::add_operand:
            case Stage::mul_operand: {
                const Operand &by = operands[operand++];
                const bool adds = stage.kind == Stage::add_operand;
                if (by.plane) {
                    affine(v, count, adds ? 1.0f : by.data[plane], adds ? by.data[plane] : 0.0f);
                } else if (adds) {
                    add(v, by.data + plane * points + first, count);
                } else {
                    multiply_by(v, by.data + plane * points + first, count);
                }
            }
        }
    }
}

// Whether planes that follow each other may be taken for one.
bool alike(const Stages &stages, const std::vector<Operand> &operands) {
    for (const Stage &stage : stages)
        if (stage.kind == Stage::channel_affine || stage.kind == Stage::point_affine) return false;
    for (const Operand &operand : operands)
        if (operand.plane) return false;
    return true;
}

void run_range(const Stages &stages, size_t done, const std::vector<Operand> &operands, float *v, size_t count,
               size_t plane, size_t channel, size_t points, size_t first) {
    for (size_t at = 0; at < count; at += SEGMENT)
        run_segment(stages, done, operands, v + at, std::min(SEGMENT, count - at), plane, channel, points, first + at);
}

// ---- the scratch

// Part of the outputs, [images, rows, columns) of one group: all columns, or one row; all rows, or one image.
struct Region {
    size_t image, images, row, rows, column, columns;
};

// What of a channel lies together in the scratch, from `at` on: in line y element x is that of the input's row y * stride +
// down - before and column x * stride + right - before, which is within the input from `top` to `bottom` and `left` to `end`.
struct Part {
    size_t at, down, right, top, bottom, left, end;
};

// Where a region's input lies in the scratch: what output (i, y, x) reads at i * image + y * width + x, kernel position t
// at taps[t] from there, `depth` of them `step` apart; channels `channel` apart.
struct Layout {
    size_t width, height, image, points, depth, step, channel, floats;
    std::vector<size_t> taps;
    std::vector<Part> parts;
};

// Stride phases of an axis that a kernel touches at most, and the furthest that it shifts.
size_t phases(const Convolution &s, size_t axis) {
    return std::min(s.stride[axis], (s.kernel[axis] - 1) * s.dilation[axis] + 1);
}
size_t reach(const Convolution &s, size_t axis) { return (s.kernel[axis] - 1) * s.dilation[axis] / s.stride[axis]; }

// Positions [0, count) of a line whose element q is input element q * stride + offset - before, where inside: [first, last).
void inside(size_t count, size_t size, size_t stride, size_t offset, size_t before, size_t &first, size_t &last) {
    first = offset >= before ? 0 : divided(before - offset, stride);
    last = size + before > offset ? std::min(count, divided(size + before - offset, stride)) : 0;
    first = std::min(first, last);
}

void add_part(const Convolution &s, const Region &region, Layout &layout, size_t at, size_t down, size_t right) {
    Part part{at, region.row * s.stride[0] + down, region.column * s.stride[1] + right, 0, 0, 0, 0};
    inside(layout.height, s.size[0], s.stride[0], part.down, s.before[0], part.top, part.bottom);
    inside(layout.width, s.size[1], s.stride[1], part.right, s.before[1], part.left, part.end);
    if (part.left == part.end) part.top = part.bottom;
    layout.parts.push_back(part);
}

// Whether regions lie in their images alike.
bool alike(const Region &a, const Region &b) {
    return a.images == b.images && a.row == b.row && a.rows == b.rows && a.column == b.column && a.columns == b.columns;
}

// Where outputs are few in a line, the lines' ends that are computed for nothing cost more than the windows unrolled.
bool unrolls(const Convolution &s, size_t rows, size_t columns) {
    const size_t all = (rows + reach(s, 0)) * (columns + reach(s, 1));
    const size_t area = s.kernel[0] * s.kernel[1];
    return area > 1 && s.kernels >= area && 4 * all > 5 * rows * columns && s.depth * area * rows * columns <= CACHED;
}

// Lines of elements a stride apart, a part for each stride phase: a kernel position is a shift. Or the windows unrolled, a
// part for each kernel position.
Layout layout_of(const Convolution &s, const Region &region) {
    Layout layout{};
    const bool unrolled = unrolls(s, region.rows, region.columns);
    layout.width = region.columns + (unrolled ? 0 : reach(s, 1));
    layout.height = region.rows + (unrolled ? 0 : reach(s, 0));
    layout.image = layout.width * layout.height;
    layout.points = (region.images - 1) * layout.image + (region.rows - 1) * layout.width + region.columns;
    const size_t used[2] = {phases(s, 0), phases(s, 1)}, area = s.kernel[0] * s.kernel[1];
    const size_t plane = divided(region.images * layout.image, LINE) * LINE, count = unrolled ? area : used[0] * used[1];
    layout.channel = unrolled ? count * plane : (count * plane / LINE | 1) * LINE;  // odd lines share no cache set
    layout.depth = unrolled ? s.depth * area : s.depth;
    layout.step = unrolled ? plane : layout.channel;
    layout.floats = s.depth * layout.channel + LINE;  // the last vector may reach over the end
    if (unrolled) layout.taps.push_back(0);
    for (size_t i = 0; i < s.kernel[0]; ++i) {
        for (size_t j = 0; j < s.kernel[1]; ++j) {
            const size_t y = i * s.dilation[0], x = j * s.dilation[1];
            const size_t phase = y % s.stride[0] * used[1] + x % s.stride[1];
            if (unrolled) add_part(s, region, layout, layout.parts.size() * plane, y, x);
            else layout.taps.push_back(phase * plane + y / s.stride[0] * layout.width + x / s.stride[1]);
        }
    }
    for (size_t phase = 0; !unrolled && phase < count; ++phase)
        add_part(s, region, layout, phase * plane, phase / used[1], phase % used[1]);
    return layout;
}

template <size_t N>
void copy_ends(float *to, const float *from, size_t count) {  // N <= count <= 2 * N
    float first[N], last[N];
    std::memcpy(first, from, sizeof first);
    std::memcpy(last, from + count - N, sizeof last);
    std::memcpy(to, first, sizeof first);
    std::memcpy(to + count - N, last, sizeof last);
}

// memcpy of few floats without its call.
inline void copy(float *to, const float *from, size_t count) {
    for (; count > 32; count -= 16, to += 16, from += 16) std::memcpy(to, from, 16 * sizeof(float));
    if (count >= 16) {
        copy_ends<16>(to, from, count);
    } else if (count >= 8) {
        copy_ends<8>(to, from, count);
    } else if (count >= 4) {
        copy_ends<4>(to, from, count);
    } else {
        for (size_t i = 0; i < count; ++i) to[i] = from[i];
    }
}

LUT4TOOL_CLONES void copy_every(float *to, const float *from, size_t count, size_t stride) {
    if (stride == 2) {
        for (size_t i = 0; i < count; ++i) to[i] = from[2 * i];
    } else {
        for (size_t i = 0; i < count; ++i) to[i] = from[i * stride];
    }
}

// Copy channels [from, to) of a region's input, x being channel 0 of the group in the region's first image.
void gather(const Convolution &s, const Region &region, const Layout &layout, const float *x, size_t from, size_t to,
            float *scratch) {
    const size_t plane = s.size[0] * s.size[1], image = s.groups * s.depth * plane;
    const size_t used = region.images * layout.image, whole = divided(used, LINE) * LINE;
    for (size_t channel = from; channel < to; ++channel) {
        for (const Part &part : layout.parts) {
            float *line = scratch + channel * layout.channel + part.at;
            const size_t rows = part.bottom - part.top, columns = part.end - part.left;
            if (rows * columns < layout.image) std::fill_n(line, whole, 0.0f);
            else std::fill_n(line + used, whole - used, 0.0f);  // what was there may be subnormal
            line += part.top * layout.width + part.left;
            const float *source = x + channel * plane + (part.top * s.stride[0] + part.down - s.before[0]) * s.size[1] +
                                  (part.left * s.stride[1] + part.right - s.before[1]);
            for (size_t i = 0; i < region.images; ++i, line += layout.image, source += image) {
                for (size_t row = 0; row < rows; ++row) {
                    const float *input = source + row * s.stride[0] * s.size[1];
                    if (s.stride[1] == 1) copy(line + row * layout.width, input, columns);
                    else copy_every(line + row * layout.width, input, columns, s.stride[1]);
                }
            }
        }
    }
}

// ---- the products

struct Work {
    const Convolution &s;
    const PackedWeights &weights;
    const float *x;
    float *y;
    const Stages &stages;
    const std::vector<Operand> &operands;
    size_t done;      // 1 where the first stage is a clip, which the kernels do: between low and high
    float low, high;
    bool alike;       // the stages do the same to every channel

    bool more() const { return done < stages.size(); }
};

// Copy a tile's points [first, first + count) of the layout, v, to where they belong in a channel's plane of y, that of
// the region's first image.
void scatter(const Convolution &s, const Region &region, const Layout &layout, const float *v, size_t first,
             size_t count, float *y) {
    size_t i = first / layout.image, row = first % layout.image / layout.width;
    size_t column = first % layout.image % layout.width;
    y += i * s.groups * s.kernels * s.out[0] * s.out[1] + (region.row + row) * s.out[1] + region.column;
    for (const float *end = v + count; v < end; column = 0) {
        if (row < region.rows && column < region.columns)
            copy(y + column, v, std::min(region.columns - column, size_t(end - v)));
        v += layout.width - column;
        y += s.out[1];
        if (++row == layout.height) {
            row = 0;
            y += s.groups * s.kernels * s.out[0] * s.out[1] - layout.height * s.out[1];
        }
    }
}

// The stages that were not done yet, on `rows` channels of a region from row `row` of a group.
void finish_rows(const Work &work, const Region &region, size_t group, size_t row, size_t rows) {
    const Convolution &s = work.s;
    const size_t points = s.out[0] * s.out[1], channels = s.groups * s.kernels, channel = group * s.kernels + row;
    const size_t begin = region.row * s.out[1] + region.column, part = region.rows * region.columns;
    const bool together = work.alike && part == points;  // the planes as one
    for (size_t i = region.image; i < region.image + region.images; ++i)
        for (size_t r = 0; r < (together ? 1 : rows); ++r)
            run_range(work.stages, work.done, work.operands, work.y + (i * channels + channel + r) * points + begin,
                      together ? part * rows : part, i * channels + channel + r, channel + r, points, begin);
}

// How a region's points are divided into tiles: `lines` lines of `points` each, whose results lie in y as they are made
// (straight), or need to be moved there.
struct Lines {
    size_t lines, points;
    bool straight;
};

Lines lines_of(const Region &region, const Layout &layout, size_t lanes) {
    if (region.images == 1 && (region.rows == 1 || layout.width == region.columns)) return {1, layout.points, true};
    const size_t whole = divided(region.columns, lanes) * lanes * region.rows;
    if (region.images == 1 && region.columns >= 2 * lanes && 20 * whole <= 21 * layout.points)
        return {region.rows, region.columns, true};
    return {1, layout.points, false};
}

// Kernels [from, to) of a group, from a multiple of the block, over a region's points, `input` its channel 0. A tile of
// points passes all of them while it is in the first cache, so many at a time that their weights stay in the second. The
// last tile of points that lie straight ends where they end: nothing is read or written past them.
void multiply_region(const Work &work, const Region &region, const Layout &layout, size_t group, const float *input,
                     size_t from, size_t to) {
    const Convolution &s = work.s;
    const ConvKernels &set = *work.weights.set;
    const Lines lines = lines_of(region, layout, set.lanes);
    const size_t lanes = set.lanes, vectors = divided(lines.points, lanes), points = s.out[0] * s.out[1];
    const size_t image = s.groups * s.kernels * points, begin = region.row * s.out[1] + region.column;
    const size_t most = s.kernels == 1 ? set.vectors_of_one : set.vectors;
    const bool exact = lines.straight && lines.points >= lanes;
    const size_t tiles = std::max<size_t>(divided(vectors, most), exact && lines.points % lanes ? 2 : 1);
    const size_t together = std::max<size_t>(WEIGHTS / (layout.depth * layout.taps.size()) / set.rows, 1) * set.rows;
    const bool early = work.alike && work.operands.empty();  // the stages are done before the tile is copied
    const bool through = early && work.more();
    alignas(64) float tile[8 * 3 * 16];
    for (size_t last; from < to; from = last) {
        last = std::min(to, from + together);
        for (size_t t = 0, at = 0; t < tiles * lines.lines; ++t) {
            const size_t line = t / tiles, left = tiles - t % tiles;
            at = left == tiles ? 0 : at;
            const size_t some = (vectors - at) / left, width = some * lanes;
            const size_t first = exact ? std::min(at * lanes, lines.points - width) : at * lanes;
            const size_t count = std::min(width, lines.points - first), place = line * s.out[1] + first;
            at += some;
            for (size_t row = from, rows; row < last; row += rows) {
                rows = rows_of_block(set, s.kernels - row);
                const size_t real = std::min(rows, s.kernels - row);
                const bool direct = exact && real == rows && !through;
                float *target = work.y + region.image * image + (group * s.kernels + row) * points;
                set.multiply(rows, some)(work.weights.block(group, row), work.weights.offsets(group, row),
                                         input + line * layout.width + first, layout.depth, layout.step,
                                         layout.taps.data(), layout.taps.size(), work.low, work.high,
                                         direct ? target + begin + place : tile, direct ? points : width);
                if (through) run_segment(work.stages, work.done, work.operands, tile, real * width, 0, 0, points, 0);
                for (size_t r = 0; !direct && r < real; ++r) {
                    if (lines.straight) copy(target + r * points + begin + place, tile + r * width, count);
                    else scatter(s, region, layout, tile + r * width, first, count, target + r * points);
                }
            }
        }
        if (!early) finish_rows(work, region, group, from, last - from);
    }
}

// The same for channels with kernels of their own, `channels` groups from `group` on.
void multiply_channels(const Work &work, const Region &region, const Layout &layout, size_t group, size_t channels,
                       const float *input) {
    const Convolution &s = work.s;
    const size_t points = s.out[0] * s.out[1], begin = region.row * s.out[1] + region.column;
    for (size_t channel = group; channel < group + channels; ++channel, input += layout.channel) {
        for (size_t i = 0; i < region.images; ++i)
            work.weights.set->plane(work.weights.block(channel, 0), *work.weights.offsets(channel, 0),
                                    input + i * layout.image, layout.width, layout.taps.data(), layout.taps.size(),
                                    region.rows, region.columns, work.low, work.high,
                                    work.y + ((region.image + i) * s.groups + channel) * points + begin, s.out[1]);
        if (work.more()) finish_rows(work, region, channel, 0, 1);
    }
}

// Whether a region's input can be read where it is: a kernel of one point.
bool readable(const Convolution &s, const Region &region) {
    const size_t plane = s.size[0] * s.size[1];
    if (s.kernel[0] * s.kernel[1] != 1 || s.stride[0] * s.stride[1] != 1 || s.before[0] + s.before[1] != 0) return false;
    if (plane != s.out[0] * s.out[1] || region.images != 1 || region.rows * region.columns < LINE) return false;
    return plane % 1024 != 0 || s.kernels < 16 || s.depth < 16;  // else all channels are in the same cache sets
}

Layout straight_layout(const Convolution &s, const Region &region) {
    Layout layout{};
    layout.width = region.columns, layout.height = region.rows, layout.points = region.rows * region.columns;
    layout.image = layout.points, layout.depth = s.depth, layout.step = s.size[0] * s.size[1], layout.taps = {0};
    return layout;
}

// The sizes of the regions that the outputs of a group are divided into: images, rows, columns.
Region region_of(const Convolution &s, unsigned threads) {
    const size_t used = s.depth * phases(s, 0) * phases(s, 1), points = s.out[0] * s.out[1], parts = s.batch * s.groups;
    const size_t line = used * (s.out[1] + reach(s, 1)), fits = CACHED / line;
    const size_t least = divided(FEW_POINTS, s.out[1]);
    Region region{0, 1, 0, s.out[0], 0, s.out[1]};
    if (points < FEW_POINTS && s.batch > 1) {  // small images: several at a time
        const bool unrolled = unrolls(s, s.out[0], s.out[1]);
        const size_t one = unrolled ? s.depth * s.kernel[0] * s.kernel[1] * points : line * (s.out[0] + reach(s, 0));
        const size_t most = std::min({divided(2 * FEW_POINTS, points), std::max<size_t>(CACHED / one, 1), s.batch});
        region.images = std::clamp(divided(s.batch, 2 * threads), std::min(divided(FEW_POINTS, points), most), most);
        return region;
    }
    const auto rows_of = [&](size_t rows) {  // as many regions of even height
        rows = std::clamp(rows, std::min(least, s.out[0]), s.out[0]);
        return divided(s.out[0], divided(s.out[0], rows));
    };
    region.rows = rows_of(std::min(std::max<size_t>(POINTS / s.out[1], 1), fits > reach(s, 0) ? fits - reach(s, 0) : 0));
    if (parts * divided(s.out[0], region.rows) < 2 * threads && threads > 1)
        region.rows = std::min(region.rows, rows_of(s.out[0] * parts / (2 * threads)));
    if (region.rows == 1) {  // long lines
        const size_t column = used * (1 + reach(s, 0)), wide = CACHED / column;
        size_t columns = std::min(POINTS, wide > reach(s, 1) ? wide - reach(s, 1) : 0);
        if (parts * s.out[0] < 2 * threads && threads > 1) columns = std::min(columns, s.out[1] * parts / (2 * threads));
        columns = std::clamp(columns, std::min(FEW_POINTS, s.out[1]), s.out[1]);
        region.columns = divided(divided(s.out[1], divided(s.out[1], columns)), LINE) * LINE;
        region.columns = std::min(region.columns, s.out[1]);
    }
    return region;
}

float *aligned(std::vector<float> &buffer, size_t floats) {
    if (buffer.size() < floats + LINE) buffer.resize(floats + LINE);
    const size_t past = reinterpret_cast<std::uintptr_t>(buffer.data()) / sizeof(float) % LINE;
    return buffer.data() + (LINE - past) % LINE;
}

}  // namespace

const float *PackedWeights::block(size_t group, size_t row) const {
    return data.data() + (group * padded + row) * depth * area;
}
const float *PackedWeights::offsets(size_t group, size_t row) const { return bias.data() + group * padded + row; }

// Subnormal numbers cost a processor over 100 cycles each, and training leaves them, and weights that make them, where
// channels decay: weights below 2^-100 are taken for 0 beside one 2^60 times larger.
static float least_weight(const float *w, size_t count) {
    float most = 0;
    for (size_t k = 0; k < count; ++k) most = std::max(most, std::fabs(w[k]));
    return most >= 0x1p-40f ? 0x1p-100f : 0.0f;
}

PackedWeights pack_weights(const float *w, const float *bias, size_t groups, size_t kernels, size_t depth, size_t area) {
    PackedWeights packed{chosen, groups, kernels, depth, area, 0, {}, {}};
    for (size_t row = 0; row < kernels; row += rows_of_block(*chosen, kernels - row))
        packed.padded = row + rows_of_block(*chosen, kernels - row);
    const size_t length = depth * area;
    packed.data.resize(groups * packed.padded * length);
    packed.bias.resize(groups * packed.padded);
    const float least = least_weight(w, groups * kernels * length);
    for (size_t group = 0; group < groups; ++group) {
        for (size_t row = 0, rows; row < kernels; row += rows) {
            rows = rows_of_block(*chosen, kernels - row);
            float *to = packed.data.data() + (group * packed.padded + row) * length;
            for (size_t r = 0; r < std::min(rows, kernels - row); ++r) {
                const float *from = w + (group * kernels + row + r) * length;
                for (size_t k = 0; k < length; ++k) to[k * rows + r] = std::fabs(from[k]) < least ? 0.0f : from[k];
                if (bias) packed.bias[group * packed.padded + row + r] = bias[group * kernels + row + r];
            }
        }
    }
    return packed;
}

void convolve(const Convolution &s, const PackedWeights &weights, const float *x, float *y, const Stages &stages,
              const std::vector<Operand> &operands, unsigned threads) {
    const size_t plane = s.size[0] * s.size[1], outputs = s.batch * s.groups * s.kernels * s.out[0] * s.out[1];
    if (outputs * (s.depth * s.kernel[0] * s.kernel[1] + 4 * stages.size()) <= SMALL) threads = 1;
    const Region size = region_of(s, threads);
    const size_t down = divided(s.out[0], size.rows), across = divided(s.out[1], size.columns);
    const size_t regions = down * across, parts = divided(s.batch, size.images) * s.groups * regions;
    const bool clips = !stages.empty() && stages.front().kind == Stage::clip;
    const float low = clips ? stages.front().a : -HUGE_VALF, high = clips ? stages.front().b : HUGE_VALF;
    const Work work{s, weights, x, y, stages, operands, clips, low, high, alike(stages, operands)};
    const auto region_at = [&](size_t part, size_t &group) {
        Region region = size;
        group = part / regions % s.groups;
        region.image = part / regions / s.groups * size.images;
        region.row = part % regions / across * size.rows, region.column = part % across * size.columns;
        region.images = std::min(size.images, s.batch - region.image);
        region.rows = std::min(size.rows, s.out[0] - region.row);
        region.columns = std::min(size.columns, s.out[1] - region.column);
        return region;
    };
    const auto start = [&](const Region &region, size_t group) {
        return x + (region.image * s.groups + group) * s.depth * plane;
    };
    const size_t blocks = divided(s.kernels, weights.set->rows);
    if (parts < 2 * threads && threads > 1 && blocks > 1) {  // few regions: the channels, then the kernels are divided
        std::vector<float> buffer;
        for (size_t part = 0; part < parts; ++part) {
            size_t group;
            const Region region = region_at(part, group);
            const bool read = readable(s, region);
            const Layout layout = read ? straight_layout(s, region) : layout_of(s, region);
            float *scratch = read ? nullptr : aligned(buffer, layout.floats);
            const size_t channels = divided(s.depth, 2 * threads), rows = divided(blocks, PIECES * threads) * weights.set->rows;
            if (!read)
                parallel(divided(s.depth, channels), threads, [&](size_t piece) {
                    const size_t first = piece * channels;
                    gather(s, region, layout, start(region, group), first, std::min(s.depth, first + channels), scratch);
                });
            const float *input = read ? start(region, group) + region.row * s.out[1] + region.column : scratch;
            parallel(divided(s.kernels, rows), threads, [&](size_t piece) {
                const size_t first = piece * rows;
                multiply_region(work, region, layout, group, input, first, std::min(s.kernels, first + rows));
            });
        }
        return;
    }
    const size_t some = divided(parts, std::min(parts, threads == 1 ? 1 : 2 * PIECES * threads));
    const bool separate = s.depth * s.kernels == 1;  // each channel has a kernel of its own
    parallel(divided(parts, some), threads, [&](size_t piece) {
        thread_local std::vector<float> buffer;
        Layout layout{};
        Region last{0, 0, 0, 0, 0, 0};
        const size_t end = std::min(parts, (piece + 1) * some);
        for (size_t part = piece * some, next; part < end; part = next) {
            size_t group;
            const Region region = region_at(part, group);
            next = part + 1;
            if (!separate && readable(s, region)) {
                multiply_region(work, region, straight_layout(s, region), group,
                                start(region, group) + region.row * s.out[1] + region.column, 0, s.kernels);
                continue;
            }
            if (!alike(region, last)) layout = layout_of(s, last = region);
            if (separate && regions == 1) next = std::min({part + CHANNELS, end, part - group + s.groups});
            const size_t channels = separate ? next - part : s.depth;
            float *scratch = aligned(buffer, channels * layout.channel + LINE);
            gather(s, region, layout, start(region, group), 0, channels, scratch);
            if (separate) multiply_channels(work, region, layout, group, channels, scratch);
            else multiply_region(work, region, layout, group, scratch, 0, s.kernels);
        }
    });
}

void run_stages(const Stages &stages, const std::vector<Operand> &operands, const float *x, size_t planes,
                size_t channels, size_t points, float *y, unsigned threads) {
    const size_t length = points > 8 * SEGMENT ? 4 * SEGMENT : points;  // of a piece's part of a plane
    const size_t parts = planes * divided(points, length), across = divided(points, length);
    if (planes * points * stages.size() <= SMALL / 16) threads = 1;
    const size_t some = divided(parts, std::min(parts, threads == 1 ? 1 : PIECES * threads));
    parallel(divided(parts, some), threads, [&](size_t piece) {
        for (size_t part = piece * some; part < std::min(parts, (piece + 1) * some); ++part) {
            const size_t plane = part / across, first = part % across * length;
            const size_t count = std::min(length, points - first);
            float *to = y + plane * points + first;
            const float *from = x + plane * points + first;
            for (size_t at = 0; at < count; at += SEGMENT) {
                const size_t now = std::min(SEGMENT, count - at);
                if (to != from) std::copy_n(from + at, now, to + at);
                run_segment(stages, 0, operands, to + at, now, plane, plane % channels, points, first + at);
            }
        }
    });
}

std::vector<const char *> conv_sets() {
    std::vector<const char *> names;
    for (const ConvKernels *set : supported()) names.push_back(set->name);
    return names;
}

const char *conv_set() { return chosen->name; }

bool force_conv_set(const char *name) {
    for (const ConvKernels *set : supported()) {
        if (std::string(set->name) == name) {
            chosen = set;
            return true;
        }
    }
    return false;
}

}  // namespace lut4tool
