// Tile products in whole numbers of 8 bits, on the matrix unit that some x86 machines have (AMX).
//
// Of a panel of 256 values along the depth a row of x becomes X = x 2^(31 - e), |x| < 0.993 2^e, and an output's weights
// W = w 2^(31 - f) likewise, rounded to whole numbers and written as four digits, base 256, of -128 ... 127. Products of
// digits are summed in 32 bits, exactly, those of equal weight together, and those below the fourth weight left out: ten
// products of bytes, which take less time than one of floats. Digits of a block's 16 weights are a table of bytes.
//
// The bound, in u = 2^-24: the four sums to one float, 2; the last rounding, 1; what is between is in double. 4.9 are
// left for rounding X and W (a half each, of at most 2^31) and what is left out (at most 3 2^30 (1 + 2^-7) a product):
// 5.1 2^30 for each x that is not zero. The sum of |X||W| from the first digits alone, rounded down, shows for each
// output that this is enough. Where it does not the output becomes NaN, and is made again another way.
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cpuid.h>
#include <cstring>
#include <limits>

#include "lanes_avx512.h"

namespace lut4tool {
namespace {

using std::size_t;

#define INLINE inline __attribute__((always_inline))
#define KEEP_IN_MEMORY(values) asm volatile("" : : "r"(values) : "memory")

constexpr size_t L = 16;                                // rows of x of a tile, and outputs of a group
constexpr size_t RUN = 64, RUNS = 4, DEPTH = RUN * RUNS;  // values of a tile register's row; of a panel
constexpr size_t DIGITS = 4, PLANES = DIGITS + 1;       // the digits, and the first one of |X| or |W|
constexpr size_t TILE = L * RUN, RUN_BYTES = PLANES * TILE, PANEL_BYTES = RUNS * RUN_BYTES;
constexpr size_t GROUPS = 8;                            // of outputs, whose panels are decoded at a time
constexpr size_t PRODUCTS = 11;                         // of two planes, a run: one for the bound

constexpr float LEFT = 4.9f * 0x1p-24f, ERROR = 5.1f / 1024;  // in units of 2^40, that of X W after four sums are one
constexpr int LEAST_EXPONENT = -40;                           // of a row of x in a panel, below the whole row's
constexpr int MOST_EXPONENT = 50;                             // of weights, either way
constexpr size_t MOST_DEPTH = size_t(1) << 20;

bool serves(const Packed4 &weight) { return serves_gemv(weight) && weight.depth() <= MOST_DEPTH; }

DigitShape shape_of(const Packed4 &weight, size_t M) {
    const size_t tiles = (M + L - 1) / L, panels = (weight.depth() + DEPTH - 1) / DEPTH;
    return {M, tiles, panels, panels * tiles * PANEL_BYTES, panels * tiles};
}

// e where the bits of the largest |value|, twice, are these (and it is not subnormal): its first digit is 127 at most.
int exponent_of(std::uint32_t largest) { return int((largest + (1u << 18)) >> 24) - 126; }

// Digits of -128 ... 127 are the bytes of X + 0x808080 with the lower three moved back: adding carries where one is over.
INLINE __m512i digits_of(__m512i whole) {
    const __m512i middle = _mm512_set1_epi32(0x808080);
    return _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle);
}

// Four planes of 16 digits, the first digits first.
INLINE __m512i planes_of(__m512i digits) {
    alignas(64) static const std::uint8_t order[64] = {
        3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62,
        1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 0, 4, 8,  12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
    return _mm512_permutexvar_epi8(_mm512_load_si512(order), digits);
}

INLINE __m128i first_digits(__m512i whole) { return _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_abs_epi32(whole), 24)); }

// ---- x, where weights lie along K: planes [four values][row], in the order that nibbles are in; else [row][value] ----

