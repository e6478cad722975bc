// The kernels, on the vector operations of an instruction set (`Lanes`). Included once for each, inside a namespace
// without a name, so that no code for a newer machine is shared with an older one.
//
// The bound: a product goes through 4 roundings in its chain, 3 at most in sums of chains by pairs, none that counts in
// double, and the last one: 8 of 2^-24 / (1 + 2^-24), so 2^-21 sum |x||w| (1 + 2^-22) for any data in any order.

#define INLINE inline __attribute__((always_inline))
#define KEEP_IN_MEMORY(values) asm volatile("" : : "r"(values) : "memory")

constexpr std::size_t L = Lanes::count;
constexpr std::size_t CHUNK = 2 * L;       // codes that one load widens to lanes, two a lane
constexpr std::size_t CHAIN = 2 * CHUNK;   // four products a lane
constexpr std::size_t GROUP = 4 * CHAIN;   // what is summed in float before it is added in double
constexpr std::size_t STEPS = 32;          // the same in a tile, along the depth: 8 chains
static_assert(PADDING % STEPS == 0);
constexpr std::size_t STRIPS = 256 / CHUNK;  // strips decoded at a time, from two lines of a row along N

constexpr std::size_t APART = PANEL * CHUNK + CHUNK;  // of their panels: not a power of two, which would crowd L1's sets

using F = Lanes::F;
using W = Lanes::W;

INLINE F rounded_to(F value, Float type) {
    if (type == Float::f32) return value;
    return type == Float::f16 ? Lanes::round_f16(value) : Lanes::round_bf16(value);
}

// A weight as most are: constants where others have branches, which would make too much code of what is unrolled.
struct PlainWeight : Packed4 {
    static constexpr Zeros zeros = Zeros::none;
    static constexpr Float rounding = Float::f32;
};

// QMM's with zero points that are codes.
struct AffineWeight : Packed4 {
    static constexpr Zeros zeros = Zeros::codes;
    static constexpr Float rounding = Float::f32;
};

// -255 ... 15: the 16 codes less a zero point are 16 of these.
struct Ramp {
    float values[271];

    constexpr Ramp() : values() {
        for (int i = 0; i < 271; ++i) values[i] = float(i - 255);
    }
};
constexpr Ramp RAMP;

// Codes, looked up, to weights; a zero point that is a code is subtracted exactly.
template <typename Weight>
INLINE F weights(const Weight &weight, F value, F scale, F zero) {
    if (weight.zeros != Packed4::Zeros::none) {
        value = Lanes::sub(value, zero);
        if (weight.zeros == Packed4::Zeros::floats) value = rounded_to(value, weight.rounding);
    }
    return rounded_to(Lanes::mul(value, scale), weight.rounding);
}

template <typename Weight>
INLINE F zero_of_block(const Weight &weight, std::size_t block) {
    return Lanes::broadcast(weight.zeros == Packed4::Zeros::none ? 0 : zero_of(weight, block));
}

// The 16 weights that a block has.
template <typename Weight>
INLINE Lanes::Table block_table(const Weight &weight, const Lanes::Table &base, std::size_t block) {
    constexpr std::size_t registers = sizeof(Lanes::Table) / sizeof(F);
    Lanes::Table table;
    const F scale = Lanes::broadcast(scale_of(weight, block));
    if (weight.zeros == Packed4::Zeros::codes) {
        const float *steps = RAMP.values + 255 - code_zero_of(weight, block);
        for (std::size_t i = 0; i < registers; ++i) {
            table.entries[i] = rounded_to(Lanes::mul(Lanes::load(steps + i * L), scale), weight.rounding);
        }
        return table;
    }
    const F zero = zero_of_block(weight, block);
    for (std::size_t i = 0; i < registers; ++i) table.entries[i] = weights(weight, base.entries[i], scale, zero);
    return table;
}

// The same for as few lookups as a chunk has: a table of several registers is not made, but each lookup multiplied.
struct ChunkWeights {
    static constexpr bool TABLE = sizeof(Lanes::Table) == sizeof(F);
    F table, scale, zero;

    template <typename Weight>
    INLINE ChunkWeights(const Weight &weight, const Lanes::Table &base, std::size_t block)
        : table(base.entries[0]), scale(Lanes::broadcast(scale_of(weight, block))), zero(zero_of_block(weight, block)) {
        if constexpr (TABLE) table = weights(weight, table, scale, zero);
    }
    template <int SHIFT, typename Weight>
    INLINE F lookup(const Weight &weight, const Lanes::Table &base, W codes) const {
        if constexpr (TABLE) {
            return Lanes::lookup<SHIFT>({{table}}, codes);
        } else {
            return weights(weight, Lanes::lookup<SHIFT>(base, codes), scale, zero);
        }
    }
};

