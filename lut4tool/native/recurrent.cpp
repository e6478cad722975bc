#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "clones.h"
#include "curves.h"
#include "threads.h"

namespace lut4tool {
namespace {

LUT4TOOL_CLONES void lstm_row(const float *x, const float *product, std::size_t hidden, float *c, float *h) {
    const float *i = product, *o = i + hidden, *f = o + hidden, *g = f + hidden;
    const float *xi = x, *xo = xi + hidden, *xf = xo + hidden, *xg = xf + hidden;
    for (std::size_t k = 0; k < hidden; ++k) {
        c[k] = sigmoid(xf[k] + f[k]) * c[k] + sigmoid(xi[k] + i[k]) * hyperbolic_tangent(xg[k] + g[k]);
        h[k] = sigmoid(xo[k] + o[k]) * hyperbolic_tangent(c[k]);
    }
}

// The gates z and r; `reset` gets r * h.
LUT4TOOL_CLONES void gru_gates(const float *x, const float *product, std::size_t hidden, const float *h, float *z,
                               float *r, float *reset) {
    for (std::size_t k = 0; k < hidden; ++k) {
        z[k] = sigmoid(x[k] + product[k]);
        r[k] = sigmoid(x[hidden + k] + product[hidden + k]);
        reset[k] = r[k] * h[k];
    }
}

// h anew from z and from what the state adds to its input: factor * (product + bias), or product + bias.
LUT4TOOL_CLONES void gru_row(const float *x, const float *product, const float *bias, const float *factor,
                             const float *z, std::size_t hidden, float *h) {
    for (std::size_t k = 0; k < hidden; ++k) {
        const float added = factor ? factor[k] * (product[k] + bias[k]) : product[k] + bias[k];
        h[k] = (1.0f - z[k]) * hyperbolic_tangent(x[k] + added) + z[k] * h[k];
    }
}

LUT4TOOL_CLONES void scale(const std::int32_t *total, const float *factors, float step, std::size_t count, float *out) {
    for (std::size_t k = 0; k < count; ++k) out[k] = float(total[k]) * (step * factors[k]);
}

// Steps of one sequence in their order; `row(t, b)` runs where the sequence has step t, else y is 0.
template <typename Product, typename Row>
void run(const Sequence &s, const Product &product, const Row &row) {
    for (std::size_t step = 0; step < s.steps; ++step) {
        const std::size_t t = s.backward ? s.steps - 1 - step : step;
        product();
        for (std::size_t b = 0; b < s.batch; ++b) {
            float *y = s.y + (t * s.batch + b) * s.hidden;
            if (s.lengths && std::int64_t(t) >= s.lengths[b]) {
                std::fill(y, y + s.hidden, 0.0f);
            } else {
                row(t, b);
                std::copy(s.h + b * s.hidden, s.h + (b + 1) * s.hidden, y);
            }
        }
    }
}

}  // namespace

void run_lstm(const Blas &blas, const Sequence &s, const Recurrent &r, unsigned threads) {
    const std::size_t gates = 4 * s.hidden, depth = packed_depth(s.hidden);
    std::vector<float> product(s.batch * gates);
    std::vector<std::uint8_t> rounded(r.bytes ? s.batch * depth : 0), steps(r.bytes ? s.batch * s.hidden : 0);
    std::vector<std::int32_t> total(r.bytes ? s.batch * gates : 0), zeros(s.batch);
    const auto multiply = [&] {
        if (!r.bytes) {
            multiply_dense(blas, {s.h, s.hidden, false}, {r.floats, s.hidden, true}, s.batch, gates, s.hidden,
                           product.data(), threads);
            return;
        }
        float step;
        std::uint8_t zero;
        if (!quantize(s.h, s.batch * s.hidden, steps.data(), step, zero)) {  // a NaN: every gate of the batch is one
            std::fill(product.begin(), product.end(), NAN);
            return;
        }
        std::fill(zeros.begin(), zeros.end(), zero);
        for (std::size_t b = 0; b < s.batch; ++b) std::copy_n(&steps[b * s.hidden], s.hidden, &rounded[b * depth]);
        multiply_bytes(rounded.data(), r.bytes, zeros.data(), r.zero, r.sums, s.batch, gates, s.hidden, total.data(),
                       threads);
        for (std::size_t b = 0; b < s.batch; ++b) scale(&total[b * gates], r.factors, step, gates, &product[b * gates]);
    };
    run(s, multiply, [&](std::size_t t, std::size_t b) {
        lstm_row(s.x + (t * s.batch + b) * gates, &product[b * gates], s.hidden, s.c + b * s.hidden, s.h + b * s.hidden);
    });
}

void run_gru(const Blas &blas, const Sequence &s, const float *r, const float *bias, bool reset_after,
             unsigned threads) {
    const std::size_t hidden = s.hidden, gates = 3 * hidden, first = reset_after ? gates : 2 * hidden;
    std::vector<float> product(s.batch * first), z(s.batch * hidden), reset(s.batch * hidden), state(s.batch * hidden),
        late(reset_after ? 0 : s.batch * hidden);
    const auto multiply = [&] {
        multiply_dense(blas, {s.h, hidden, false}, {r, hidden, true}, s.batch, first, hidden, product.data(), threads);
    };
    if (reset_after) {
        run(s, multiply, [&](std::size_t t, std::size_t b) {
            const float *x = s.x + (t * s.batch + b) * gates, *p = &product[b * gates];
            float *h = s.h + b * hidden;
            gru_gates(x, p, hidden, h, z.data(), reset.data(), state.data());
            gru_row(x + 2 * hidden, p + 2 * hidden, bias, reset.data(), z.data(), hidden, h);
        });
        return;
    }
    std::size_t step = 0;
    const auto multiply_both = [&] {
        const std::size_t t = s.backward ? s.steps - 1 - step++ : step++;
        multiply();
        for (std::size_t b = 0; b < s.batch; ++b)
            gru_gates(s.x + (t * s.batch + b) * gates, &product[b * first], hidden, s.h + b * hidden, &z[b * hidden],
                      reset.data(), &state[b * hidden]);
        multiply_dense(blas, {state.data(), hidden, false}, {r + first * hidden, hidden, true}, s.batch, hidden, hidden,
                       late.data(), threads);
    };
    run(s, multiply_both, [&](std::size_t t, std::size_t b) {
        gru_row(s.x + (t * s.batch + b) * gates + 2 * hidden, &late[b * hidden], bias, nullptr, &z[b * hidden], hidden,
                s.h + b * hidden);
    });
}

namespace {

LUT4TOOL_CLONES void map_sigmoid(const float *x, std::size_t count, float *out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = sigmoid(x[i]);
}

LUT4TOOL_CLONES void map_tanh(const float *x, std::size_t count, float *out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = hyperbolic_tangent(x[i]);
}

}  // namespace

void map_curve(Curve curve, const float *x, std::size_t count, float *out, unsigned threads) {
    constexpr std::size_t PIECE = 1 << 15;
    const auto map = curve == Curve::sigmoid ? map_sigmoid : map_tanh;
    parallel((count + PIECE - 1) / PIECE, threads, [&](std::size_t index) {
        map(x + index * PIECE, std::min(PIECE, count - index * PIECE), out + index * PIECE);
    });
}

}  // namespace lut4tool