// A run's values, `count` of them and then zeros, by nibbles where its weights lie along K.
void values_of_run(const Packed4 &weight, const float *x, size_t count, __m512 *values) {
    __m512 there[4];
    for (size_t i = 0; i < 4; ++i) {
        const size_t rest = count > i * L ? count - i * L : 0;
        there[i] = _mm512_maskz_loadu_ps(rest >= L ? 0xffff : __mmask16((1u << rest) - 1), x + i * L);
    }
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (size_t i = 0; i < 4; ++i) {
        const bool first = (i < 2) != weight.high_nibble_first;
        const __m512 *two = there + 2 * (i % 2);
        values[i] = weight.along_k ? _mm512_permutex2var_ps(two[0], first ? even : odd, two[1]) : there[i];
    }
}

// Digits of a row's run: planes [64], each apart by a tile.
void split_run(const __m512 *values, float power, std::int8_t *planes) {
    for (size_t i = 0; i < 4; ++i) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_scalef_ps(values[i], _mm512_set1_ps(power)));
        alignas(64) std::int8_t digits[DIGITS * L];
        _mm512_store_si512(digits, planes_of(digits_of(whole)));
        for (size_t p = 0; p < DIGITS; ++p) std::memcpy(planes + p * TILE + i * L, digits + p * L, L);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(planes + DIGITS * TILE + i * L), first_digits(whole));
    }
}

// Planes [row][value] to [four values][row].
void transpose_run(const std::int8_t *planes, std::int8_t *out) {
    for (size_t p = 0; p < PLANES; ++p) {
        for (size_t i = 0; i < 4; ++i) {
            const std::uint8_t *rows[L];
            for (size_t r = 0; r < L; ++r) rows[r] = reinterpret_cast<const std::uint8_t *>(planes + p * TILE + r * RUN + i * L);
            __m512i words[4];
            Lanes::load_rows(rows, words);
            for (size_t j = 0; j < 4; ++j) _mm512_store_si512(out + p * TILE + (4 * i + j) * 64, words[j]);
        }
    }
}

// Twice the bits of the largest |x|, and how many are not zero.
struct Extent {
    std::uint32_t largest = 0;
    size_t nonzero = 0;

    Extent(const float *x, size_t count) {
        __m512i most = _mm512_setzero_si512();
        for (size_t k = 0; k < count; k += L) {
            const __mmask16 there = count - k >= L ? 0xffff : __mmask16((1u << (count - k)) - 1);
            const __m512i bits = _mm512_slli_epi32(_mm512_maskz_loadu_epi32(there, x + k), 1);
            most = _mm512_max_epu32(most, bits);
            nonzero += size_t(__builtin_popcount(_mm512_test_epi32_mask(bits, bits)));
        }
        largest = _mm512_reduce_max_epu32(most);
    }
    int exponent() const { return exponent_of(largest); }
};

void split(const Packed4 &weight, const float *x, size_t tile, const DigitRows &out) {
    const size_t depth = weight.depth(), rows = std::min(L, out.shape.M - tile * L);
    alignas(64) std::int8_t planes[RUN_BYTES] = {};
    int exponents[L] = {};
    for (size_t r = 0; r < L; ++r) {
        if (r < rows) exponents[r] = Extent(x + (tile * L + r) * depth, depth).exponent();
        out.row_scale[tile * L + r] = std::ldexp(1.0, exponents[r]);
    }
    for (size_t p = 0; p < out.shape.panels; ++p) {
        const size_t at = p * out.shape.tiles + tile, count = std::min(DEPTH, depth - p * DEPTH);
        DigitScales &scales = out.scales[at] = {};
        int used[L] = {};
        for (size_t r = 0; r < rows; ++r) {
            const Extent extent(x + (tile * L + r) * depth + p * DEPTH, count);
            used[r] = std::max(extent.exponent(), exponents[r] + LEAST_EXPONENT);
            const float unit = extent.nonzero ? std::ldexp(1.0f, used[r] - exponents[r]) : 0;
            scales.unit[r] = unit;
            scales.left[r] = LEFT * 256 * unit;
            scales.error[r] = ERROR * float(extent.nonzero) * unit;
        }
        for (size_t run = 0; run * RUN < count; ++run) {
            for (size_t r = 0; r < rows; ++r) {
                __m512 values[4];
                values_of_run(weight, x + (tile * L + r) * depth + p * DEPTH + run * RUN, count - run * RUN, values);
                split_run(values, float(31 - used[r]), planes + r * RUN);
            }
            std::int8_t *to = out.planes + at * PANEL_BYTES + run * RUN_BYTES;
            weight.along_k ? transpose_run(planes, to) : void(std::memcpy(to, planes, RUN_BYTES));
        }
    }
}