INLINE F pairs(const F *sums) { return Lanes::add(Lanes::add(sums[0], sums[1]), Lanes::add(sums[2], sums[3])); }

// ---- gemv, rows along K: a dot product a row ----

template <bool ONE_SCALE, typename Weight>
INLINE F chain_along_k(const Weight &weight, const Lanes::Table &base, const Blocks &blocks, const std::uint8_t *packed,
                       std::size_t flat, const float *x) {
    Lanes::Table table = block_table(weight, base, blocks.of(flat));
    W codes = Lanes::widen(packed);
    F sum = Lanes::mul(Lanes::lookup<0>(table, codes), Lanes::load(x));
    sum = Lanes::fma(Lanes::lookup<4>(table, codes), Lanes::load(x + L), sum);
    if (!ONE_SCALE) table = block_table(weight, base, blocks.of(flat + CHUNK));
    codes = Lanes::widen(packed + CHUNK / 2);
    sum = Lanes::fma(Lanes::lookup<0>(table, codes), Lanes::load(x + CHUNK), sum);
    return Lanes::fma(Lanes::lookup<4>(table, codes), Lanes::load(x + CHUNK + L), sum);
}

template <bool ONE_SCALE, typename Weight>
void gemv_along_k(const Weight &weight, const float *x, float *y, std::size_t begin, std::size_t end) {
    const Lanes::Table base = Lanes::table(weight.table);
    const Blocks blocks(weight.block_size);
    const std::size_t depth = weight.cols;
    for (std::size_t n = begin; n < end; ++n) {
        const std::size_t row = n * weight.stride;
        const std::uint8_t *packed = weight.packed + row / 2;
        Lanes::Doubles total = Lanes::no_doubles();
        std::size_t k = 0;
        for (; k + GROUP <= depth; k += GROUP) {
            Lanes::prefetch(packed + k / 2 + 2048);
            F sums[4];
            for (std::size_t c = 0; c < 4; ++c) {
                const std::size_t at = k + c * CHAIN;
                sums[c] = chain_along_k<ONE_SCALE>(weight, base, blocks, packed + at / 2, row + at, x + at);
            }
            Lanes::accumulate(total, pairs(sums));
        }
        for (; k + CHAIN <= depth; k += CHAIN) {
            Lanes::accumulate(total, chain_along_k<ONE_SCALE>(weight, base, blocks, packed + k / 2, row + k, x + k));
        }
        double sum = Lanes::sum(total);
        if (k < depth) {  // x is packed in chunks: undo that for what is less than a chain
            float rest[CHAIN];
            decode_run(weight, n, k, depth, rest);
            for (std::size_t i = 0; k + i < depth; ++i) {
                const std::size_t at = i / CHUNK * CHUNK + (i % 2 != weight.high_nibble_first) * L + i % CHUNK / 2;
                sum += double(rest[i]) * x[k + at];
            }
        }
        y[n] = float(sum);
    }
}

// ---- gemv, rows along N: 32 rows at a time, columns in vectors ----

constexpr std::size_t ROWS_AT_ONCE = 32;  // 8 chains

// x[0] row 0 + ... of `count` rows, 4 at most, in CHUNKS chunks of columns that have one scale a row.
template <std::size_t CHUNKS, typename Weight>
INLINE void chain_along_n(const Weight &weight, const Lanes::Table &base, const Blocks &blocks, const float *x,
                          std::size_t flat, std::size_t count, F (&sums)[2 * CHUNKS]) {
#pragma GCC unroll 4
    for (std::size_t r = 0; r < count; ++r, flat += weight.stride) {
        const ChunkWeights chunk(weight, base, blocks.of(flat));
        const F value = Lanes::broadcast(x[r]);
#pragma GCC unroll 8
        for (std::size_t c = 0; c < CHUNKS; ++c) {
            const W codes = Lanes::widen(weight.packed + (flat + c * CHUNK) / 2);
            const F first = chunk.lookup<0>(weight, base, codes), second = chunk.lookup<4>(weight, base, codes);
            sums[2 * c] = r == 0 ? Lanes::mul(first, value) : Lanes::fma(first, value, sums[2 * c]);
            sums[2 * c + 1] = r == 0 ? Lanes::mul(second, value) : Lanes::fma(second, value, sums[2 * c + 1]);
        }
    }
}

