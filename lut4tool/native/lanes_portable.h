// 8 lanes of float32 in plain C++, for any machine: the compiler makes vectors of them where it can.
// Without an fma instruction a product and its sum round apart; a chain that begins with a product has as many roundings.
#pragma once

#include "product.h"

namespace lut4tool {
namespace {

struct Lanes {
    static constexpr std::size_t count = 8, rows_of_tile = 3;

    struct F {
        float lane[count];
    };
    struct W {
        std::uint32_t lane[count];
    };
    struct Table {
        F entries[2];
    };
    struct Doubles {
        double lane[count];
    };

    template <typename Make>
    static F made(const Make &make) {
        F result;
        for (std::size_t i = 0; i < count; ++i) result.lane[i] = make(i);
        return result;
    }

    static Table table(const float *entries) { return {{load(entries), load(entries + count)}}; }
    template <int SHIFT>
    static F lookup(const Table &table, const W &words) {
        return made([&](std::size_t i) {
            const std::uint32_t code = (words.lane[i] >> SHIFT) & 15;
            return table.entries[code / count].lane[code % count];
        });
    }
    static W widen(const std::uint8_t *bytes) {
        W words;
        for (std::size_t i = 0; i < count; ++i) words.lane[i] = bytes[i];
        return words;
    }

    static F load(const float *from) { return made([=](std::size_t i) { return from[i]; }); }
    static void store(float *to, const F &value) {
        for (std::size_t i = 0; i < count; ++i) to[i] = value.lane[i];
    }
    static F broadcast(float value) { return made([=](std::size_t) { return value; }); }
    static F add(const F &a, const F &b) { return made([&](std::size_t i) { return a.lane[i] + b.lane[i]; }); }
    static F sub(const F &a, const F &b) { return made([&](std::size_t i) { return a.lane[i] - b.lane[i]; }); }
    static F mul(const F &a, const F &b) { return made([&](std::size_t i) { return a.lane[i] * b.lane[i]; }); }
    static F fma(const F &a, const F &b, const F &c) {
        return made([&](std::size_t i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
    }
    static F clip(const F &v, const F &low, const F &high) {  // NaN stays
        return made([&](std::size_t i) {
            const float raised = v.lane[i] < low.lane[i] ? low.lane[i] : v.lane[i];
            return raised > high.lane[i] ? high.lane[i] : raised;
        });
    }

    static Doubles no_doubles() { return {}; }
    static void accumulate(Doubles &total, const F &value) { accumulate(total.lane, value); }
    static void accumulate(double *totals, const F &value) {
        for (std::size_t i = 0; i < count; ++i) totals[i] += double(value.lane[i]);
    }
    static void accumulate_half(double *totals, const float *values) {
        for (std::size_t i = 0; i < count / 2; ++i) totals[i] += double(values[i]);
    }
    static double sum(const Doubles &total) {
        double result = 0;
        for (double value : total.lane) result += value;
        return result;
    }

    static F round_f16(const F &value) { return made([&](std::size_t i) { return rounded(value.lane[i], Float::f16); }); }
    static F round_bf16(const F &value) { return made([&](std::size_t i) { return rounded(value.lane[i], Float::bf16); }); }

    // words[j] lane i = bytes 4j ... 4j + 3 of rows[i].
    static void load_rows(const std::uint8_t *const *rows, W *words) {
        for (std::size_t j = 0; j < 4; ++j) {
            for (std::size_t i = 0; i < count; ++i) {
                const std::uint8_t *four = rows[i] + 4 * j;
                words[j].lane[i] = std::uint32_t(four[0]) | std::uint32_t(four[1]) << 8 | std::uint32_t(four[2]) << 16 |
                                   std::uint32_t(four[3]) << 24;
            }
        }
    }

    static void prefetch(const void *) {}
};

}  // namespace
}  // namespace lut4tool
