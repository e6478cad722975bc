#include "panels.h"

#include <algorithm>
#include <vector>

#include "clones.h"
#include "product.h"
#include "threads.h"

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address, 0, 2)
#else
#define PREFETCH(address)
#endif

namespace lut4tool {
namespace {

using std::size_t;

constexpr size_t WORTH = size_t(1) << 21;  // multiplications that are worth a second thread
constexpr size_t GROUP = 4, PIECES = 4;    // panels that are multiplied together; pieces a thread

// The floats of one panel of bytes; those of the next group come near while this one is multiplied.
LUT4TOOL_CLONES void widen(const std::int8_t *bytes, size_t depth, const float *zeros, const float *factors, float *floats) {
    float zero[PANEL_COLUMNS], factor[PANEL_COLUMNS];  // which the floats do not overlap
    std::copy_n(zeros, PANEL_COLUMNS, zero);
    std::copy_n(factors, PANEL_COLUMNS, factor);
    for (size_t k = 0; k < depth * PANEL_COLUMNS; k += 64) PREFETCH(bytes + GROUP * depth * PANEL_COLUMNS + k);
    for (size_t k = 0; k < depth; ++k)
        for (size_t n = 0; n < PANEL_COLUMNS; ++n)
            floats[k * PANEL_COLUMNS + n] = (float(bytes[k * PANEL_COLUMNS + n]) - zero[n]) * factor[n];
}

}  // namespace

void multiply_prepared(const float *x, size_t rows, const PreparedWeight &panels, size_t N, size_t depth, const float *bias,
                       float *out, unsigned threads) {
    const size_t whole = N / PANEL_COLUMNS, count = (N + PANEL_COLUMNS - 1) / PANEL_COLUMNS, size = depth * PANEL_COLUMNS;
    const bool alone = threads == 1 || rows * N * depth < WORTH;
    const size_t groups = (count + GROUP - 1) / GROUP;
    const size_t across = alone ? 1 : std::min<size_t>(groups, PIECES * threads);
    const size_t down = alone ? 1 : std::max<size_t>(1, std::min<size_t>(rows / 12, PIECES * threads / across));
    parallel(across * down, alone ? 1 : threads, [&](size_t piece) {
        const size_t first = groups * (piece % across) / across * GROUP;
        const size_t last = std::min(count, groups * (piece % across + 1) / across * GROUP);
        const size_t row = rows * (piece / across) / down, some = rows * (piece / across + 1) / down - row;
        const float *left = x + row * depth;
        const auto product = [&](const float *floats, size_t panel, size_t end, float *target, size_t stride) {
            multiply_panels(left, depth, some, floats, end - panel, depth, bias ? bias + panel * PANEL_COLUMNS : nullptr,
                            target, stride);
        };
        const auto multiply = [&](size_t panel, size_t end, float *target, size_t stride) {
            if (panels.floats) return product(panels.floats + panel * size, panel, end, target, stride);
            thread_local std::vector<float> widened;  // a group at a time stays in the second cache
            widened.resize(std::max(widened.size(), GROUP * size));
            for (size_t next; panel < end; panel = next, target += GROUP * PANEL_COLUMNS) {
                next = std::min(end, panel + GROUP);
                for (size_t p = panel; p < next; ++p)
                    widen(panels.bytes + p * size, depth, panels.zeros + p * PANEL_COLUMNS,
                          panels.factors + p * PANEL_COLUMNS, &widened[(p - panel) * size]);
                product(widened.data(), panel, next, target, stride);
            }
        };
        if (first < std::min(last, whole)) multiply(first, std::min(last, whole), out + row * N + first * PANEL_COLUMNS, N);
        if (last <= whole) return;
        thread_local std::vector<float> edge;  // the last panel, which is wider than what is left of a row
        edge.resize(std::max(edge.size(), some * PANEL_COLUMNS));
        multiply(whole, count, edge.data(), PANEL_COLUMNS);
        for (size_t r = 0; r < some; ++r)
            std::copy_n(&edge[r * PANEL_COLUMNS], N - whole * PANEL_COLUMNS, out + (row + r) * N + whole * PANEL_COLUMNS);
    });
}

}  // namespace lut4tool