// Weights that are rounded take much code, which is not to be repeated for each chain.
template <std::size_t CHUNKS, typename Weight>
__attribute__((noinline)) void chain_apart(const Weight &weight, const Lanes::Table &base, const Blocks &blocks,
                                           const float *x, std::size_t flat, F (&sums)[2 * CHUNKS]) {
    chain_along_n<CHUNKS>(weight, base, blocks, x, flat, 4, sums);
}

// The I-th chain of 8, added to those before it as a binary counter carries: carried[l] holds the sum of 2^l of them.
template <std::size_t CHUNKS, std::size_t I, typename Weight>
INLINE void chains_along_n(const Weight &weight, const Lanes::Table &base, const Blocks &blocks, const float *x,
                           std::size_t flat, float (&carried)[3][CHUNKS * CHUNK]) {
    if constexpr (I < 8) {
        constexpr std::size_t carries = I % 2 == 0 ? 0 : I % 4 == 1 ? 1 : I == 3 ? 2 : 3;
        F sums[2 * CHUNKS];
        if constexpr (std::is_same_v<Weight, PlainWeight>) {
            chain_along_n<CHUNKS>(weight, base, blocks, x + 4 * I, flat + 4 * I * weight.stride, 4, sums);
        } else {
            chain_apart<CHUNKS>(weight, base, blocks, x + 4 * I, flat + 4 * I * weight.stride, sums);
        }
#pragma GCC unroll 16
        for (std::size_t v = 0; v < 2 * CHUNKS; ++v) {
            F sum = sums[v];
#pragma GCC unroll 3
            for (std::size_t l = 0; l < carries; ++l) sum = Lanes::add(sum, Lanes::load(carried[l] + v * L));
            Lanes::store(carried[carries % 3] + v * L, sum);
        }
        chains_along_n<CHUNKS, I + 1>(weight, base, blocks, x, flat, carried);
    }
}

// 32 rows of CHUNKS chunks, added to the totals half a vector at a time: conversion from memory is the cheaper one.
template <std::size_t CHUNKS, typename Weight>
INLINE void rows_along_n(const Weight &weight, const Lanes::Table &base, const Blocks &blocks, const float *x,
                         std::size_t flat, double *totals) {
    alignas(64) float carried[3][CHUNKS * CHUNK];
    chains_along_n<CHUNKS, 0>(weight, base, blocks, x, flat, carried);
    KEEP_IN_MEMORY(carried);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < CHUNKS * CHUNK; i += L / 2) Lanes::accumulate_half(totals + i, carried[0] + i);
}

// Round a chunk's sums to y: its lookups gave the low nibbles first, then the high ones.
INLINE void in_order(const double *sums, bool high_nibble_first, float *y) {
    for (std::size_t i = 0; i < L; ++i) {
        y[2 * i + high_nibble_first] = float(sums[i]);
        y[2 * i + !high_nibble_first] = float(sums[L + i]);
    }
}

template <std::size_t CHUNKS, typename Weight>
void gemv_along_n(const Weight &weight, const float *x, float *y, std::size_t begin, std::size_t end) {
    static thread_local Scratch<double> scratch;
    const std::size_t columns = end - begin;
    double *totals = scratch.at_least(columns);
    const Lanes::Table base = Lanes::table(weight.table);
    const Blocks blocks(weight.block_size);
    for (std::size_t i = 0; i < columns; ++i) totals[i] = 0;
    std::size_t k = 0;
    for (; k + ROWS_AT_ONCE <= weight.rows; k += ROWS_AT_ONCE) {
        for (std::size_t c = 0; c < columns; c += CHUNKS * CHUNK) {
            const std::size_t flat = k * weight.stride + begin + c;
            if (c % 128 == 0) {  // the line after the next one of each row
                for (std::size_t r = 0; r < ROWS_AT_ONCE; ++r) {
                    Lanes::prefetch(weight.packed + (flat + r * weight.stride) / 2 + 128);
                }
            }
            rows_along_n<CHUNKS>(weight, base, blocks, x + k, flat, totals + c);
        }
    }
    for (; k < weight.rows; ++k) {
        for (std::size_t c = 0; c < columns; c += CHUNK) {
            F sums[2];
            chain_along_n<1>(weight, base, blocks, x + k, k * weight.stride + begin + c, 1, sums);
            Lanes::accumulate(totals + c, sums[0]);
            Lanes::accumulate(totals + c + L, sums[1]);
        }
    }
    for (std::size_t c = 0; c < columns; c += CHUNK) in_order(totals + c, weight.high_nibble_first, y + begin + c);
}