// ---- weights ----

// Of a group of outputs: digits [run][plane], and the powers of two that they count. A plane is [output][value] along K,
// [four values][output] along N.
struct GroupPanel {
    alignas(64) std::int8_t digits[PANEL_BYTES];
    alignas(64) double scales[L];
    alignas(64) float sizes[L];
};

// What weights of at most so much (twice the bits) are multiplied by to be whole, and what the sums then count: NaN where
// the powers of two do not fit.
struct WeightScale {
    float power;
    double scale;

    explicit WeightScale(std::uint32_t largest) {
        const int exponent = exponent_of(largest);
        const bool fits = exponent >= -MOST_EXPONENT && exponent <= MOST_EXPONENT;
        power = fits ? std::ldexp(1.0f, 31 - exponent) : 0;
        scale = largest == 0 ? 0 : fits ? std::ldexp(1.0, exponent - 22) : NAN;
    }
};

// Digits of 32 values of a row of weights: its table, four planes of 16 digits, and the first digits' sizes.
struct Half {
    __m512i planes;
    __m128i first;
    const std::uint8_t *packed;
};

template <typename Weight>
void decode_row(const Weight &weight, __m512 base, const Blocks &blocks, size_t n, size_t k0, size_t row, GroupPanel &panel) {
    constexpr size_t HALVES = 2 * RUNS;
    const size_t halves = std::min(HALVES, (weight.cols - k0 + 31) / 32);
    __m512 tables[HALVES];
    bool same[HALVES];  // as the one before
    __m512i most = _mm512_setzero_si512();
    size_t block = ~size_t(0);
    for (size_t h = 0; h < halves; ++h) {
        const size_t of = blocks.of(n * weight.stride + k0 + 32 * h);
        same[h] = of == block;
        tables[h] = same[h] ? tables[h - 1] : Weight::table_of(weight, base, of);
        block = of;
        most = _mm512_max_epu32(most, _mm512_slli_epi32(_mm512_castps_si512(tables[h]), 1));
    }
    const WeightScale scale(_mm512_reduce_max_epu32(most));
    panel.scales[row] = scale.scale, panel.sizes[row] = float(scale.scale);
    const __m512 power = _mm512_set1_ps(scale.power);
    const __m512i nibble = _mm512_set1_epi8(15);
    const std::uint8_t *packed = weight.packed + (n * weight.stride + k0) / 2;
    Half two[2];
    for (size_t run = 0; run < RUNS; ++run, packed += RUN / 2) {
        for (size_t i = 0; i < 2; ++i) {
            const size_t h = 2 * run + i;
            if (h >= halves && i == 0) return;
            if (i == 1 && (h >= halves || same[h])) {  // past the end x is zero
                two[1] = {two[0].planes, two[0].first, packed + (h >= halves ? 0 : 16)};
            } else {
                const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(tables[h], power));
                two[i] = {planes_of(digits_of(whole)), first_digits(whole), packed + 16 * i};
            }
        }
        const auto bytes = [&](size_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(two[i].packed)); };
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes(0)), bytes(1), 1);
        const __m512i codes = _mm512_and_si512(
            _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1), nibble);
        std::int8_t *out = panel.digits + run * RUN_BYTES + row * RUN;
        const __m512i pair = _mm512_set_epi64(9, 8, 1, 0, 9, 8, 1, 0);  // a plane of both tables, twice
        for (size_t p = 0; p < DIGITS; ++p) {
            const __m512i of = _mm512_add_epi64(pair, _mm512_set1_epi64(std::int64_t(2 * p)));
            const __m512i table = _mm512_permutex2var_epi64(two[0].planes, of, two[1].planes);
            _mm512_store_si512(out + p * TILE, _mm512_shuffle_epi8(table, codes));
        }
        const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(two[0].first), two[1].first, 1);
        const __m512i table = _mm512_broadcast_i64x4(first);
        _mm512_store_si512(out + DIGITS * TILE, _mm512_shuffle_epi8(table, codes));
    }
}

