#include "decode.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define LUT4TOOL_X86 1
#include <immintrin.h>
#endif

namespace lut4tool {
namespace {

using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

// ---- What an instruction set provides: rounding of a table to halves, and lookups of whole bytes ----

// `first` and `second` are the shifts that bring a byte's first and second element to its low nibble.
template <typename Entry>
void lookup_portable(const uint8_t *packed, size_t bytes, int first, int second, const Entry *table, Entry *out) {
    for (size_t i = 0; i < bytes; ++i) {
        out[2 * i] = table[(packed[i] >> first) & 15];
        out[2 * i + 1] = table[(packed[i] >> second) & 15];
    }
}

void halves_portable(const float *products, uint16_t *table) {
    for (int code = 0; code < 16; ++code) table[code] = float_to_half(products[code]);
}

struct Isa {
    const char *name;
    void (*lookup32)(const uint8_t *, size_t, int, int, const uint32_t *, uint32_t *);
    void (*lookup16)(const uint8_t *, size_t, int, int, const uint16_t *, uint16_t *);
    void (*halves)(const float *, uint16_t *);
};

const Isa portable{"portable", lookup_portable<uint32_t>, lookup_portable<uint16_t>, halves_portable};

#ifdef LUT4TOOL_X86
__attribute__((target("avx2,f16c"))) void halves_f16c(const float *products, uint16_t *table) {
    for (int code = 0; code < 16; code += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(products + code), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(table + code), half);
    }
}

// 8 elements at a time: each byte in both halves of 64 bits, shifted apart; vpermps looks up 8 entries, so two and a blend.
__attribute__((target("avx2"))) void lookup32_avx2(const uint8_t *packed, size_t bytes, int first, int second,
                                                   const uint32_t *table, uint32_t *out) {
    const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float *>(table));
    const __m256 high = _mm256_loadu_ps(reinterpret_cast<const float *>(table + 8));
    const __m256i shifts = _mm256_set1_epi64x(int64_t(second) << 32 | first);
    size_t i = 0;
    for (; i + 4 <= bytes; i += 4) {
        uint32_t four;
        std::memcpy(&four, packed + i, 4);
        const __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int(four)));
        const __m256i codes = _mm256_srlv_epi32(_mm256_or_si256(wide, _mm256_slli_epi64(wide, 32)), shifts);
        const __m256 above = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));  // bit 3 is the blend's sign bit
        const __m256 entries =
            _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), above);
        _mm256_storeu_ps(reinterpret_cast<float *>(out + 2 * i), entries);
    }
    lookup_portable(packed + i, bytes - i, first, second, table, out + 2 * i);
}

// 32 elements at a time: the table's low and high bytes apart, looked up by pshufb and joined again.
__attribute__((target("avx2"))) void lookup16_avx2(const uint8_t *packed, size_t bytes, int first, int second,
                                                   const uint16_t *table, uint16_t *out) {
    uint8_t planes[2][16];
    for (int code = 0; code < 16; ++code) {
        planes[0][code] = uint8_t(table[code]);
        planes[1][code] = uint8_t(table[code] >> 8);
    }
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(planes[0]));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(planes[1]));
    const __m128i nibble = _mm_set1_epi8(15), by_first = _mm_cvtsi32_si128(first), by_second = _mm_cvtsi32_si128(second);
    size_t i = 0;
    for (; i + 16 <= bytes; i += 16) {
        const __m128i data = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed + i));
        const __m128i even = _mm_and_si128(_mm_srl_epi16(data, by_first), nibble);
        const __m128i odd = _mm_and_si128(_mm_srl_epi16(data, by_second), nibble);
        const __m128i codes[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        __m128i *target = reinterpret_cast<__m128i *>(out + 2 * i);
        for (int part = 0; part < 2; ++part) {
            const __m128i l = _mm_shuffle_epi8(low, codes[part]), h = _mm_shuffle_epi8(high, codes[part]);
            _mm_storeu_si128(target + 2 * part, _mm_unpacklo_epi8(l, h));
            _mm_storeu_si128(target + 2 * part + 1, _mm_unpackhi_epi8(l, h));
        }
    }
    lookup_portable(packed + i, bytes - i, first, second, table, out + 2 * i);
}

// 16 elements at a time: vpermps is a lookup in 16 entries and reads the low 4 bits only.
__attribute__((target("avx512f"))) void lookup32_avx512(const uint8_t *packed, size_t bytes, int first, int second,
                                                        const uint32_t *table, uint32_t *out) {
    const __m512i entries = _mm512_loadu_si512(table);
    const __m512i shifts = _mm512_set1_epi64(int64_t(second) << 32 | first);
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        const __m512i wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(packed + i)));
        const __m512i codes = _mm512_srlv_epi32(_mm512_or_si512(wide, _mm512_slli_epi64(wide, 32)), shifts);
        _mm512_storeu_si512(out + 2 * i, _mm512_permutexvar_epi32(codes, entries));
    }
    lookup_portable(packed + i, bytes - i, first, second, table, out + 2 * i);
}

