#include "product.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "threads.h"

namespace lut4tool {
namespace {

using std::size_t;

std::vector<const ProductKernels *> supported() {
    std::vector<const ProductKernels *> sets;
#if defined(LUT4TOOL_X86_KERNELS)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        if (__builtin_cpu_supports("avx512f")) {
#if defined(LUT4TOOL_AMX_KERNELS)
            static ProductKernels amx = avx512_products;
            amx.name = "amx";
            if ((amx.digits = amx_digits()) != nullptr) sets.push_back(&amx);
#endif
            sets.push_back(&avx512_products);
        }
        sets.push_back(&avx2_products);
    }
#elif defined(LUT4TOOL_NEON_KERNELS)
    sets.push_back(&neon_products);
#endif
    sets.push_back(&portable_products);
    return sets;
}

const ProductKernels *chosen = supported().front();

// Rows of x that are multiplied at a time: their sums, in double, stay near the cores.
constexpr size_t ROWS_AT_A_TIME = 512;

// Digits of more rows do not stay near; making one output in so many again costs as much as all in digits.
constexpr size_t ROWS_OF_DIGITS = 256, MOST_DOUBTFUL = 1024;

// Elements of a weight below which another thread costs more than it saves, and those of a piece of work.
constexpr size_t ELEMENTS_A_PIECE = size_t(1) << 18;

// Pieces of whole units, a unit being so many outputs, and several a thread where the work is worth it.
size_t pieces_of(size_t units, size_t work, unsigned threads) {
    const size_t worth = std::max<size_t>(1, work / ELEMENTS_A_PIECE);
    return std::max<size_t>(1, std::min({units, worth, size_t(threads) * 8}));
}

float weight_of(const Packed4 &weight, size_t block, unsigned code) {
    float value = weight.table[code];
    if (weight.zeros != Packed4::Zeros::none) value = rounded(value - zero_of(weight, block), weight.rounding);
    return rounded(value * scale_of(weight, block), weight.rounding);
}

unsigned code_of(const Packed4 &weight, size_t flat) {
    const bool high = (flat % 2 == 0) == weight.high_nibble_first;
    return high ? weight.packed[flat / 2] >> 4 : weight.packed[flat / 2] & 15;
}

// x in the order that a chunk's two lookups give its elements: all low nibbles, then all high ones; zeros at the end.
std::vector<float> in_chunks(const Packed4 &weight, const float *x) {
    const size_t lanes = chosen->lanes, chunk = 2 * lanes, depth = weight.depth();
    std::vector<float> packed((depth + chunk - 1) / chunk * chunk);
    const bool low = weight.high_nibble_first;  // which of two elements is in a low nibble
    size_t k = 0;
    for (; k + chunk <= depth; k += chunk) {
        for (size_t i = 0; i < lanes; ++i) {
            packed[k + i] = x[k + 2 * i + low];
            packed[k + lanes + i] = x[k + 2 * i + !low];
        }
    }
    for (size_t i = 0; k + i < depth; ++i) packed[k + (i % 2 != low) * lanes + i / 2] = x[k + i];
    return packed;
}

void multiply_row(const Packed4 &weight, const float *x, float *y, unsigned threads) {
    const std::vector<float> packed = weight.along_k ? in_chunks(weight, x) : std::vector<float>();
    const float *values = weight.along_k ? packed.data() : x;
    // Rows along N are read in runs of at least 512 bytes of each: the longer the better, so in a piece a thread.
    const size_t outputs = weight.outputs(), unit = weight.along_k ? 1 : 1024, units = (outputs + unit - 1) / unit;
    const size_t most = weight.along_k ? units : threads;
    const size_t pieces = std::min(pieces_of(units, outputs * weight.depth(), threads), most);
    parallel(pieces, threads, [&](size_t piece) {
        const size_t begin = units * piece / pieces * unit, end = units * (piece + 1) / pieces * unit;
        chosen->gemv(weight, values, y, begin, std::min(end, outputs));
    });
}

bool all_finite(const float *values, size_t count) {
    bool finite = true;
    for (size_t i = 0; i < count; ++i) finite &= (bits_of(values[i]) & 0x7f800000) != 0x7f800000;
    return finite;
}

bool serves_digits(const Packed4 &weight) { return chosen->digits && chosen->digits->serves(weight); }

// Products in whole numbers, true where they serve this x; y may then be NaN in a few places, which are still to be made.
bool multiply_digits(const Packed4 &weight, const float *x, size_t M, float *y, unsigned threads) {
    const size_t depth = weight.depth(), outputs = weight.outputs();
    if (!all_finite(x, M * depth)) return false;
    const DigitShape shape = chosen->digits->shape(weight, M);
    Scratch<std::int8_t> planes;
    Scratch<DigitScales> scales;
    std::vector<double> row_scale(16 * shape.tiles);
    const DigitRows rows{shape, planes.at_least(shape.bytes), scales.at_least(shape.scales), row_scale.data()};
    parallel(shape.tiles, M * depth < ELEMENTS_A_PIECE ? 1 : threads,
             [&](size_t tile) { chosen->digits->split(weight, x, tile, rows); });
    const size_t unit = 64, units = (outputs + unit - 1) / unit;
    const size_t pieces = pieces_of(units, outputs * depth * (1 + M / 64), threads), few = 16 + M * outputs / MOST_DOUBTFUL;
    std::atomic<size_t> doubtful{0};
    parallel(pieces, threads, [&](size_t piece) {
        if (doubtful > few) return;
        const size_t begin = units * piece / pieces * unit, end = std::min(units * (piece + 1) / pieces * unit, outputs);
        doubtful += chosen->digits->multiply(weight, rows, y, begin, end);
    });
    return doubtful <= few;
}

