// Products in bfloat16 on AMX: panels of the weight are decoded into cache as the unit's tiles, 32 weights a lookup.
//
// Of a block's 16 weights a table is made, scaled and rounded as proved; a lookup of 16-bit entries then gives 32 weights.
//
// The unit's sums: of a tile's 32 products the even and the odd ones are summed each in a chain of float32 FMAs, both
// sums are added, and that to what was there. So |sum - exact| <= (K / 32 + 17) 2^-24 sum |x||w|, and a result has one
// more rounding. It takes subnormal operands and results for zero. Of x >= 2^a and |w| >= 2^b that are not zero, all
// products, and sums of them however rounded, are multiples of 2^(a + b - 14): where that is at least 2^-126 nothing can
// be subnormal. Both are looked at while x and the weights are prepared, and where they are smaller y is not made.
#include "product_bf16.h"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cpuid.h>
#include <cstring>
#include <vector>

#include "lanes_avx512.h"
#include "threads.h"

namespace lut4tool {
namespace {

using std::size_t;
using Bf16 = std::uint16_t;

#define INLINE inline __attribute__((always_inline))
#define COMPILER_BARRIER() asm volatile("" : : : "memory")  // the tile intrinsics do not say what they read and write

constexpr size_t L = 16;                       // rows of x of a tile, and outputs of a group
constexpr size_t STEP = 32, RUN = 2 * STEP;    // values of a tile's row; of a row of two tiles
constexpr size_t TILE = L * STEP, SUMS = L * L;  // values of a tile
constexpr size_t ROWS_AT_A_TIME = 512;                  // of x, whose panel stays near
constexpr size_t ELEMENTS_A_PIECE = size_t(1) << 18;  // of a weight, below which another thread costs more than it saves

// Outputs whose panels are decoded at a time, in groups, and the depth of a panel: as measured. Rows along N are read in
// runs that are the longer the better, so of as many outputs as there is room for their sums.
struct Unit {
    size_t groups, depth;

    Unit(bool along_k, size_t tiles, size_t outputs, size_t threads) {
        if (along_k) {
            groups = tiles == 1 ? 4 : 8, depth = 512;
        } else {
            groups = tiles == 1 ? 128 : tiles <= 8 ? 64 : 32, depth = tiles == 1 ? 64 : 128;
        }
        while (groups > 8 && groups * L * threads * 2 > outputs) groups /= 2;
    }
    size_t outputs() const { return groups * L; }
    size_t apart() const { return depth * L + STEP; }  // of groups' panels: not a power of two, see product_kernels.h
};

// Exponents, as float32 has them, of operands none of whose products and sums are subnormal: see above.
constexpr std::uint32_t LEAST_EXPONENTS = 127 + 127 - 126 + 14;

// Twice the bits of the smallest value that is not zero, less 1.
struct Smallest {
    std::uint32_t exponent;

    bool fits(const Smallest &other) const {
        return exponent > 0 && other.exponent > 0 && exponent + other.exponent >= LEAST_EXPONENTS;
    }
    static Smallest of_halves(Bf16 least) { return {least == 0xffff ? 0xffu : std::uint32_t(least + 1) >> 8}; }
    static Smallest of_floats(std::uint32_t least) { return {least == ~0u ? 0xffu : (least + 1) >> 24}; }
};

// ---- x: [tile][step], a tile's values [pair of the depth][row][2] where weights lie along K, else [row][value] ----

struct Rows {
    const Bf16 *x;
    size_t M, depth, tiles;
    Bf16 *values;
    std::vector<std::uint8_t> finite;  // a row

