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
constexpr size_t LINE = 16;                    // floats of a cache line
constexpr size_t PIECES = 4;                   // pieces a thread
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

LUT4TOOL_CLONES void add(float *v, const float *by, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] += by[i];
}

LUT4TOOL_CLONES void multiply_by(float *v, const float *by, size_t count) {
    for (size_t i = 0; i < count; ++i) v[i] *= by[i];
}

// The stages on elements [first, first + count) of plane `plane`, which v holds.
void run_segment(const Stages &stages, const std::vector<Operand> &operands, float *v, size_t count, size_t plane,
                 size_t channel, size_t points, size_t first) {
    float saved[SEGMENT];
    size_t operand = 0;
    for (const Stage &stage : stages) {
        switch (stage.kind) {
            case Stage::affine: affine(v, count, stage.a, stage.b); break;
            case Stage::channel_affine: affine(v, count, stage.scale[channel], stage.shift[channel]); break;
            case Stage::point_affine: affine_of_each(v, count, &stage.scale[first], &stage.shift[first]); break;
            case Stage::clip: clip(v, count, stage.a, stage.b); break;
            case Stage::leaky: leaky(v, count, stage.a); break;
            case Stage::sigmoid: sigmoids(v, count); break;
            case Stage::tanh: tangents(v, count); break;
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

void run_range(const Stages &stages, const std::vector<Operand> &operands, float *v, size_t count, size_t plane,
               size_t channel, size_t points, size_t first) {
    for (size_t at = 0; at < count; at += SEGMENT)
        run_segment(stages, operands, v + at, std::min(SEGMENT, count - at), plane, channel, points, first + at);
}

// ---- the scratch

// Part of the outputs, [images, rows, columns) of one group: all columns, or one row; all rows, or one image.
struct Region {
    size_t image, images, row, rows, column, columns;
};

// Where a region's outputs lie in the scratch: output (i, y, x) at i * image + y * width + x, kernel position t of a
// channel at taps[t] from there, channels `channel` apart.
struct Layout {
    size_t width, height, image, plane, channel, points, floats;
    std::vector<size_t> taps;
};

// Stride phases of an axis that a kernel touches at most, and the furthest that it shifts.
size_t phases(const Convolution &s, size_t axis) {
    return std::min(s.stride[axis], (s.kernel[axis] - 1) * s.dilation[axis] + 1);
}
size_t reach(const Convolution &s, size_t axis) { return (s.kernel[axis] - 1) * s.dilation[axis] / s.stride[axis]; }

Layout layout_of(const Convolution &s, const Region &region) {
    Layout layout{};
    layout.width = region.columns + reach(s, 1);
    layout.height = region.rows + reach(s, 0);
    layout.image = layout.width * layout.height;
    layout.plane = divided(region.images * layout.image, LINE) * LINE;
    const size_t used[2] = {phases(s, 0), phases(s, 1)};
    layout.channel = (used[0] * used[1] * layout.plane / LINE | 1) * LINE;  // odd lines: channels share no cache set
    layout.points = (region.images - 1) * layout.image + (region.rows - 1) * layout.width + region.columns;
    layout.floats = s.depth * layout.channel + LINE;  // the last vector may reach over the end
    for (size_t i = 0; i < s.kernel[0]; ++i) {
        for (size_t j = 0; j < s.kernel[1]; ++j) {
            const size_t y = i * s.dilation[0], x = j * s.dilation[1];
            const size_t phase = y % s.stride[0] * used[1] + x % s.stride[1];
            layout.taps.push_back(phase * layout.plane + y / s.stride[0] * layout.width + x / s.stride[1]);
        }
    }
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
    if (count > 32) {
        std::memcpy(to, from, count * sizeof(float));
    } else if (count >= 16) {
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

// Positions [0, count) of a line whose element q is input element q * stride + offset - before, where inside: [first, last).
void inside(size_t count, size_t size, size_t stride, size_t offset, size_t before, size_t &first, size_t &last) {
    first = offset >= before ? 0 : divided(before - offset, stride);
    last = size + before > offset ? std::min(count, divided(size + before - offset, stride)) : 0;
    first = std::min(first, last);
}

// Copy channels [from, to) of a region's input, x being channel 0 of the group in the region's first image.
void gather(const Convolution &s, const Region &region, const Layout &layout, const float *x, size_t from, size_t to,
            float *scratch) {
    const size_t plane = s.size[0] * s.size[1], image = s.groups * s.depth * plane;
    const size_t used[2] = {phases(s, 0), phases(s, 1)};
    for (size_t phase = 0; phase < used[0] * used[1]; ++phase) {
        const size_t down = region.row * s.stride[0] + phase / used[1];
        const size_t right = region.column * s.stride[1] + phase % used[1];
        size_t top, bottom, left, end;
        inside(layout.height, s.size[0], s.stride[0], down, s.before[0], top, bottom);
        inside(layout.width, s.size[1], s.stride[1], right, s.before[1], left, end);
        if (left == end) top = bottom;
        for (size_t channel = from; channel < to; ++channel) {
            for (size_t i = 0; i < region.images; ++i) {
                float *line = scratch + channel * layout.channel + phase * layout.plane + i * layout.image;
                const float *input = x + i * image + channel * plane;
                std::fill(line, line + top * layout.width, 0.0f);
                line += top * layout.width;
                for (size_t row = top; row < bottom; ++row, line += layout.width) {
                    const float *source = input + (row * s.stride[0] + down - s.before[0]) * s.size[1] +
                                          (left * s.stride[1] + right - s.before[1]);
                    for (size_t q = 0; q < left; ++q) line[q] = 0.0f;
                    if (s.stride[1] == 1) {
                        copy(line + left, source, end - left);
                    } else {
                        copy_every(line + left, source, end - left, s.stride[1]);
                    }
                    for (size_t q = end; q < layout.width; ++q) line[q] = 0.0f;
                }
                std::fill(line, line + (layout.height - bottom) * layout.width, 0.0f);
            }
            float *rest = scratch + channel * layout.channel + phase * layout.plane;  // what was there may be subnormal
            std::fill(rest + region.images * layout.image, rest + layout.plane, 0.0f);
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
    bool alike;  // the stages do the same to every channel
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

// Kernels [from, to) of a group, from a multiple of the block, over a region's points, `input` its channel 0.
void multiply_region(const Work &work, const Region &region, const Layout &layout, size_t group, const float *input,
                     size_t from, size_t to) {
    const Convolution &s = work.s;
    const ConvKernels &set = *work.weights.set;
    const size_t lanes = set.lanes, vectors = divided(layout.points, lanes), points = s.out[0] * s.out[1];
    const size_t image = s.groups * s.kernels * points, begin = region.row * s.out[1] + region.column;
    const bool straight = region.images == 1 && (region.rows == 1 || layout.width == region.columns);
    const bool early = !straight && work.alike && work.operands.empty();  // the stages are done before the tile is copied
    alignas(64) float tile[8 * 3 * 16];
    for (size_t row = from, rows; row < to; row += rows) {
        rows = rows_of_block(set, s.kernels - row);
        const size_t real = std::min(rows, s.kernels - row), channel = group * s.kernels + row;
        const size_t most = rows == 1 ? set.vectors_of_one : set.vectors, tiles = divided(vectors, most);
        float *target = work.y + region.image * image + channel * points;
        for (size_t t = 0, at = 0; t < tiles; ++t) {
            const size_t some = (vectors - at) / (tiles - t), first = at * lanes;
            const size_t count = std::min(some * lanes, layout.points - first);
            const bool direct = straight && real == rows && count == some * lanes;
            at += some;
            set.multiply(rows, some)(work.weights.block(group, row), work.weights.offsets(group, row), input + first,
                                     s.depth, layout.channel, layout.taps.data(), layout.taps.size(),
                                     direct ? target + begin + first : tile, direct ? points : some * lanes);
            if (early && !work.stages.empty())
                run_segment(work.stages, work.operands, tile, real * some * lanes, 0, 0, points, 0);
            for (size_t r = 0; !direct && r < real; ++r)
                scatter(s, region, layout, tile + r * some * lanes, first, count, target + r * points);
        }
        const bool together = work.alike && region.rows * region.columns == points;  // the block's planes as one
        for (size_t i = 0; !early && !work.stages.empty() && i < region.images; ++i)
            for (size_t r = 0; r < (together ? 1 : real); ++r)
                run_range(work.stages, work.operands, target + i * image + r * points + begin,
                          region.rows * region.columns * (together ? real : 1),
                          (region.image + i) * s.groups * s.kernels + channel + r, channel + r, points, begin);
    }
}

// Whether a region's input can be read where it is: a kernel of one point, and a last vector that ends within x.
bool readable(const Convolution &s, const Region &region, size_t group) {
    const size_t plane = s.size[0] * s.size[1], lanes = LINE;
    if (s.kernel[0] * s.kernel[1] != 1 || s.stride[0] * s.stride[1] != 1 || s.before[0] + s.before[1] != 0) return false;
    if (plane != s.out[0] * s.out[1] || region.images != 1) return false;
    if (plane % 1024 == 0 && s.kernels >= 16 && s.depth >= 16) return false;  // all channels in the same cache sets
    const size_t start = ((region.image * s.groups + group + 1) * s.depth - 1) * plane + region.row * s.out[1] + region.column;
    return start + divided(region.rows * region.columns, lanes) * lanes <= s.batch * s.groups * s.depth * plane;
}

Layout straight_layout(const Convolution &s, const Region &region) {
    Layout layout{};
    layout.width = region.columns, layout.height = region.rows, layout.points = region.rows * region.columns;
    layout.image = layout.points, layout.channel = s.size[0] * s.size[1], layout.taps = {0};
    return layout;
}

// The sizes of the regions that the outputs of a group are divided into: images, rows, columns.
Region region_of(const Convolution &s, unsigned threads) {
    const size_t used = s.depth * phases(s, 0) * phases(s, 1), points = s.out[0] * s.out[1], parts = s.batch * s.groups;
    const size_t line = used * (s.out[1] + reach(s, 1)), fits = CACHED / line;
    const size_t least = divided(FEW_POINTS, s.out[1]);
    Region region{0, 1, 0, s.out[0], 0, s.out[1]};
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
    } else if (points < FEW_POINTS && s.batch > 1 && region.rows == s.out[0]) {  // small images: several at a time
        const size_t one = line * (s.out[0] + reach(s, 0));
        const size_t most = std::min(divided(2 * FEW_POINTS, points), std::max<size_t>(CACHED / one, 1));
        region.images = std::clamp<size_t>(divided(s.batch, 2 * threads), 1, most);
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
    const Work work{s, weights, x, y, stages, operands, alike(stages, operands)};
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
            const bool read = readable(s, region, group);
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
    parallel(divided(parts, some), threads, [&](size_t piece) {
        thread_local std::vector<float> buffer;
        Layout layout{};
        Region last{0, 0, 0, 0, 0, 0};
        for (size_t part = piece * some; part < std::min(parts, (piece + 1) * some); ++part) {
            size_t group;
            const Region region = region_at(part, group);
            if (readable(s, region, group)) {
                multiply_region(work, region, straight_layout(s, region), group,
                                start(region, group) + region.row * s.out[1] + region.column, 0, s.kernels);
                continue;
            }
            if (region.images != last.images || region.rows != last.rows || region.columns != last.columns)
                layout = layout_of(s, last = region);
            float *scratch = aligned(buffer, layout.floats);
            gather(s, region, layout, start(region, group), 0, s.depth, scratch);
            multiply_region(work, region, layout, group, scratch, 0, s.kernels);
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
                run_segment(stages, operands, to + at, now, plane, plane % channels, points, first + at);
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
