// LSTM and GRU over time with their usual activations; the products with their inputs are made before.
#pragma once

#include "dense.h"

namespace lut4tool {

// Recurrent weights [gates * hidden, hidden]: floats, or packed bytes (see multiply_bytes) with a factor a row, by
// which the state is rounded as DynamicQuantizeLinear does.
struct Recurrent {
    const float *floats;
    const std::int8_t *bytes;
    const std::int32_t *zero, *sums;
    const float *factors;
};

// What a cell reads and writes, in the order of time: x [steps, batch, gates * hidden], with the input's product and all
// biases but the GRU's last; y [steps, batch, hidden]; h and c [batch, hidden], the state before and after; lengths
// [batch] or null: steps of each sequence, after which its state stays and y is 0; backward: from the last step on.
struct Sequence {
    std::size_t steps, batch, hidden;
    const float *x;
    float *y, *h, *c;
    const std::int64_t *lengths;
    bool backward;
};

// Gates i, o, f, c.
void run_lstm(const Blas &blas, const Sequence &s, const Recurrent &r, unsigned threads);

// Gates z, r, h; bias [hidden] is h's recurrent one; reset_after: the reset gate multiplies the product, not the state.
void run_gru(const Blas &blas, const Sequence &s, const float *r, const float *bias, bool reset_after, unsigned threads);

}  // namespace lut4tool