    size_t apart() const { return (depth + RUN - 1) / RUN * RUN * L + STEP; }
    Bf16 *at(size_t tile, size_t k) const { return values + tile * apart() + k * L; }
};

// A run's values as pairs of what a lookup of its low nibbles gives, and of its high ones.
void pairs_of_run(const Bf16 *x, bool high_nibble_first, std::uint32_t *low, std::uint32_t *high) {
    std::uint32_t *even = high_nibble_first ? high : low, *odd = high_nibble_first ? low : high;
    for (size_t i = 0; i < L; ++i) {
        std::uint32_t two[2];
        std::memcpy(two, x + 4 * i, sizeof two);
        even[i * L] = (two[0] & 0xffff) | two[1] << 16;
        odd[i * L] = two[0] >> 16 | (two[1] & 0xffff0000);
    }
}

// Pack a tile of 16 rows, zeros after the last one and at the end of each -> the bits of its smallest value.
Bf16 pack_tile(Rows &rows, size_t tile, bool along_k, bool high_nibble_first) {
    Bf16 least = 0xffff;
    for (size_t r = 0; r < L; ++r) {
        const size_t m = tile * L + r;
        Bf16 most = 0;
        for (size_t k0 = 0; k0 < rows.depth; k0 += RUN) {
            alignas(64) Bf16 run[RUN] = {};
            if (m < rows.M) std::memcpy(run, rows.x + m * rows.depth + k0, std::min(RUN, rows.depth - k0) * sizeof(Bf16));
            for (size_t i = 0; i < RUN; ++i) {
                const Bf16 twice = Bf16(run[i] << 1);
                most = std::max(most, twice), least = std::min(least, Bf16(twice - 1));
            }
            Bf16 *out = rows.at(tile, k0);
            if (along_k) {
                auto *pairs = reinterpret_cast<std::uint32_t *>(out) + r;
                pairs_of_run(run, high_nibble_first, pairs, pairs + TILE / 2);
            } else {
                std::memcpy(out + r * STEP, run, sizeof run / 2);
                std::memcpy(out + TILE + r * STEP, run + STEP, sizeof run / 2);
            }
        }
        if (m < rows.M) rows.finite[m] = most < 0xff00;
    }
    return least;
}

// ---- weights ----

// Tables of blocks, and the smallest of what they hold.
struct Books {
    const Packed4 &weight;
    Blocks blocks;
    __m512 base;
    __m512i least = _mm512_set1_epi32(-1);

    explicit Books(const Packed4 &packed) : weight(packed), blocks(packed.block_size), base(_mm512_loadu_ps(packed.table)) {}

    INLINE __m256i of(size_t block) {
        __m512 values = base;
        if (weight.zeros != Packed4::Zeros::none) {
            values = _mm512_sub_ps(values, _mm512_set1_ps(zero_of(weight, block)));
            if (weight.zeros == Packed4::Zeros::floats) values = Lanes::round_bf16(values);
        }
        values = _mm512_mul_ps(values, _mm512_set1_ps(scale_of(weight, block)));
        const __m512i twice = _mm512_slli_epi32(_mm512_castps_si512(values), 1);
        least = _mm512_min_epu32(least, _mm512_sub_epi32(twice, _mm512_set1_epi32(1)));
        return (__m256i)_mm512_cvtneps_pbh(values);
    }
    Smallest smallest() const { return Smallest::of_floats(_mm512_reduce_min_epu32(least)); }
};

INLINE __m512i both(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

// Values [k0, k0 + count) of a row along K, to its row of each step's tile: low nibbles, then high ones, zeros at the end.
// ONE_BLOCK: a run never has two.
template <bool ONE_BLOCK>
INLINE void decode_row(Books &books, size_t n, size_t k0, size_t count, Bf16 *out) {
    const Packed4 &weight = books.weight;
    size_t flat = n * weight.stride + k0, block = ~size_t(0);
    const std::uint8_t *packed = weight.packed + flat / 2;
    const __m512i upper = both(_mm256_setzero_si256(), _mm256_set1_epi16(16)), nibble = _mm512_set1_epi16(15);
    __m512i table = _mm512_setzero_si512();
    for (size_t k = 0; k < count; k += RUN, flat += RUN, packed += RUN / 2, out += 2 * TILE) {
        const size_t first = books.blocks.of(flat);
        const bool whole = count - k >= RUN, half = count - k > RUN / 2;
        if (ONE_BLOCK) {
            if (first != block) {
                const __m256i book = books.of(block = first);
                table = both(book, book);
            }
        } else {
            const __m256i book = books.of(first);
            const size_t second = half ? books.blocks.of(flat + RUN / 2) : first;
            table = both(book, second == first ? book : books.of(second));
        }
        if (whole) {
            __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(packed)));
            __m512i above = _mm512_srli_epi16(codes, 4);
            if (!ONE_BLOCK) {  // where a run has one the table is twice the same, whatever the fifth bit of an index
                constexpr int AND_OR = 0xea;  // (a & b) | c
                codes = _mm512_ternarylogic_epi32(codes, nibble, upper, AND_OR);
                above = _mm512_or_si512(above, upper);
            }
            _mm512_store_si512(out, _mm512_permutexvar_epi16(codes, table));
            _mm512_store_si512(out + TILE, _mm512_permutexvar_epi16(above, table));
            continue;
        }
        const size_t rest = count - k;
        std::uint8_t bytes[RUN / 2] = {};
        std::memcpy(bytes, packed, (rest + 1) / 2);
        const __m512i raw = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes)));
        const __m512i codes = _mm512_or_si512(_mm512_and_si512(raw, nibble), upper);
        const __m512i above = _mm512_or_si512(_mm512_srli_epi16(raw, 4), upper);
        const auto first_ones = [](size_t ones) { return __mmask32((std::uint64_t(1) << ones) - 1); };
        const __mmask32 even = first_ones((rest + 1) / 2), odd = first_ones(rest / 2);
        const bool high = weight.high_nibble_first;
        _mm512_store_si512(out, _mm512_maskz_permutexvar_epi16(high ? odd : even, codes, table));
        _mm512_store_si512(out + TILE, _mm512_maskz_permutexvar_epi16(high ? even : odd, above, table));
    }
}

