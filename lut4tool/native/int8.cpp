#include "int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "clones.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define LUT4TOOL_VNNI
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define LUT4TOOL_AMX
#endif
#endif

namespace lut4tool {
namespace {

constexpr std::size_t COLUMNS = 16, GROUP = 4;         // columns of a panel; panels whose sums are made at a time
constexpr std::size_t ROWS = 32;                       // rows whose sums are made at a time
constexpr std::size_t STRIDE = GROUP * COLUMNS;        // of the sums of a row
constexpr std::size_t STREAMED = std::size_t(1) << 20;  // bytes of a weight that are worth a second thread
constexpr std::size_t PIECES = 4;                      // pieces a thread: what a late thread delays is one of them

// sums [rows, STRIDE] of `rows` (at most ROWS) rows of a with `count` (at most GROUP) panels of `depth` * 16 bytes.
using Dots = void (*)(const std::uint8_t *a, std::size_t rows, const std::int8_t *panels, std::size_t count,
                      std::size_t depth, std::int32_t *sums);

LUT4TOOL_CLONES void dots(const std::uint8_t *a, std::size_t rows, const std::int8_t *panels, std::size_t count,
                          std::size_t depth, std::int32_t *sums) {
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t panel = 0; panel < count; ++panel) {
            std::int32_t total[COLUMNS] = {};
            const std::int8_t *b = panels + panel * depth * COLUMNS;
            for (std::size_t k = 0; k < depth; k += 4, b += 4 * COLUMNS) {
                const std::uint8_t *four = a + row * depth + k;
                for (std::size_t column = 0; column < COLUMNS; ++column)
                    total[column] += four[0] * b[4 * column] + four[1] * b[4 * column + 1] + four[2] * b[4 * column + 2] +
                                     four[3] * b[4 * column + 3];
            }
            std::copy_n(total, COLUMNS, sums + row * STRIDE + panel * COLUMNS);
        }
    }
}

#ifdef LUT4TOOL_VNNI
// Products of bytes in pairs, widened to 16 bits: pmaddubsw would saturate.
__attribute__((target("avx2"))) void dots_avx2(const std::uint8_t *a, std::size_t rows, const std::int8_t *panels,
                                               std::size_t count, std::size_t depth, std::int32_t *sums) {
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t panel = 0; panel < count; ++panel) {
            __m256i total[4] = {};  // two halves of each of 4 columns
            const std::int8_t *b = panels + panel * depth * COLUMNS;
            for (std::size_t k = 0; k < depth; k += 4, b += 4 * COLUMNS) {
                std::int32_t four;
                std::memcpy(&four, a + row * depth + k, sizeof four);
                const __m256i left = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(four)));
                for (std::size_t i = 0; i < 4; ++i) {
                    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(b + 16 * i));
                    total[i] = _mm256_add_epi32(total[i], _mm256_madd_epi16(left, _mm256_cvtepi8_epi16(bytes)));
                }
            }
            for (std::size_t i = 0; i < 4; ++i) {
                alignas(32) std::int32_t halves[8];
                _mm256_store_si256(reinterpret_cast<__m256i *>(halves), total[i]);
                for (std::size_t j = 0; j < 4; ++j)
                    sums[row * STRIDE + panel * COLUMNS + 4 * i + j] = halves[2 * j] + halves[2 * j + 1];
            }
        }
    }
}
#endif

#ifdef LUT4TOOL_VNNI
#define LUT4TOOL_VNNI_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