template <typename Weight>
void gemv_of(const Weight &weight, const float *x, float *y, std::size_t begin, std::size_t end) {
    const auto runs_of = [&](std::size_t count) { return weight.block_size % count == 0 && weight.stride % count == 0; };
    if (weight.along_k) {
        if (runs_of(CHAIN)) return gemv_along_k<true>(weight, x, y, begin, end);
        return gemv_along_k<false>(weight, x, y, begin, end);
    }
    if (runs_of(64)) return gemv_along_n<64 / CHUNK>(weight, x, y, begin, end);
    gemv_along_n<32 / CHUNK>(weight, x, y, begin, end);
}

// ---- tile: panels [depth][strip] decoded into cache ----

// A panel from rows along N: a row's chunk as it lies, low nibbles first. One panel after the other, as loads wait for
// stores that end in the same 12 bits of address, which the stores to several panels together nearly always do.
template <typename Weight>
INLINE void panel_along_n(const Weight &weight, const Lanes::Table &base, const Blocks &blocks, std::size_t column,
                          std::size_t k0, std::size_t depth, float *panel) {
    constexpr std::size_t LINE = 128;  // columns
    for (std::size_t k = 0; k < depth; ++k, panel += CHUNK) {
        const std::size_t flat = (k0 + k) * weight.stride + column;
        if (column % LINE == 0) Lanes::prefetch(weight.packed + (flat + PANEL * weight.stride) / 2);
        const ChunkWeights chunk(weight, base, blocks.of(flat));
        const W codes = Lanes::widen(weight.packed + flat / 2);
        Lanes::store(panel, chunk.template lookup<0>(weight, base, codes));
        Lanes::store(panel + L, chunk.template lookup<4>(weight, base, codes));
    }
}

template <int I, typename Weight>
INLINE void eight_steps(const Weight &weight, const Lanes::Table &base, W codes, F zero, F scale, float *panel) {
    if constexpr (I < 8) {
        const F value = weights(weight, Lanes::lookup<4 * I>(base, codes), scale, zero);
        Lanes::store(panel + (I ^ int(weight.high_nibble_first)) * CHUNK, value);
        eight_steps<I + 1>(weight, base, codes, zero, scale, panel);
    }
}

// Scales and zero points of L rows at the blocks they are in.
template <typename Weight>
INLINE void scales_of_rows(const Weight &weight, const std::size_t *block, F &scale, F &zero) {
    alignas(64) float values[L];
    if (weight.scales.type == Float::f32) {
        const char *all = static_cast<const char *>(weight.scales.data);
        for (std::size_t i = 0; i < L; ++i) {
            Lanes::prefetch(all + 4 * (block[i] + PANEL / weight.block_size));
            std::memcpy(values + i, all + 4 * block[i], 4);
        }
    } else {
        for (std::size_t i = 0; i < L; ++i) values[i] = scale_of(weight, block[i]);
    }
    scale = Lanes::load(values);
    if (weight.zeros == Packed4::Zeros::none) return;
    for (std::size_t i = 0; i < L; ++i) values[i] = zero_of(weight, block[i]);
    zero = Lanes::load(values);
}

// A panel from rows along K: 16 bytes of each of L rows are transposed while they are codes, 8 to a word.
template <typename Weight>
INLINE void panel_along_k(const Weight &weight, const Lanes::Table &base, const Blocks &blocks, std::size_t column,
                          std::size_t k0, std::size_t depth, float *panel) {
    const bool together = weight.stride % weight.block_size == 0;  // all rows enter their blocks at the same k
    for (std::size_t half = 0; half < CHUNK; half += L) {
        std::size_t starts[L], block[L];
        const std::uint8_t *rows[L];
        for (std::size_t i = 0; i < L; ++i) {
            const std::size_t n = column + half + i;
            starts[i] = (n < weight.rows ? n : weight.rows - 1) * weight.stride + k0;  // past the last: never stored in y
            rows[i] = weight.packed + starts[i] / 2;
            block[i] = blocks.of(starts[i]);
        }
        F scale = Lanes::broadcast(0), zero = Lanes::broadcast(0);
        for (std::size_t k = 0; k < depth; k += 32) {
            if (k > 0 && !together) {
                for (std::size_t i = 0; i < L; ++i) block[i] = blocks.of(starts[i] + k);
            } else if (k > 0 && (k0 + k) % weight.block_size == 0) {
                for (std::size_t i = 0; i < L; ++i) ++block[i];
            }
            if (k == 0 || !together || (k0 + k) % weight.block_size == 0) scales_of_rows(weight, block, scale, zero);
            W words[4];
            Lanes::load_rows(rows, words);
            for (std::size_t i = 0; i < L; ++i) {
                if (k % 128 == 0) Lanes::prefetch(rows[i] + PANEL / 2);
                rows[i] += 16;
            }
#pragma GCC unroll 1
            for (std::size_t word = 0; word < 4; ++word) {
                eight_steps<0>(weight, base, words[word], zero, scale, panel + (k + 8 * word) * CHUNK + half);
            }
        }
    }
}