// A unit's panels; the next ones lie `next` bytes on.
template <bool ONE_BLOCK>
void decode_along_k(Books &books, const Unit &unit, size_t column, size_t k0, size_t count, std::ptrdiff_t next, Bf16 *panels) {
    const Packed4 &weight = books.weight;
    for (size_t i = 0; i < unit.outputs(); ++i) {
        const size_t n = std::min(column + i, weight.rows - 1);  // past the last: never stored in y
        const std::uint8_t *there = weight.packed + (n * weight.stride + k0) / 2 + next;
        for (size_t byte = 0; byte < unit.depth / 2; byte += 64) Lanes::prefetch(there + byte);
        decode_row<ONE_BLOCK>(books, n, k0, count, panels + i / L * unit.apart() + i % L * STEP);
    }
}

// Rows [k0, k0 + count) along N, in pairs: of each 32 columns a group of those in low nibbles and one of the others.
void decode_along_n(Books &books, const Unit &unit, size_t column, size_t chunks, size_t k0, size_t count,
                    std::ptrdiff_t next, Bf16 *panels) {
    const Packed4 &weight = books.weight;
    const __m512i which = _mm512_set1_epi32(16 << 16), nibble = _mm512_set1_epi16(15);  // the second row's are odd
    for (size_t k = 0; k < (count + RUN - 1) / RUN * RUN; k += 2) {
        const size_t flat = (k0 + k) * weight.stride + column;
        const std::uint8_t *first = weight.packed + flat / 2, *second = first + weight.stride / 2;
        for (size_t byte = 0; byte < chunks * L; byte += 64) {
            Lanes::prefetch(first + next + byte);
            Lanes::prefetch(second + next + byte);
        }
        size_t blocks[2] = {~size_t(0), ~size_t(0)};
        __m512i table = _mm512_setzero_si512();
        for (size_t c = 0; c < chunks; ++c) {
            __m128i rows[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
            if (k < count) {
                const size_t at = books.blocks.of(flat + c * STEP);
                if (at != blocks[0]) {
                    blocks[0] = at;
                    table = _mm512_inserti64x4(table, books.of(at), 0);
                }
                rows[0] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(first + c * L));
            }
            if (k + 1 < count) {
                const size_t at = books.blocks.of(flat + weight.stride + c * STEP);
                if (at != blocks[1]) {
                    blocks[1] = at;
                    table = _mm512_inserti64x4(table, books.of(at), 1);
                }
                rows[1] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(second + c * L));
            }
            const __m128i low_pairs = _mm_unpacklo_epi8(rows[0], rows[1]), high_pairs = _mm_unpackhi_epi8(rows[0], rows[1]);
            const __m512i codes = _mm512_cvtepu8_epi16(_mm256_set_m128i(high_pairs, low_pairs));
            constexpr int AND_OR = 0xea;  // (a & b) | c
            const __m512i low = _mm512_ternarylogic_epi32(codes, nibble, which, AND_OR);
            const __m512i high = _mm512_or_si512(_mm512_srli_epi16(codes, 4), which);
            Bf16 *out = panels + 2 * c * unit.apart() + k * L;
            _mm512_store_si512(out, _mm512_permutexvar_epi16(low, table));  // zeros where a row is not there
            _mm512_store_si512(out + unit.apart(), _mm512_permutexvar_epi16(high, table));
        }
    }
}

