// 16 lanes of float32: a 16-entry table is one register, and a lookup one permute.
#pragma once

#include <immintrin.h>

#include "product.h"

namespace lut4tool {
namespace {

struct Lanes {
    using F = __m512;
    using W = __m512i;
    static constexpr std::size_t count = 16, rows_of_tile = 6;

    struct Table {
        F entries[1];
    };
    struct Doubles {
        __m512d low, high;
    };

    static Table table(const float *entries) { return {{_mm512_loadu_ps(entries)}}; }
    template <int SHIFT>
    static F lookup(const Table &table, W words) {  // vpermps reads the low 4 bits of a lane only
        return _mm512_permutexvar_ps(SHIFT ? _mm512_srli_epi32(words, SHIFT) : words, table.entries[0]);
    }
    static W widen(const std::uint8_t *bytes) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
    }

    static F load(const float *from) { return _mm512_loadu_ps(from); }
    static void store(float *to, F value) { _mm512_storeu_ps(to, value); }
    static F broadcast(float value) { return _mm512_set1_ps(value); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F clip(F v, F low, F high) { return _mm512_min_ps(high, _mm512_max_ps(low, v)); }  // NaN stays

    static Doubles no_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
    static Doubles widened(F value) {
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1));
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(value)), _mm512_cvtps_pd(high)};
    }
    static void accumulate(Doubles &total, F value) {
        const Doubles wide = widened(value);
        total = {_mm512_add_pd(total.low, wide.low), _mm512_add_pd(total.high, wide.high)};
    }
    static void accumulate(double *totals, F value) {
        const Doubles wide = widened(value);
        _mm512_storeu_pd(totals, _mm512_add_pd(_mm512_loadu_pd(totals), wide.low));
        _mm512_storeu_pd(totals + 8, _mm512_add_pd(_mm512_loadu_pd(totals + 8), wide.high));
    }
    static void accumulate_half(double *totals, const float *values) {
        _mm512_storeu_pd(totals, _mm512_add_pd(_mm512_loadu_pd(totals), _mm512_cvtps_pd(_mm256_loadu_ps(values))));
    }
    static double sum(const Doubles &total) { return _mm512_reduce_add_pd(_mm512_add_pd(total.low, total.high)); }

    static F round_f16(F value) {
        return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static F round_bf16(F value) {
        const W bits = _mm512_castps_si512(value);
        const W odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const W up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const W quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        const W kept = _mm512_mask_mov_epi32(up, nan, quiet);
        return _mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32(int(0xffff0000))));
    }

    // words[j] lane i = bytes 4j ... 4j + 3 of rows[i].
    static void load_rows(const std::uint8_t *const *rows, W *words) {
        __m512 part[4];
        for (int i = 0; i < 4; ++i) {
            __m512i four = _mm512_castsi128_si512(row(rows[i]));
            four = _mm512_inserti32x4(four, row(rows[4 + i]), 1);
            four = _mm512_inserti32x4(four, row(rows[8 + i]), 2);
            part[i] = _mm512_castsi512_ps(_mm512_inserti32x4(four, row(rows[12 + i]), 3));
        }
        const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(part[0], part[1]));
        const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(part[0], part[1]));
        const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(part[2], part[3]));
        const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(part[2], part[3]));
        words[0] = _mm512_castpd_si512(_mm512_unpacklo_pd(low01, low23));
        words[1] = _mm512_castpd_si512(_mm512_unpackhi_pd(low01, low23));
        words[2] = _mm512_castpd_si512(_mm512_unpacklo_pd(high01, high23));
        words[3] = _mm512_castpd_si512(_mm512_unpackhi_pd(high01, high23));
    }

    static void prefetch(const void *bytes) { _mm_prefetch(static_cast<const char *>(bytes), _MM_HINT_T0); }

  private:
    static __m128i row(const std::uint8_t *bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)); }
};

}  // namespace
}  // namespace lut4tool