template <std::size_t HEIGHT, std::size_t WIDTH>
LUT4TOOL_VNNI_TARGET void vnni_block(const std::uint8_t *a, const std::int8_t *panels, std::size_t depth,
                                     std::int32_t *sums) {
    __m512i total[HEIGHT][WIDTH];
    for (auto &row : total)
        for (auto &sum : row) sum = _mm512_setzero_si512();
    for (std::size_t k = 0; k < depth; k += 4) {
        __m512i right[WIDTH];
        for (std::size_t i = 0; i < WIDTH; ++i) right[i] = _mm512_loadu_si512(panels + (i * depth + k) * COLUMNS);
        for (std::size_t row = 0; row < HEIGHT; ++row) {
            std::int32_t four;
            std::memcpy(&four, a + row * depth + k, sizeof four);
            const __m512i left = _mm512_set1_epi32(four);
            for (std::size_t i = 0; i < WIDTH; ++i) total[row][i] = _mm512_dpbusd_epi32(total[row][i], left, right[i]);
        }
    }
    for (std::size_t row = 0; row < HEIGHT; ++row)
        for (std::size_t i = 0; i < WIDTH; ++i) _mm512_storeu_si512(sums + row * STRIDE + i * COLUMNS, total[row][i]);
}

template <std::size_t WIDTH>
void vnni_panels(const std::uint8_t *a, std::size_t rows, const std::int8_t *panels, std::size_t depth,
                 std::int32_t *sums) {
    std::size_t row = 0;
    for (; row + 4 <= rows; row += 4) vnni_block<4, WIDTH>(a + row * depth, panels, depth, sums + row * STRIDE);
    for (; row + 2 <= rows; row += 2) vnni_block<2, WIDTH>(a + row * depth, panels, depth, sums + row * STRIDE);
    for (; row < rows; ++row) vnni_block<1, WIDTH>(a + row * depth, panels, depth, sums + row * STRIDE);
}

void dots_vnni(const std::uint8_t *a, std::size_t rows, const std::int8_t *panels, std::size_t count, std::size_t depth,
               std::int32_t *sums) {
    if (count == GROUP) return vnni_panels<GROUP>(a, rows, panels, depth, sums);
    for (std::size_t panel = 0; panel < count; ++panel)
        vnni_panels<1>(a, rows, panels + panel * depth * COLUMNS, depth, sums + panel * COLUMNS);
}

bool has_vnni() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

#ifdef LUT4TOOL_AMX
constexpr std::size_t TILE = 16;  // rows of a tile; its 64 bytes are a row of a panel, or 64 of the depth