// ---- products ----

struct TileShapes {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
};

void load_shapes() {
    TileShapes shapes;
    for (size_t tile = 0; tile < 8; ++tile) shapes.rows[tile] = L, shapes.bytes[tile] = STEP * sizeof(Bf16);
    _tile_loadconfig(&shapes);
}

constexpr size_t BYTES = 64;  // of a row of any tile

// The tiles of a panel: of groups of weights, and of x, which lie so far apart.
struct Panel {
    const Bf16 *w, *x;
    size_t w_apart, x_apart, steps;
};

// Add the products of two groups with two tiles of x to their sums. Sums are [output][row of x] of weights along K,
// [row of x][output] else.
template <bool ALONG_K>
void add_two_by_two(Panel p, float *first, float *second) {
    COMPILER_BARRIER();
    _tile_loadd(0, first, BYTES);
    _tile_loadd(1, first + SUMS, BYTES);
    _tile_loadd(2, second, BYTES);
    _tile_loadd(3, second + SUMS, BYTES);
    for (size_t s = 0; s < p.steps; ++s, p.w += TILE, p.x += TILE) {
        _tile_loadd(4, p.w, BYTES);
        _tile_loadd(6, p.x, BYTES);
        _tile_loadd(7, p.x + p.x_apart, BYTES);
        _tile_loadd(5, p.w + p.w_apart, BYTES);
        if constexpr (ALONG_K) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 7, 4);
            _tile_dpbf16ps(2, 6, 5);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, first, BYTES);
    _tile_stored(1, first + SUMS, BYTES);
    _tile_stored(2, second, BYTES);
    _tile_stored(3, second + SUMS, BYTES);
    COMPILER_BARRIER();
}

// The same of four groups, whose sums lie so far apart, with one tile of x; `begins` and `ends` are false where the sums
// stay in registers.
template <bool ALONG_K>
void add_four_by_one(Panel p, float *sums, size_t apart, bool begins, bool ends) {
    COMPILER_BARRIER();
    if (begins) {
        _tile_loadd(0, sums, BYTES);
        _tile_loadd(1, sums + apart, BYTES);
        _tile_loadd(2, sums + 2 * apart, BYTES);
        _tile_loadd(3, sums + 3 * apart, BYTES);
    }
    for (size_t s = 0; s < p.steps; ++s, p.w += TILE, p.x += TILE) {
        _tile_loadd(7, p.x, BYTES);
        _tile_loadd(4, p.w, BYTES);
        _tile_loadd(5, p.w + p.w_apart, BYTES);
        _tile_loadd(6, p.w + 2 * p.w_apart, BYTES);
        if constexpr (ALONG_K) {
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
            _tile_dpbf16ps(2, 6, 7);
        } else {
            _tile_dpbf16ps(0, 7, 4);
            _tile_dpbf16ps(1, 7, 5);
            _tile_dpbf16ps(2, 7, 6);
        }
        _tile_loadd(4, p.w + 3 * p.w_apart, BYTES);
        if constexpr (ALONG_K) {
            _tile_dpbf16ps(3, 4, 7);
        } else {
            _tile_dpbf16ps(3, 7, 4);
        }
    }
    if (ends) {
        _tile_stored(0, sums, BYTES);
        _tile_stored(1, sums + apart, BYTES);
        _tile_stored(2, sums + 2 * apart, BYTES);
        _tile_stored(3, sums + 3 * apart, BYTES);
    }
    COMPILER_BARRIER();
}