struct AnyWeight : Packed4 {
    static __m512 table_of(const Packed4 &weight, __m512 base, size_t block) {
        const __m512 scale = _mm512_set1_ps(scale_of(weight, block));
        if (weight.zeros != Zeros::none) {
            base = rounded_to(_mm512_sub_ps(base, _mm512_set1_ps(zero_of(weight, block))), weight.rounding);
        }
        return rounded_to(_mm512_mul_ps(base, scale), weight.rounding);
    }

  private:
    static __m512 rounded_to(__m512 value, Float type) {
        if (type == Float::f32) return value;
        return type == Float::f16 ? Lanes::round_f16(value) : Lanes::round_bf16(value);
    }
};

// Rows along N: of four of the depth at once, each with the tables of its block.
constexpr size_t FOURS = DEPTH / 4;

// The digits of the weights of 32 outputs: [four of the depth][plane][of the four][code].
struct DepthTables {
    alignas(64) __m512i planes[FOURS][PLANES];
    double scale;

    template <typename Weight>
    void make(const Weight &weight, __m512 base, const Blocks &blocks, size_t k0, size_t count, size_t column) {
        alignas(64) __m512 tables[DEPTH];
        __m512i most = _mm512_setzero_si512();
        for (size_t k = 0; k < count; ++k) {
            tables[k] = Weight::table_of(weight, base, blocks.of((k0 + k) * weight.stride + column));
            most = _mm512_max_epu32(most, _mm512_slli_epi32(_mm512_castps_si512(tables[k]), 1));
        }
        for (size_t k = count; k < (count + RUN - 1) / RUN * RUN; ++k) tables[k] = _mm512_setzero_ps();
        const WeightScale of(_mm512_reduce_max_epu32(most));
        scale = of.scale;
        for (size_t four = 0; four * 4 < count; ++four) split(tables + four * 4, _mm512_set1_ps(of.power), planes[four]);
        for (size_t four = (count + 3) / 4; four < (count + RUN - 1) / RUN * (RUN / 4); ++four) {
            for (__m512i &plane : planes[four]) plane = _mm512_setzero_si512();
        }
    }

  private:
    static void split(const __m512 *tables, __m512 power, __m512i *out) {
        __m512i of[4], half[4], first = _mm512_setzero_si512();
        for (int k = 0; k < 4; ++k) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(tables[k], power));
            of[k] = planes_of(digits_of(whole));
            first = _mm512_mask_broadcast_i32x4(first, __mmask16(15 << 4 * k), first_digits(whole));
        }
        half[0] = _mm512_shuffle_i32x4(of[0], of[1], 0x44), half[1] = _mm512_shuffle_i32x4(of[2], of[3], 0x44);
        half[2] = _mm512_shuffle_i32x4(of[0], of[1], 0xee), half[3] = _mm512_shuffle_i32x4(of[2], of[3], 0xee);
        for (int p = 0; p < 4; p += 2) {
            out[p] = _mm512_shuffle_i32x4(half[p], half[p + 1], 0x88);
            out[p + 1] = _mm512_shuffle_i32x4(half[p], half[p + 1], 0xdd);
        }
        out[DIGITS] = first;
    }
};

