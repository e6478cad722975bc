// LSTM and GRU over time with their usual activations and prepared weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "int8.h"

namespace lut4tool {

// Units that are computed at a time; a hidden size is padded to a multiple of it.
constexpr std::size_t UNITS = 16;

// A prepared weight [depth, blocks * gates * 16]: for each block of 16 units one panel a gate. Floats [blocks, gates,
// depth, 16]; or, where `bytes.panels` is there, what it is multiplied with is rounded as DynamicQuantizeLinear does,
// and the product is times the factors [blocks * gates * 16].
struct Panels {
    std::size_t depth, gates;
    const float *floats;
    ByteMatrix bytes;
    const float *factors;
};

// One direction of a layer. Gates: LSTM i, o, f, c; GRU z, r, h, of which `state` has only z and r where the reset gate
// multiplies the state: `late` is h's then. bias [blocks * gates * 16] of the input's gates; late_bias [blocks * 16]: h's
// recurrent one in a GRU.
struct Cell {
    enum class Kind { lstm, gru, gru_reset_after } kind;
    std::size_t hidden;
    Panels input, state, late;
    const float *bias, *late_bias;

    std::size_t blocks() const { return (hidden + UNITS - 1) / UNITS; }
};

// What a cell reads and writes: x [steps, batch, input's depth]; y [steps, batch, *] with `apart` floats from one entry
// of the batch to the next; h and c [batch, hidden], the state before and after; lengths [batch] or null: steps of each
// sequence, after which its state stays and y is 0; backward: from the last step on.
struct Sequence {
    std::size_t steps, batch;
    const float *x;
    float *y;
    std::size_t step_apart, apart;
    float *h, *c;
    const std::int32_t *lengths;
    bool backward;
};

// Run all directions of a layer, each with its own sequence.
void run_cells(const Cell *cells, const Sequence *sequences, std::size_t directions, unsigned threads);

}  // namespace lut4tool