// Add a panel's products with all rows of x to sums [group][tile].
template <bool ALONG_K>
void add_panel(const Rows &rows, const Unit &unit, size_t k0, size_t steps, const Bf16 *weights, float *sums) {
    const size_t apart = rows.tiles * SUMS, last = rows.tiles - 1;
    Panel panel{weights, nullptr, unit.apart(), rows.apart(), steps};
    for (size_t g = 0; g < unit.groups; g += 2, panel.w += 2 * unit.apart(), sums += 2 * apart) {
        for (size_t t = 0; t + 1 < rows.tiles; t += 2) {
            panel.x = rows.at(t, k0);
            add_two_by_two<ALONG_K>(panel, sums + t * SUMS, sums + apart + t * SUMS);
        }
        if (rows.tiles % 2 == 1 && g % 4 == 0) {
            panel.x = rows.at(last, k0);
            const bool stay = rows.tiles == 1 && unit.groups == 4;
            const bool begins = !stay || k0 == 0, ends = !stay || k0 + unit.depth >= rows.depth;
            add_four_by_one<ALONG_K>(panel, sums + last * SUMS, apart, begins, ends);
        }
    }
}

// ---- results ----

bool all_finite(__m512 values) {
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(values), exponent), exponent) == 0;
}

// Round a unit's sums to y -> whether all are finite, in rows of x that are.
bool store_along_k(const Rows &rows, size_t groups, const float *sums, size_t column, size_t outputs, Bf16 *y) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i down = _mm512_slli_epi32(lanes, 4);  // rows of L sums
    bool finite = true;
    for (size_t m = 0; m < rows.M; ++m) {
        for (size_t g = 0; g < groups && column + g * L < outputs; ++g) {
            const size_t n = column + g * L, count = std::min(L, outputs - n);
            const float *from = sums + (g * rows.tiles + m / L) * SUMS + m % L;
            const __mmask16 there = __mmask16((1u << count) - 1);
            const __m512 values = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, down, from, 4);
            finite &= !rows.finite[m] || all_finite(values);
            _mm256_mask_storeu_epi16(y + m * outputs + n, there, (__m256i)_mm512_cvtneps_pbh(values));
        }
    }
    return finite;
}

bool store_along_n(const Rows &rows, size_t groups, const float *sums, size_t column, size_t outputs, bool high_nibble_first,
                   Bf16 *y) {
    bool finite = true;
    for (size_t m = 0; m < rows.M; ++m) {
        for (size_t g = 0; g < groups && column + g * L < outputs; g += 2) {
            const float *from = sums + (g * rows.tiles + m / L) * SUMS + m % L * L;
            const __m512 low = _mm512_load_ps(from), high = _mm512_load_ps(from + rows.tiles * SUMS);
            finite &= !rows.finite[m] || (all_finite(low) && all_finite(high));
            const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high_nibble_first ? high : low));
            const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high_nibble_first ? low : high));
            _mm512_storeu_si512(y + m * outputs + column + g * L, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }
    return finite;
}