template <typename Weight>
INLINE void panel_of_any(const Weight &weight, std::size_t column, std::size_t k0, std::size_t depth, float *panel) {
    const std::size_t outputs = weight.outputs(), last = outputs - column < CHUNK ? outputs : column + CHUNK;
    // Columns past the last are multiplied too: what lies there may be subnormal, which is slow.
    for (std::size_t i = 0; last - column < CHUNK && i < depth * CHUNK; ++i) panel[i] = 0;
    if (!weight.along_k) {
        for (std::size_t k = 0; k < depth; ++k) decode_run(weight, k0 + k, column, last, panel + k * CHUNK);
        return;
    }
    float run[PANEL];
    for (std::size_t n = column; n < last; ++n) {
        decode_run(weight, n, k0, k0 + depth, run);
        for (std::size_t k = 0; k < depth; ++k) panel[k * CHUNK + n - column] = run[k];
    }
}

// Four steps along the depth from nothing: sums[r][v] = x[k][r] panel[k][v] + ...
template <std::size_t ROWS>
INLINE void chain_of_tile(const float *x, const float *panel, F (&sums)[ROWS][2]) {
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; ++k) {
        const F w[2] = {Lanes::load(panel + k * CHUNK), Lanes::load(panel + k * CHUNK + L)};
#pragma GCC unroll 8
        for (std::size_t r = 0; r < ROWS; ++r) {
            const F value = Lanes::broadcast(x[k * ROWS + r]);
            for (std::size_t v = 0; v < 2; ++v) {
                sums[r][v] = k == 0 ? Lanes::mul(value, w[v]) : Lanes::fma(value, w[v], sums[r][v]);
            }
        }
    }
}

// The I-th pair of chains, added to those before it as a binary counter carries: sums[l] holds the sum of 2^l pairs.
template <std::size_t ROWS, std::size_t I>
INLINE void pairs_of_chains(const float *x, const float *panel, float (&sums)[2][ROWS * CHUNK]) {
    if constexpr (I < STEPS / 8) {
        static_assert(STEPS / 8 == 4);
        constexpr std::size_t carries = I % 2 == 0 ? 0 : I == 1 ? 1 : 2;
        F even[ROWS][2], odd[ROWS][2];
        chain_of_tile<ROWS>(x + 8 * I * ROWS, panel + 8 * I * CHUNK, even);
        chain_of_tile<ROWS>(x + (8 * I + 4) * ROWS, panel + (8 * I + 4) * CHUNK, odd);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
            for (std::size_t v = 0; v < 2; ++v) {
                const std::size_t at = (2 * r + v) * L;
                F sum = Lanes::add(even[r][v], odd[r][v]);
                if (carries > 0) sum = Lanes::add(sum, Lanes::load(sums[0] + at));
                if (carries > 1) sum = Lanes::add(sum, Lanes::load(sums[1] + at));
                Lanes::store(sums[carries % 2] + at, sum);
            }
        }
        KEEP_IN_MEMORY(sums);
        pairs_of_chains<ROWS, I + 1>(x, panel, sums);
    }
}

// Add ROWS x `depth` of x times a panel to totals [row][CHUNK].
template <std::size_t ROWS>
void tile_of(const float *x, const float *panel, std::size_t depth, double *totals) {
    alignas(64) float sums[2][ROWS * CHUNK];
    for (std::size_t k = 0; k < depth; k += STEPS) {
        pairs_of_chains<ROWS, 0>(x + k * ROWS, panel + k * CHUNK, sums);
        // Half a vector at a time, as conversion from memory is cheaper than from a register's upper half.
#pragma GCC unroll 8
        for (std::size_t i = 0; i < ROWS * CHUNK; i += L / 2) Lanes::accumulate_half(totals + i, sums[0] + i);
    }
}