void multiply_tile(const Packed4 &weight, const float *x, size_t M, float *y, unsigned threads) {
    const size_t depth = weight.depth(), strip = 2 * chosen->lanes, strips = (weight.outputs() + strip - 1) / strip;
    const size_t padded = (depth + PADDING - 1) / PADDING * PADDING, most = chosen->rows_of_tile;
    std::vector<float> values(M * padded);
    const PackedRows rows{values.data(), M, (M + most - 1) / most};
    const size_t panels = (depth + PANEL - 1) / PANEL;
    parallel(panels, M * depth < ELEMENTS_A_PIECE ? 1 : threads, [&](size_t panel) {
        const size_t k0 = panel * PANEL, steps = std::min(PANEL, depth - k0), stored = std::min(PANEL, padded - k0);
        for (size_t tile = 0; tile < rows.tiles; ++tile) {
            const size_t begin = rows.begin(tile), count = rows.begin(tile + 1) - begin;
            float *out = values.data() + k0 * M + begin * stored;
            for (size_t r = 0; r < count; ++r) {
                for (size_t k = 0; k < steps; ++k) out[k * count + r] = x[(begin + r) * depth + k0 + k];
            }
        }
    });
    const size_t pieces = pieces_of(strips, weight.outputs() * depth * (1 + M / 16), threads);
    parallel(pieces, threads, [&](size_t piece) {
        chosen->tile(weight, rows, y, strips * piece / pieces, strips * (piece + 1) / pieces);
    });
}


// One output in double, which neither overflows nor loses what an overflow of float32 hid.
float exactly(const Packed4 &weight, const Blocks &blocks, const float *x, size_t n) {
    double sum = 0;
    for (size_t k = 0; k < weight.depth() && !std::isnan(sum); ++k) {
        const size_t flat = weight.along_k ? n * weight.stride + k : k * weight.stride + n;
        sum += double(x[k]) * weight_of(weight, blocks.of(flat), code_of(weight, flat));
    }
    return float(sum);
}

// What is not finite where x is may come from an overflow on the way: it is made again.
void mend_overflows(const Packed4 &weight, const float *x, size_t M, float *y, unsigned threads) {
    const size_t outputs = weight.outputs();
    const Blocks blocks(weight.block_size);
    for (size_t m = 0; m < M; ++m) {
        float *row = y + m * outputs;
        if (all_finite(row, outputs) || !all_finite(x + m * weight.depth(), weight.depth())) continue;
        parallel(outputs, threads, [&](size_t n) {
            if (!all_finite(row + n, 1)) row[n] = exactly(weight, blocks, x + m * weight.depth(), n);
        });
    }
}

}  // namespace

bool serves_gemv(const Packed4 &weight) { return weight.block_size % 32 == 0 && weight.stride % 32 == 0; }

void decode_run(const Packed4 &weight, size_t row, size_t begin, size_t end, float *out) {
    const Blocks blocks(weight.block_size);
    const size_t last = row * weight.stride + end;
    for (size_t flat = row * weight.stride + begin; flat < last;) {
        const size_t block = blocks.of(flat), stop = std::min(last, (block + 1) * weight.block_size);
        float table[16];
        for (unsigned code = 0; code < 16; ++code) table[code] = weight_of(weight, block, code);
        for (; flat < stop; ++flat) *out++ = table[code_of(weight, flat)];
    }
}

ProductKernel chosen_kernel(const Packed4 &weight, size_t M) {
    return M == 1 && serves_gemv(weight) ? ProductKernel::gemv : ProductKernel::tile;
}

ProductKernel multiply(const Packed4 &weight, const float *x, size_t M, float *y, ProductKernel kernel, unsigned threads) {
    if (kernel == ProductKernel::automatic) kernel = chosen_kernel(weight, M);
    if (kernel == ProductKernel::digits && !serves_digits(weight)) kernel = ProductKernel::tile;
    const size_t depth = weight.depth(), outputs = weight.outputs();
    const size_t most = kernel == ProductKernel::gemv     ? 1
                        : kernel == ProductKernel::digits ? ROWS_OF_DIGITS
                                                          : ROWS_AT_A_TIME;
    const size_t parts = (M + most - 1) / most;
    for (size_t part = 0; part < parts; ++part) {
        const size_t m = M * part / parts, rows = M * (part + 1) / parts - m;
        if (kernel == ProductKernel::gemv) {
            multiply_row(weight, x + m * depth, y + m * outputs, threads);
            continue;
        }
        if (kernel == ProductKernel::digits && multiply_digits(weight, x + m * depth, rows, y + m * outputs, threads)) continue;
        kernel = ProductKernel::tile;
        multiply_tile(weight, x + m * depth, rows, y + m * outputs, threads);
    }
    mend_overflows(weight, x, M, y, threads);
    return kernel;
}

void multiply_panels(const float *x, size_t stride, size_t rows, const float *panels, size_t count, size_t depth,
                     const float *bias, float *out, size_t out_stride) {
    chosen->panels(x, stride, rows, panels, count, depth, bias, out, out_stride);
}

const char *product_instruction_set() { return chosen->name; }

bool use_product_instruction_set(const char *name) {
    for (const ProductKernels *kernels : supported()) {
        if (std::string(kernels->name) == name) {
            chosen = kernels;
            return true;
        }
    }
    return false;
}

}  // namespace lut4tool