// The outputs of units [begin, end) -> whether they are right.
bool multiply_units(const Packed4 &weight, const Rows &rows, const Unit &unit, Smallest x, Bf16 *y, size_t begin,
                    size_t end) {
    static thread_local Scratch<Bf16> panel_scratch;
    static thread_local Scratch<float> sum_scratch;
    Bf16 *panels = panel_scratch.at_least(unit.groups * unit.apart());
    float *sums = sum_scratch.at_least(unit.groups * rows.tiles * SUMS);
    const size_t outputs = weight.outputs(), step = unit.outputs();
    const bool one_block = weight.block_size % RUN == 0 && weight.stride % RUN == 0;
    Books books(weight);
    bool right = true;
    load_shapes();
    for (size_t column = begin * step; right && column < std::min(end * step, outputs); column += step) {
        Unit there = unit;  // the last one may have fewer outputs
        there.groups = std::min(unit.groups, (outputs - column + 4 * L - 1) / (4 * L) * 4);
        std::memset(sums, 0, there.groups * rows.tiles * SUMS * sizeof(float));
        for (size_t k0 = 0; k0 < rows.depth; k0 += unit.depth) {
            const size_t count = std::min(unit.depth, rows.depth - k0), steps = (count + RUN - 1) / RUN * 2;
            const bool last = k0 + count == rows.depth;  // the next panel is the next unit's
            const size_t on = weight.along_k ? (last ? step * weight.stride - k0 : unit.depth)
                                             : (last ? step - k0 * weight.stride : unit.depth * weight.stride);
            const std::ptrdiff_t next = std::ptrdiff_t(on) / 2;
            if (weight.along_k) {
                const auto decode = one_block ? decode_along_k<true> : decode_along_k<false>;
                decode(books, there, column, k0, count, next, panels);
                add_panel<true>(rows, there, k0, steps, panels, sums);
            } else {
                decode_along_n(books, there, column, (std::min(step, outputs - column) + STEP - 1) / STEP, k0, count,
                               next, panels);
                add_panel<false>(rows, there, k0, steps, panels, sums);
            }
        }
        right = weight.along_k ? store_along_k(rows, there.groups, sums, column, outputs, y)
                               : store_along_n(rows, there.groups, sums, column, outputs, weight.high_nibble_first, y);
        right = right && books.smallest().fits(x);
    }
    _tile_release();
    return right;
}

bool multiply_rows(const Packed4 &weight, const Bf16 *x, size_t M, Bf16 *y, unsigned threads) {
    static thread_local Scratch<Bf16> scratch;
    const size_t depth = weight.depth(), tiles = (M + L - 1) / L;
    Rows rows{x, M, depth, tiles, nullptr, std::vector<std::uint8_t>(M)};
    rows.values = scratch.at_least(tiles * rows.apart());
    const Unit unit(weight.along_k, tiles, weight.outputs(), threads);
    std::vector<Bf16> least(tiles);
    parallel(tiles, M * depth < ELEMENTS_A_PIECE ? 1 : threads, [&](size_t tile) {
        least[tile] = pack_tile(rows, tile, weight.along_k, weight.high_nibble_first);
    });
    const Smallest smallest = Smallest::of_halves(*std::min_element(least.begin(), least.end()));
    const size_t outputs = weight.outputs(), units = (outputs + unit.outputs() - 1) / unit.outputs();
    const size_t worth = outputs * depth / ELEMENTS_A_PIECE;
    const size_t pieces = std::max<size_t>(1, std::min({units, worth, size_t(threads) * 8}));
    std::atomic<bool> right{true};
    parallel(pieces, threads, [&](size_t piece) {
        const size_t begin = units * piece / pieces, end = units * (piece + 1) / pieces;
        if (right && !multiply_units(weight, rows, unit, smallest, y, begin, end)) right = false;
    });
    return right;
}

// AMX's tiles and bfloat16, AVX-512's words and bfloat16; the system gives tiles to a process that asks.
bool usable() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 24 & 1) && (d >> 22 & 1), words = (b >> 30 & 1) && (b >> 31 & 1);
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return tiles && words && (a >> 5 & 1) && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

bool serves_bf16(const Packed4 &weight) {
    static const bool here = usable();
    const bool asked = std::strcmp(product_instruction_set(), "amx") == 0;
    return here && asked && weight.rounding == Float::bf16 && serves_gemv(weight);
}

bool multiply_bf16(const Packed4 &weight, const Bf16 *x, size_t M, Bf16 *y, unsigned threads) {
    const size_t parts = (M + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
    for (size_t part = 0; part < parts; ++part) {
        const size_t m = M * part / parts, rows = M * (part + 1) / parts - m;
        if (!multiply_rows(weight, x + m * weight.depth(), rows, y + m * weight.outputs(), threads)) return false;
    }
    return true;
}

}  // namespace lut4tool
