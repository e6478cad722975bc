// 4 lanes of float32: a 16-entry table is 64 bytes, and a lookup one tbl of four registers.
#pragma once

#include <arm_neon.h>

#include "product.h"

namespace lut4tool {
namespace {

struct Lanes {
    using F = float32x4_t;
    using W = uint32x4_t;
    static constexpr std::size_t count = 4, rows_of_tile = 6;

    struct Table {
        F entries[4];
    };
    struct Doubles {
        float64x2_t low, high;
    };

    static Table table(const float *entries) {
        return {{vld1q_f32(entries), vld1q_f32(entries + 4), vld1q_f32(entries + 8), vld1q_f32(entries + 12)}};
    }
    template <int SHIFT>
    static F lookup(const Table &table, W words) {  // the four bytes of entry c are 4c ... 4c + 3
        const W codes = vandq_u32(shifted<SHIFT>(words), vdupq_n_u32(15));
        const W bytes = vaddq_u32(vmulq_n_u32(codes, 0x04040404), vdupq_n_u32(0x03020100));
        const uint8x16x4_t all = {{vreinterpretq_u8_f32(table.entries[0]), vreinterpretq_u8_f32(table.entries[1]),
                                   vreinterpretq_u8_f32(table.entries[2]), vreinterpretq_u8_f32(table.entries[3])}};
        return vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_u32(bytes)));
    }
    static W widen(const std::uint8_t *bytes) {
        std::uint32_t four;
        std::memcpy(&four, bytes, 4);
        const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
        return vmovl_u16(vget_low_u16(wide));
    }

    static F load(const float *from) { return vld1q_f32(from); }
    static void store(float *to, F value) { vst1q_f32(to, value); }
    static F broadcast(float value) { return vdupq_n_f32(value); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F clip(F v, F low, F high) { return vminq_f32(high, vmaxq_f32(low, v)); }  // NaN stays

    static Doubles no_doubles() { return {vdupq_n_f64(0), vdupq_n_f64(0)}; }
    static void accumulate(Doubles &total, F value) {
        total.low = vaddq_f64(total.low, vcvt_f64_f32(vget_low_f32(value)));
        total.high = vaddq_f64(total.high, vcvt_high_f64_f32(value));
    }
    static void accumulate(double *totals, F value) {
        vst1q_f64(totals, vaddq_f64(vld1q_f64(totals), vcvt_f64_f32(vget_low_f32(value))));
        vst1q_f64(totals + 2, vaddq_f64(vld1q_f64(totals + 2), vcvt_high_f64_f32(value)));
    }
    static void accumulate_half(double *totals, const float *values) {
        vst1q_f64(totals, vaddq_f64(vld1q_f64(totals), vcvt_f64_f32(vld1_f32(values))));
    }
    static double sum(const Doubles &total) { return vaddvq_f64(vaddq_f64(total.low, total.high)); }

    static F round_f16(F value) { return vcvt_f32_f16(vcvt_f16_f32(value)); }
    static F round_bf16(F value) {
        const W bits = vreinterpretq_u32_f32(value), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const W up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        const W kept = vbslq_u32(vceqq_f32(value, value), up, quiet);
        return vreinterpretq_f32_u32(vandq_u32(kept, vdupq_n_u32(0xffff0000)));
    }

    // words[j] lane i = bytes 4j ... 4j + 3 of rows[i].
    static void load_rows(const std::uint8_t *const *rows, W *words) {
        W row[4];
        for (int i = 0; i < 4; ++i) row[i] = vreinterpretq_u32_u8(vld1q_u8(rows[i]));
        const uint32x4x2_t first = vtrnq_u32(row[0], row[1]), second = vtrnq_u32(row[2], row[3]);
        words[0] = vcombine_u32(vget_low_u32(first.val[0]), vget_low_u32(second.val[0]));
        words[1] = vcombine_u32(vget_low_u32(first.val[1]), vget_low_u32(second.val[1]));
        words[2] = vcombine_u32(vget_high_u32(first.val[0]), vget_high_u32(second.val[0]));
        words[3] = vcombine_u32(vget_high_u32(first.val[1]), vget_high_u32(second.val[1]));
    }

    static void prefetch(const void *bytes) { __builtin_prefetch(bytes); }

  private:
    template <int SHIFT>
    static W shifted(W words) {
        if constexpr (SHIFT == 0) {
            return words;
        } else {
            return vshrq_n_u32(words, SHIFT);
        }
    }
};

}  // namespace
}  // namespace lut4tool
