// 8 lanes of float32: a 16-entry table is two registers, and a lookup two permutes and a blend.
#pragma once

#include <immintrin.h>

#include "product.h"

namespace lut4tool {
namespace {

struct Lanes {
    using F = __m256;
    using W = __m256i;
    static constexpr std::size_t count = 8, rows_of_tile = 3;

    struct Table {
        F entries[2];
    };
    struct Doubles {
        __m256d low, high;
    };

    static Table table(const float *entries) { return {{_mm256_loadu_ps(entries), _mm256_loadu_ps(entries + 8)}}; }
    template <int SHIFT>
    static F lookup(const Table &table, W words) {  // vpermps reads the low 3 bits of a lane; bit 3 becomes the blend's sign
        const W codes = SHIFT ? _mm256_srli_epi32(words, SHIFT) : words;
        const F above = _mm256_castsi256_ps(SHIFT == 28 ? words : _mm256_slli_epi32(words, 28 - SHIFT));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.entries[0], codes),
                                _mm256_permutevar8x32_ps(table.entries[1], codes), above);
    }
    static W widen(const std::uint8_t *bytes) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
    }

    static F load(const float *from) { return _mm256_loadu_ps(from); }
    static void store(float *to, F value) { _mm256_storeu_ps(to, value); }
    static F broadcast(float value) { return _mm256_set1_ps(value); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F clip(F v, F low, F high) { return _mm256_min_ps(high, _mm256_max_ps(low, v)); }  // NaN stays

    static Doubles no_doubles() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    static Doubles widened(F value) {
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(value)), _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1))};
    }
    static void accumulate(Doubles &total, F value) {
        const Doubles wide = widened(value);
        total = {_mm256_add_pd(total.low, wide.low), _mm256_add_pd(total.high, wide.high)};
    }
    static void accumulate(double *totals, F value) {
        const Doubles wide = widened(value);
        _mm256_storeu_pd(totals, _mm256_add_pd(_mm256_loadu_pd(totals), wide.low));
        _mm256_storeu_pd(totals + 4, _mm256_add_pd(_mm256_loadu_pd(totals + 4), wide.high));
    }
    static void accumulate_half(double *totals, const float *values) {
        _mm256_storeu_pd(totals, _mm256_add_pd(_mm256_loadu_pd(totals), _mm256_cvtps_pd(_mm_loadu_ps(values))));
    }
    static double sum(const Doubles &total) {
        double parts[4];
        _mm256_storeu_pd(parts, _mm256_add_pd(total.low, total.high));
        return (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }

    static F round_f16(F value) {
        return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static F round_bf16(F value) {
        const W bits = _mm256_castps_si256(value);
        const W odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const W up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const W quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const W kept = _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q)));
        return _mm256_castsi256_ps(_mm256_and_si256(kept, _mm256_set1_epi32(int(0xffff0000))));
    }

    // words[j] lane i = bytes 4j ... 4j + 3 of rows[i].
    static void load_rows(const std::uint8_t *const *rows, W *words) {
        __m256 part[4];
        for (int i = 0; i < 4; ++i) {
            part[i] = _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(row(rows[i])), row(rows[4 + i]), 1));
        }
        const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(part[0], part[1]));
        const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(part[0], part[1]));
        const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(part[2], part[3]));
        const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(part[2], part[3]));
        words[0] = _mm256_castpd_si256(_mm256_unpacklo_pd(low01, low23));
        words[1] = _mm256_castpd_si256(_mm256_unpackhi_pd(low01, low23));
        words[2] = _mm256_castpd_si256(_mm256_unpacklo_pd(high01, high23));
        words[3] = _mm256_castpd_si256(_mm256_unpackhi_pd(high01, high23));
    }

    static void prefetch(const void *bytes) { _mm_prefetch(static_cast<const char *>(bytes), _MM_HINT_T0); }

  private:
    static __m128i row(const std::uint8_t *bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)); }
};

}  // namespace
}  // namespace lut4tool