// Digits of 32 outputs: a group of low nibbles, then one of high ones.
void decode_along_n(const Packed4 &weight, const DepthTables &tables, size_t k0, size_t count, size_t column, GroupPanel *two) {
    for (size_t n = 0; n < 2 * L; ++n) {
        two[n / L].scales[n % L] = tables.scale;
        two[n / L].sizes[n % L] = float(tables.scale);
    }
    alignas(64) std::uint8_t order[64];  // [of the four][byte] to [byte][of the four]
    for (int i = 0; i < 64; ++i) order[i] = std::uint8_t(i % 4 * 16 + i / 4);
    const __m512i turn = _mm512_load_si512(order), nibble = _mm512_set1_epi8(15), which = _mm512_set1_epi32(0x30201000);
    const std::uint8_t *packed = weight.packed + (k0 * weight.stride + column) / 2;
    for (size_t four = 0; four < (count + RUN - 1) / RUN * (RUN / 4); ++four) {
        __m512i bytes = _mm512_setzero_si512();
        for (size_t k = 0; k < 4 && four * 4 + k < count; ++k, packed += weight.stride / 2) {
            Lanes::prefetch(packed + DEPTH * weight.stride / 2);
            const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed));
            bytes = _mm512_mask_broadcast_i32x4(bytes, __mmask16(15 << 4 * k), row);
        }
        bytes = _mm512_permutexvar_epi8(turn, bytes);
        constexpr int AND_OR = 0xea;  // (a & b) | c
        const __m512i low = _mm512_ternarylogic_epi32(bytes, nibble, which, AND_OR);
        const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 4), nibble, which, AND_OR);
        const size_t at = four / (RUN / 4) * RUN_BYTES + four % (RUN / 4) * 64;
        for (size_t p = 0; p < PLANES; ++p) {
            _mm512_store_si512(two[0].digits + at + p * TILE, _mm512_permutexvar_epi8(low, tables.planes[four][p]));
            _mm512_store_si512(two[1].digits + at + p * TILE, _mm512_permutexvar_epi8(high, tables.planes[four][p]));
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
    for (size_t tile = 0; tile < 8; ++tile) shapes.rows[tile] = L, shapes.bytes[tile] = RUN;
    _tile_loadconfig(&shapes);
}

// Add a run to the sums in registers 0 to 3, by weight, and 4, the bound's: planes [row][value] times [four values][row].
// `between` is called after each product.
template <typename Between>
INLINE void add_run(const std::int8_t *left, const std::int8_t *right, const Between &between) {
    const auto load_right = [&](size_t plane) { _tile_loadd(7, right + plane * TILE, RUN); };
    _tile_loadd(6, right, RUN);
    _tile_loadd(5, left, RUN);
    load_right(3);
    _tile_dpbssd(3, 5, 7);
    between(0);
    load_right(2);
    _tile_dpbssd(2, 5, 7);
    between(1);
    load_right(1);
    _tile_dpbssd(1, 5, 7);
    between(2);
    _tile_dpbssd(0, 5, 6);
    between(3);
    _tile_loadd(5, left + 2 * TILE, RUN);
    _tile_dpbssd(3, 5, 7);
    between(4);
    _tile_dpbssd(2, 5, 6);
    between(5);
    _tile_loadd(5, left + TILE, RUN);
    _tile_dpbssd(1, 5, 6);
    between(6);
    _tile_dpbssd(2, 5, 7);
    between(7);
    load_right(2);
    _tile_dpbssd(3, 5, 7);
    between(8);
    _tile_loadd(5, left + 3 * TILE, RUN);
    _tile_dpbssd(3, 5, 6);
    between(9);
    _tile_loadd(5, left + 4 * TILE, RUN);
    load_right(4);
    _tile_dpbssd(4, 5, 7);
    between(10);
}

// A tile's sums, which are still to be added to its totals and to what shows their bound: [output][row of x], of weights
// along N [row of x][output].
template <bool ALONG_K>
struct Pending {
    const DigitScales *x = nullptr;
    const GroupPanel *w = nullptr;
    double *totals = nullptr;
    float *shown = nullptr;

