// Exact decode of 4-bit weights on plain buffers. Every element is one entry of a table of 16 that its block has:
// the products are made and rounded once a block, and what remains is a lookup.
#pragma once

#include <cstddef>
#include <cstdint>

#include "floats.h"

namespace lut4tool {

// One row of `count` elements: packed (count + 1) / 2 bytes, scales ceil(count / block_size), codebook 16.
// out[i] = round(float32(codebook[code(i)]) * float32(scales[i / block_size])), in out_type.
struct Lookup4 {
    const std::uint8_t *packed;
    Floats scales, codebook;
    std::size_t block_size, count;
    bool high_nibble_first;
};

// `rows` rows of K elements, each packed in ceil(K / block_size) whole blocks, low nibble first.
// out[n, k] = round(round(code - zero_point) * scale), in the scales' type. zero_points: uint8, or floats of that type;
// `shared` where one serves all blocks.
struct Qmm {
    const std::uint8_t *packed;
    Floats scales;
    const void *zero_points;
    bool zero_points_are_codes, shared;
    std::size_t rows, K, block_size;
};

// `out` holds as many elements of its type as the weight. At most `threads` threads, and no more than the work is worth.
void decode(const Lookup4 &weight, void *out, Float out_type, unsigned threads);
void decode(const Qmm &weight, void *out, unsigned threads);

// The instruction set that the lookups use on this machine: "avx512", "avx2" or "portable".
const char *instruction_set();

// Use that instruction set from now on (for tests); false where this machine lacks it.
bool use_instruction_set(const char *name);

}  // namespace lut4tool