const Isa avx2{"avx2", lookup32_avx2, lookup16_avx2, halves_f16c};
const Isa avx512{"avx512", lookup32_avx512, lookup16_avx2, halves_f16c};
#endif

std::vector<const Isa *> supported() {
    std::vector<const Isa *> sets;
#ifdef LUT4TOOL_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        if (__builtin_cpu_supports("avx512f")) sets.push_back(&avx512);
        sets.push_back(&avx2);
    }
#endif
    sets.push_back(&portable);
    return sets;
}

const Isa *chosen = supported().front();

// ---- Blocks ----

void make_table(const float *products, Float, uint32_t *table) { std::memcpy(table, products, 64); }

void make_table(const float *products, Float type, uint16_t *table) {
    if (type == Float::f16) return chosen->halves(products, table);
    for (int code = 0; code < 16; ++code) table[code] = float_to_bfloat(products[code]);
}

void lookup(const uint8_t *packed, size_t bytes, int first, int second, const uint32_t *table, uint32_t *out) {
    chosen->lookup32(packed, bytes, first, second, table, out);
}

void lookup(const uint8_t *packed, size_t bytes, int first, int second, const uint16_t *table, uint16_t *out) {
    chosen->lookup16(packed, bytes, first, second, table, out);
}

template <typename Entry>
void decode_block(const uint8_t *packed, size_t count, bool high_first, const float *products, Float type, Entry *out) {
    Entry table[16];
    make_table(products, type, table);
    const int first = high_first ? 4 : 0;
    lookup(packed, count / 2, first, 4 - first, table, out);
    if (count % 2) out[count - 1] = table[(packed[count / 2] >> first) & 15];
}

template <typename Entry>
void decode_blocks(const Lookup4 &weight, size_t begin, size_t end, Entry *out, Float type) {
    float codebook[16], products[16];
    for (size_t code = 0; code < 16; ++code) codebook[code] = load(weight.codebook, code);
    for (size_t block = begin; block < end; ++block) {
        const float scale = load(weight.scales, block);
        for (int code = 0; code < 16; ++code) products[code] = codebook[code] * scale;
        const size_t at = block * weight.block_size, count = std::min(weight.block_size, weight.count - at);
        decode_block(weight.packed + at / 2, count, weight.high_nibble_first, products, type, out + at);
    }
}

float zero_point(const Qmm &weight, size_t block) {
    if (weight.shared) block = 0;
    if (weight.zero_points_are_codes) return float(static_cast<const uint8_t *>(weight.zero_points)[block]);
    return load({weight.zero_points, weight.scales.type}, block);
}

template <typename Entry>
void decode_rows(const Qmm &weight, size_t begin, size_t end, Entry *out) {
    const Float type = weight.scales.type;
    const size_t blocks = (weight.K + weight.block_size - 1) / weight.block_size;
    float products[16];
    for (size_t row = begin; row < end; ++row) {
        for (size_t block = 0; block < blocks; ++block) {
            const size_t index = row * blocks + block, at = block * weight.block_size;
            const float zero = zero_point(weight, index), scale = load(weight.scales, index);
            for (int code = 0; code < 16; ++code) products[code] = rounded(float(code) - zero, type) * scale;
            decode_block(weight.packed + index * weight.block_size / 2, std::min(weight.block_size, weight.K - at),
                         false, products, type, out + row * weight.K + at);
        }
    }
}

// Elements below which another thread costs more than it saves.
constexpr size_t elements_a_thread = size_t(1) << 18;

// Run work(begin, end) over [0, units) in at most `threads` parts; a unit has `elements` elements.
template <typename Work>
void split(size_t units, size_t elements, unsigned threads, const Work &work) {
    const size_t worth = std::max<size_t>(1, units * elements / elements_a_thread);
    const size_t parts = std::min({size_t(std::max(1u, threads)), worth, std::max<size_t>(1, units)});
    parallel(parts, threads, [&](size_t part) { work(units * part / parts, units * (part + 1) / parts); });
}

}  // namespace

void decode(const Lookup4 &weight, void *out, Float out_type, unsigned threads) {
    const size_t blocks = (weight.count + weight.block_size - 1) / weight.block_size;
    split(blocks, weight.block_size, threads, [&](size_t begin, size_t end) {
        if (out_type == Float::f32) return decode_blocks(weight, begin, end, static_cast<uint32_t *>(out), out_type);
        decode_blocks(weight, begin, end, static_cast<uint16_t *>(out), out_type);
    });
}

void decode(const Qmm &weight, void *out, unsigned threads) {
    split(weight.rows, weight.K, threads, [&](size_t begin, size_t end) {
        if (weight.scales.type == Float::f32) return decode_rows(weight, begin, end, static_cast<uint32_t *>(out));
        decode_rows(weight, begin, end, static_cast<uint16_t *>(out));
    });
}

const char *instruction_set() { return chosen->name; }

bool use_instruction_set(const char *name) {
    for (const Isa *isa : supported()) {
        if (std::string(isa->name) == name) {
            chosen = isa;
            return true;
        }
    }
    return false;
}

}  // namespace lut4tool