    INLINE void add(const std::int32_t *sums, size_t n) const {
        const __m512 base = _mm512_set1_ps(256), low = _mm512_set1_ps(0x1p-16f);
        const auto level = [&](size_t l) { return _mm512_cvtepi32_ps(_mm512_load_si512(sums + (l * L + n) * L)); };
        const __m512 above = _mm512_fmadd_ps(level(0), base, level(1)), below = _mm512_fmadd_ps(level(2), base, level(3));
        alignas(64) float sum[L];  // conversion from memory is cheaper than from a register's upper half
        const auto of_x = [&](const float *values) { return ALONG_K ? _mm512_load_ps(values) : _mm512_set1_ps(values[n]); };
        const auto of_w = [&](const double *values) { return ALONG_K ? _mm512_set1_pd(w->scales[n]) : _mm512_load_pd(values); };
        _mm512_store_ps(sum, _mm512_mul_ps(_mm512_fmadd_ps(below, low, above), of_x(x->unit)));
        KEEP_IN_MEMORY(sum);
        for (size_t i = 0; i < L; i += L / 2) {
            double *total = totals + n * L + i;
            const __m512d wide = _mm512_cvtps_pd(_mm256_load_ps(sum + i));
            _mm512_store_pd(total, _mm512_fmadd_pd(wide, of_w(w->scales + i), _mm512_load_pd(total)));
        }
        const __m512 room = _mm512_fmsub_ps(level(4), of_x(x->left), of_x(x->error));
        const __m512 size = ALONG_K ? _mm512_set1_ps(w->sizes[n]) : _mm512_load_ps(w->sizes);
        float *show = shown + n * L;
        _mm512_store_ps(show, _mm512_fmadd_ps(room, size, _mm512_load_ps(show)));
    }
};

// Products of a group's panel with all rows of x, added to the group's totals [tile] as Pending has them. Each group
// brings its part of the next panel of x near.
template <bool ALONG_K>
void multiply_panel(const DigitRows &x, size_t panel, size_t runs, size_t group, const GroupPanel &w, double *totals,
                    float *shown) {
    alignas(64) std::int32_t sums[PLANES * L * L];
    Pending<ALONG_K> pending;  // the tile before: its sums are added while the next one's are made
    for (size_t tile = 0; tile < x.shape.tiles; ++tile) {
        const size_t from = panel * x.shape.tiles + tile;
        const std::int8_t *digits = x.planes + from * PANEL_BYTES;
        const std::int8_t *next = digits + x.shape.tiles * PANEL_BYTES + group * (PANEL_BYTES / GROUPS);
        size_t added = pending.x ? 0 : L;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_zero(4);
        for (size_t run = 0; run < runs; ++run) {
            const std::int8_t *of_x = digits + run * RUN_BYTES, *of_w = w.digits + run * RUN_BYTES;
            add_run(ALONG_K ? of_w : of_x, ALONG_K ? of_x : of_w, [&](size_t product) __attribute__((always_inline)) {
                _mm_prefetch(reinterpret_cast<const char *>(next + (run * PRODUCTS + product) * 64), _MM_HINT_T1);
                if (product % 2 == 0 && added < L) pending.add(sums, added++);
            });
        }
        while (added < L) pending.add(sums, added++);
        _tile_stored(0, sums, RUN);
        _tile_stored(1, sums + L * L, RUN);
        _tile_stored(2, sums + 2 * L * L, RUN);
        _tile_stored(3, sums + 3 * L * L, RUN);
        _tile_stored(4, sums + 4 * L * L, RUN);
        pending = {x.scales + from, &w, totals + tile * L * L, shown + tile * L * L};
    }
    for (size_t n = 0; n < L; ++n) pending.add(sums, n);
}

// Round a group's totals to y, whose outputs lie so far apart, NaN where the bound is not shown -> how many are.
template <bool ALONG_K>
size_t store_group(const DigitRows &x, const double *totals, const float *shown, size_t columns, float *y, size_t outputs,
                   size_t apart) {
    size_t doubtful = 0;
    for (size_t m = 0; m < x.shape.M; ++m) {
        const size_t from = m / L * L * L + m % L * (ALONG_K ? 1 : L);
        for (size_t n = 0; n < columns; ++n) {
            const size_t at = from + n * (ALONG_K ? L : 1);
            const bool holds = shown[at] >= 0 && shown[at] < std::numeric_limits<float>::infinity();
            doubtful += !holds;
            y[m * outputs + n * apart] = holds ? float(totals[at] * x.row_scale[m]) : NAN;
        }
    }
    return doubtful;
}