using Tile = void (*)(const float *, const float *, std::size_t, double *);

// The kernel for so many rows, up to sizeof...(R).
template <std::size_t... R>
Tile tile_for(std::size_t rows, std::index_sequence<R...>) {
    static constexpr Tile all[] = {tile_of<R + 1>...};
    return all[rows - 1];
}

template <typename Weight>
void tile_product(const Weight &weight, const PackedRows &x, float *y, std::size_t begin, std::size_t end) {
    const Lanes::Table base = Lanes::table(weight.table);
    const Blocks blocks(weight.block_size);
    const std::size_t depth = weight.depth(), outputs = weight.outputs(), totals_strip = x.rows * CHUNK;
    const bool vectors = serves_gemv(weight);
    static thread_local Scratch<float> panel_scratch;
    static thread_local Scratch<double> total_scratch;
    float *panels = panel_scratch.at_least(STRIPS * APART);
    double *totals = total_scratch.at_least(STRIPS * totals_strip);
    for (std::size_t strip0 = begin; strip0 < end; strip0 += STRIPS) {
        const std::size_t strips = end - strip0 < STRIPS ? end - strip0 : STRIPS;
        for (std::size_t i = 0; i < strips * totals_strip; ++i) totals[i] = 0;
        for (std::size_t k0 = 0; k0 < depth; k0 += PANEL) {
            const std::size_t steps = depth - k0 < PANEL ? depth - k0 : PANEL, padded = (steps + PADDING - 1) / PADDING * PADDING;
            for (std::size_t s = 0; s < strips; ++s) {
                float *panel = panels + s * APART;
                const std::size_t column = (strip0 + s) * CHUNK;
                if (!vectors) {
                    panel_of_any(weight, column, k0, steps, panel);
                } else if (weight.along_k) {
                    panel_along_k(weight, base, blocks, column, k0, steps, panel);
                } else {
                    panel_along_n(weight, base, blocks, column, k0, steps, panel);
                }
                for (std::size_t i = steps * CHUNK; i < padded * CHUNK; ++i) panel[i] = 0;
            }
            for (std::size_t s = 0; s < strips; ++s) {  // the strip's panel stays in L1 while the rows of x pass
                for (std::size_t t = 0; t < x.tiles; ++t) {
                    const std::size_t row = x.begin(t), rows = x.begin(t + 1) - row;
                    const Tile kernel = tile_for(rows, std::make_index_sequence<Lanes::rows_of_tile>());
                    kernel(x.values + k0 * x.rows + row * padded, panels + s * APART, padded,
                           totals + s * totals_strip + row * CHUNK);
                }
            }
        }
        for (std::size_t s = 0; s < strips; ++s) {
            const std::size_t column = (strip0 + s) * CHUNK, columns = outputs - column < CHUNK ? outputs - column : CHUNK;
            for (std::size_t m = 0; m < x.rows; ++m) {
                const double *sums = totals + s * totals_strip + m * CHUNK;
                float *out = y + m * outputs + column;
                if (vectors && !weight.along_k) {
                    in_order(sums, weight.high_nibble_first, out);
                } else {
                    for (std::size_t p = 0; p < columns; ++p) out[p] = float(sums[p]);
                }
            }
        }
    }
}

inline bool is_plain(const Packed4 &weight) {
    return weight.zeros == Packed4::Zeros::none && weight.rounding == Float::f32;
}

inline void gemv(const Packed4 &weight, const float *x, float *y, std::size_t begin, std::size_t end) {
    if (is_plain(weight)) return gemv_of(PlainWeight{weight}, x, y, begin, end);
    if (weight.zeros == Packed4::Zeros::codes && weight.rounding == Float::f32) {
        return gemv_of(AffineWeight{weight}, x, y, begin, end);
    }
    gemv_of(weight, x, y, begin, end);
}

inline void tile(const Packed4 &weight, const PackedRows &x, float *y, std::size_t begin, std::size_t end) {
    if (is_plain(weight)) return tile_product(PlainWeight{weight}, x, y, begin, end);
    tile_product(weight, x, y, begin, end);
}

#undef INLINE
#undef KEEP_IN_MEMORY