struct alignas(64) Tiles {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

// 32 rows with two panels, or 16 with one.
template <bool BOTH>
__attribute__((target("amx-tile,amx-int8"))) void amx_block(const std::uint8_t *a, const std::int8_t *panels,
                                                            std::size_t depth, std::int32_t *sums) {
    const std::int8_t *other = panels + depth * COLUMNS;
    const std::uint8_t *below = a + TILE * depth;
    _tile_zero(0);
    if (BOTH) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (std::size_t k = 0; k < depth; k += 64) {
        _tile_loadd(4, a + k, depth);
        _tile_loadd(6, panels + k * COLUMNS, 64);
        _tile_dpbusd(0, 4, 6);
        if (BOTH) {
            _tile_loadd(7, other + k * COLUMNS, 64);
            _tile_loadd(5, below + k, depth);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    constexpr std::size_t BYTES = STRIDE * sizeof(std::int32_t);
    _tile_stored(0, sums, BYTES);
    if (BOTH) {
        _tile_stored(1, sums + COLUMNS, BYTES);
        _tile_stored(2, sums + TILE * STRIDE, BYTES);
        _tile_stored(3, sums + TILE * STRIDE + COLUMNS, BYTES);
    }
}

__attribute__((target("amx-tile"))) void dots_amx(const std::uint8_t *a, std::size_t rows, const std::int8_t *panels,
                                                  std::size_t count, std::size_t depth, std::int32_t *sums) {
    static const Tiles tiles;
    const std::size_t whole = rows / TILE * TILE;
    if (whole) {
        _tile_loadconfig(&tiles);
        std::size_t panel = 0;
        for (; whole == 2 * TILE && panel + 2 <= count; panel += 2)
            amx_block<true>(a, panels + panel * depth * COLUMNS, depth, sums + panel * COLUMNS);
        for (; panel < count; ++panel)
            for (std::size_t row = 0; row < whole; row += TILE)
                amx_block<false>(a + row * depth, panels + panel * depth * COLUMNS, depth,
                                 sums + row * STRIDE + panel * COLUMNS);
        _tile_release();
    }
    if (whole < rows) dots_vnni(a + whole * depth, rows - whole, panels, count, depth, sums + whole * STRIDE);
}

// Whether the processor has the tiles and Linux lets this process use them: it asks, once.
bool has_amx() {
    unsigned eax, ebx, ecx, edx;
    if (!has_vnni() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25;
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return (edx & AMX_TILE) && (edx & AMX_INT8) && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

// worth: multiplications that are worth a second thread.
struct Kernel {
    const char *name;
    Dots dots;
    std::size_t worth;
};

std::vector<Kernel> supported() {
    std::vector<Kernel> kernels;
#ifdef LUT4TOOL_AMX
    if (has_amx()) kernels.push_back({"avx512 amx", dots_amx, std::size_t(1) << 25});
#endif
#ifdef LUT4TOOL_VNNI
    if (has_vnni()) kernels.push_back({"avx512 vnni", dots_vnni, std::size_t(1) << 23});
#endif
#ifdef LUT4TOOL_VNNI
    if (__builtin_cpu_supports("avx2")) kernels.push_back({"avx2", dots_avx2, std::size_t(1) << 21});
#endif
    kernels.push_back({"portable", dots, std::size_t(1) << 19});
    return kernels;
}

Kernel &chosen() {
    static Kernel kernel = supported().front();
    return kernel;
}

// Row m's sums in one group of columns, as the result wants them. uint32 arithmetic: int32 that wraps.
// sum (a - p)(b - q) = sum ab - p sum b - q (sum a - K p); rest is what is in the brackets.
LUT4TOOL_CLONES void store(const std::int32_t *sums, std::size_t count, std::uint32_t point, std::uint32_t rest,
                           const std::int32_t *zero, const std::int32_t *column_sums, std::int32_t *integers) {
    for (std::size_t n = 0; n < count; ++n)
        integers[n] = std::int32_t(std::uint32_t(sums[n]) - point * std::uint32_t(column_sums[n]) -
                                   std::uint32_t(zero[n]) * rest);
}

LUT4TOOL_CLONES void scale(const std::int32_t *total, const float *factors, float step, std::size_t count, float *out) {
    for (std::size_t n = 0; n < count; ++n) out[n] = float(total[n]) * (step * factors[n]);
}

LUT4TOOL_CLONES std::uint32_t sum_of(const std::uint8_t *a, std::size_t count) {
    std::uint32_t sum = 0;
    for (std::size_t k = 0; k < count; ++k) sum += a[k];
    return sum;
}

}  // namespace

std::size_t packed_depth(std::size_t K) { return (std::max<std::size_t>(K, 1) + 63) / 64 * 64; }

void multiply_bytes(const std::uint8_t *a, const std::int32_t *a_zero, std::size_t M, const ByteMatrix &b,
                    std::size_t first, std::size_t last, const ByteResult &out) {
    const std::size_t depth = packed_depth(b.K);
    const Dots multiply = chosen().dots;
    for (std::size_t row = 0; row < M; row += ROWS) {
        const std::size_t rows = std::min(ROWS, M - row);
        std::uint32_t rest[ROWS];
        for (std::size_t m = 0; m < rows; ++m)
            rest[m] = sum_of(a + (row + m) * depth, b.K) - std::uint32_t(b.K) * std::uint32_t(a_zero[row + m]);
        for (std::size_t panel = first; panel < last; panel += GROUP) {
            alignas(64) std::int32_t sums[ROWS * STRIDE];
            multiply(a + row * depth, rows, b.panels + panel * depth * COLUMNS, std::min(GROUP, last - panel), depth, sums);
            const std::size_t column = panel * COLUMNS;
            const std::size_t count = std::min(b.N, std::min(panel + GROUP, last) * COLUMNS) - column;
            for (std::size_t m = 0; m < rows; ++m) {
                std::int32_t *line = sums + m * STRIDE, *total = line;
                const std::size_t at = (row + m) * b.N + column;
                if (out.integers) total = out.integers + at;
                store(line, count, std::uint32_t(a_zero[row + m]), rest[m], b.zero + column, b.sums + column, total);
                if (out.floats) scale(total, out.factors + column, out.step, count, out.floats + at);
            }
        }
    }
}

void multiply_bytes(const std::uint8_t *a, const std::int32_t *a_zero, std::size_t M, const ByteMatrix &b,
                    const ByteResult &out, unsigned threads) {
    const std::size_t panels = (b.N + COLUMNS - 1) / COLUMNS, bytes = b.N * packed_depth(b.K);
    if (M * bytes < chosen().worth && bytes < STREAMED) threads = 1;
    const std::size_t groups = (panels + GROUP - 1) / GROUP, pieces = std::min<std::size_t>(groups, PIECES * threads);
    parallel(threads == 1 ? 1 : pieces, threads, [&](std::size_t piece) {
        const std::size_t all = threads == 1 ? 1 : pieces;
        const std::size_t first = groups * piece / all * GROUP, last = groups * (piece + 1) / all * GROUP;
        multiply_bytes(a, a_zero, M, b, first, std::min(last, panels), out);
    });
}

const char *byte_instruction_set() { return chosen().name; }

bool use_byte_instruction_set(const char *name) {
    for (const Kernel &kernel : supported()) {
        if (std::string(kernel.name) == name) {
            chosen() = kernel;
            return true;
        }
    }
    return false;
}

namespace {

// The least and greatest of x and 0; false where there is a NaN.
LUT4TOOL_CLONES bool bounds(const float *x, std::size_t count, float &low, float &high) {
    constexpr std::size_t LANES = 32;
    float lows[LANES] = {}, highs[LANES] = {};
    std::uint32_t unordered = 0;
    std::size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (std::size_t lane = 0; lane < LANES; ++lane) {
            const float value = x[i + lane];
            lows[lane] = value < lows[lane] ? value : lows[lane];
            highs[lane] = value > highs[lane] ? value : highs[lane];
            unordered |= value != value;
        }
    }
    for (; i < count; ++i) {
        lows[0] = std::min(lows[0], x[i]);
        highs[0] = std::max(highs[0], x[i]);
        unordered |= x[i] != x[i];
    }
    low = *std::min_element(lows, lows + LANES);
    high = *std::max_element(highs, highs + LANES);
    return unordered == 0;
}

LUT4TOOL_CLONES void quantize_piece(const float *x, std::size_t count, float scale, float zero, float low, float high,
                                    std::uint8_t *values) {
    for (std::size_t i = 0; i < count; ++i) {
        float step = std::rint(x[i] / scale) + zero;
        step = step == step ? step : 0.0f;
        step = step < high ? step : high;
        values[i] = std::uint8_t(std::int32_t(step > low ? step : low));
    }
}

}  // namespace

void quantize(const float *x, std::size_t count, float scale, float zero, float low, float high, std::uint8_t *values) {
    quantize_piece(x, count, scale, zero, low, high, values);
}

bool quantization(const float *x, std::size_t count, float &scale, std::uint8_t &zero) {
    float low, high;
    if (!bounds(x, count, low, high) || std::isinf(low) || std::isinf(high)) return false;
    scale = (high - low) / 255.0f;
    if (scale == 0.0f) scale = 1.0f;
    zero = std::uint8_t(std::rint(std::min(std::max(-low / scale, 0.0f), 255.0f)));
    return true;
}

}  // namespace lut4tool