// Decode the groups' panels at k0.
template <bool ALONG_K>
void decode_groups(const AnyWeight &weight, __m512 base, const Blocks &blocks, size_t column, size_t groups, size_t k0,
                   GroupPanel *panels) {
    if (ALONG_K) {
        for (size_t n = 0; n < groups * L; ++n) {  // past the last: never stored in y
            const size_t row = std::min(column + n, weight.rows - 1);
            Lanes::prefetch(weight.packed + (row * weight.stride + k0 + DEPTH) / 2);
            Lanes::prefetch(weight.packed + (row * weight.stride + k0 + DEPTH) / 2 + 64);
            decode_row(weight, base, blocks, row, k0, n % L, panels[n / L]);
        }
        return;
    }
    static thread_local Scratch<DepthTables> scratch;
    DepthTables *tables = scratch.at_least(1);
    const size_t count = std::min(DEPTH, weight.rows - k0);
    const bool together = weight.stride % weight.block_size == 0;  // blocks end at the same outputs in all rows
    for (size_t g = 0; g < groups; g += 2) {
        const size_t first = column + g * L;
        if (g == 0 || !together || first % weight.block_size == 0) tables->make(weight, base, blocks, k0, count, first);
        decode_along_n(weight, *tables, k0, count, first, panels + g);
    }
}

template <bool ALONG_K>
size_t multiply_groups(const Packed4 &weight, const DigitRows &x, float *y, size_t begin, size_t end) {
    const AnyWeight any{weight};
    const Blocks blocks(weight.block_size);
    const __m512 base = _mm512_loadu_ps(weight.table);
    const size_t size = x.shape.tiles * L * L;  // of a group's totals
    static thread_local Scratch<GroupPanel> panel_scratch;
    static thread_local Scratch<double> total_scratch;
    static thread_local Scratch<float> shown_scratch;
    GroupPanel *panels = panel_scratch.at_least(GROUPS);
    double *totals = total_scratch.at_least(GROUPS * size);
    float *shown = shown_scratch.at_least(GROUPS * size);
    size_t doubtful = 0;
    load_shapes();
    for (size_t column = begin; column < end; column += GROUPS * L) {
        const size_t columns = std::min(end - column, GROUPS * L), groups = (columns + L - 1) / L;
        std::memset(totals, 0, groups * size * sizeof(double));
        std::memset(shown, 0, groups * size * sizeof(float));
        for (size_t panel = 0; panel < x.shape.panels; ++panel) {
            const size_t k0 = panel * DEPTH, runs = std::min(RUNS, (weight.depth() - k0 + RUN - 1) / RUN);
            decode_groups<ALONG_K>(any, base, blocks, column, groups, k0, panels);
            for (size_t g = 0; g < groups; ++g) {
                multiply_panel<ALONG_K>(x, panel, runs, g, panels[g], totals + g * size, shown + g * size);
            }
        }
        for (size_t g = 0; g < groups; ++g) {
            const size_t nibble = g % 2 != weight.high_nibble_first;  // along N every other output is a group's
            const size_t first = column + (ALONG_K ? g * L : g / 2 * 2 * L + nibble), count = ALONG_K ? std::min(L, end - first) : L;
            doubtful += store_group<ALONG_K>(x, totals + g * size, shown + g * size, count, y + first, weight.outputs(),
                                             ALONG_K ? 1 : 2);
        }
    }
    _tile_release();
    return doubtful;
}

size_t multiply(const Packed4 &weight, const DigitRows &x, float *y, size_t begin, size_t end) {
    return weight.along_k ? multiply_groups<true>(weight, x, y, begin, end) : multiply_groups<false>(weight, x, y, begin, end);
}

const DigitKernels digits{serves, shape_of, split, multiply};

// AMX's tiles and bytes, AVX-512's bytes and their permutes; the system gives tiles to a process that asks.
bool usable() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = d >> 24 & 1, bytes = d >> 25 & 1, avx512bw = b >> 30 & 1, vbmi = c >> 1 & 1;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return tiles && bytes && avx512bw && vbmi && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

const DigitKernels *amx_digits() {
    static const bool here = usable();
    return here ? &digits : nullptr;
}

}  // namespace lut4tool
