#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "clones.h"
#include "curves.h"
#include "product.h"
#include "threads.h"

namespace lut4tool {
namespace {

static_assert(UNITS == PANEL_COLUMNS);
constexpr std::size_t WORTH = std::size_t(1) << 19;  // bytes of weights a step reads that are worth a second thread
constexpr std::size_t ROWS = 16;                     // of x that a piece multiplies at least

// Sums of a block's gates [gates][16] for one row: x's, with the biases, and the state's.
LUT4TOOL_CLONES void lstm_block(const float *x, const float *bias, const float *sums, float *c, float *h) {
    const float *i = sums, *o = i + UNITS, *f = o + UNITS, *g = f + UNITS;
    const float *xi = x, *xo = xi + UNITS, *xf = xo + UNITS, *xg = xf + UNITS;
    const float *bi = bias, *bo = bi + UNITS, *bf = bo + UNITS, *bg = bf + UNITS;
    for (std::size_t k = 0; k < UNITS; ++k) {
        const float in = sigmoid(xi[k] + bi[k] + i[k]), out = sigmoid(xo[k] + bo[k] + o[k]);
        const float kept = sigmoid(xf[k] + bf[k] + f[k]), made = hyperbolic_tangent(xg[k] + bg[k] + g[k]);
        c[k] = kept * c[k] + in * made;
        h[k] = out * hyperbolic_tangent(c[k]);
    }
}

LUT4TOOL_CLONES void gate_block(const float *x, const float *bias, const float *sums, float *gate) {
    for (std::size_t k = 0; k < UNITS; ++k) gate[k] = sigmoid(x[k] + bias[k] + sums[k]);
}

// h anew from z and what is added to its input.
LUT4TOOL_CLONES void gru_block(const float *x, const float *bias, const float *added, const float *z, float *h) {
    for (std::size_t k = 0; k < UNITS; ++k)
        h[k] = (1.0f - z[k]) * hyperbolic_tangent(x[k] + bias[k] + added[k]) + z[k] * h[k];
}

// Rows [rows, depth] rounded for a product with bytes.
struct Rounded {
    std::vector<std::uint8_t> values;
    std::vector<std::int32_t> zeros;
    float step = 0;
    bool finite = false;

    void round(const float *x, std::size_t rows, std::size_t depth) {
        const std::size_t padded = packed_depth(depth);
        values.resize(rows * padded), zeros.resize(rows);
        std::uint8_t zero;
        finite = quantization(x, rows * depth, step, zero);
        if (!finite) return;
        std::fill(zeros.begin(), zeros.end(), zero);
        for (std::size_t row = 0; row < rows; ++row)
            quantize(x + row * depth, depth, step, zero, 0, 255, &values[row * padded]);
    }

    // Columns [16 * first, 16 * last) of rows [row, row + rows) of the product; NaN where there was one, or an Inf.
    void multiply(const Panels &b, std::size_t row, std::size_t rows, std::size_t first, std::size_t last, float *out) {
        if (!finite) {
            for (std::size_t m = 0; m < rows; ++m)
                std::fill(out + m * b.bytes.N + first * UNITS, out + m * b.bytes.N + last * UNITS, NAN);
            return;
        }
        const std::uint8_t *left = values.data() + row * packed_depth(b.depth);
        multiply_bytes(left, &zeros[row], rows, b.bytes, first, last, {nullptr, out, b.factors, step});
    }
};

// One direction while it runs. States alternate between two buffers [batch, blocks * 16]: a step reads one, writes one.
class Run {
  public:
    Run(const Cell &cell, const Sequence &sequence)
        : cell_(cell), s_(sequence), width_(cell.blocks() * UNITS), gates_(cell.input.gates * width_),
          // rows of the state's product are as long as its panels' depth says
          x_(new float[sequence.steps * sequence.batch * gates_]) {
        for (auto &state : h_) state.assign(s_.batch * width_, 0.0f);
        c_.assign(s_.c ? s_.batch * width_ : 0, 0.0f);
        if (cell.kind == Cell::Kind::gru) reset_.assign(s_.batch * width_, 0.0f), z_.assign(s_.batch * width_, 0.0f);
        for (std::size_t b = 0; b < s_.batch; ++b) {
            std::copy_n(s_.h + b * cell.hidden, cell.hidden, &h_[0][b * width_]);
            if (s_.c) std::copy_n(s_.c + b * cell.hidden, cell.hidden, &c_[b * width_]);
        }
    }

    // What x adds to the gates, for pieces of rows.
    std::size_t rows() const { return s_.steps * s_.batch; }
    void round_input() { if (cell_.input.bytes.panels) rounded_.round(s_.x, rows(), cell_.input.depth); }
    void multiply_input(std::size_t first, std::size_t count) {
        const Panels &input = cell_.input;
        float *out = x_.get() + first * gates_;
        if (input.bytes.panels) return rounded_.multiply(input, first, count, 0, gates_ / UNITS, out);
        multiply_panels(s_.x + first * input.depth, input.depth, count, input.floats, gates_ / UNITS, input.depth, nullptr, out,
                        gates_);
    }

    // A step has one phase, or two where a product needs the gates of all units.
    std::size_t phases() const { return s_.steps * (cell_.kind == Cell::Kind::gru ? 2 : 1); }
    std::size_t blocks() const { return cell_.blocks(); }

    struct Scratch {
        Rounded rounded;
        std::size_t phase = SIZE_MAX;  // that the state was rounded for
        std::vector<float> sums, state;
    };

    void block(std::size_t phase, std::size_t block, Scratch &own) {
        const bool two = cell_.kind == Cell::Kind::gru, second = two && phase % 2;
        const std::size_t step = two ? phase / 2 : phase, t = s_.backward ? s_.steps - 1 - step : step;
        const std::vector<float> &from = second ? reset_ : h_[step % 2];
        const Panels &panels = second ? cell_.late : cell_.state;
        const std::size_t row = panels.bytes.panels ? panels.bytes.N : panels.gates * UNITS;
        own.sums.resize(s_.batch * row);
        float *sums = own.sums.data();
        if (panels.bytes.panels) {
            if (own.phase != phase) round_state(from, own), own.phase = phase;
            own.rounded.multiply(panels, 0, s_.batch, block * panels.gates, (block + 1) * panels.gates, sums);
            sums += block * panels.gates * UNITS;
        } else {
            multiply_panels(from.data(), width_, s_.batch, panels.floats + block * panels.gates * panels.depth * UNITS,
                            panels.gates, panels.depth, nullptr, sums, row);
        }
        for (std::size_t b = 0; b < s_.batch; ++b) unit(step, t, b, block, second, sums + b * row);
    }

    void finish() {
        const std::vector<float> &last = h_[s_.steps % 2];
        for (std::size_t b = 0; b < s_.batch; ++b) {
            std::copy_n(&last[b * width_], cell_.hidden, s_.h + b * cell_.hidden);
            if (s_.c) std::copy_n(&c_[b * width_], cell_.hidden, s_.c + b * cell_.hidden);
        }
    }

  private:
    void round_state(const std::vector<float> &from, Scratch &own) const {
        own.state.resize(s_.batch * cell_.hidden);
        for (std::size_t b = 0; b < s_.batch; ++b)
            std::copy_n(&from[b * width_], cell_.hidden, &own.state[b * cell_.hidden]);
        own.rounded.round(own.state.data(), s_.batch, cell_.hidden);
    }

    void unit(std::size_t step, std::size_t t, std::size_t b, std::size_t block, bool second, const float *sums) {
        const std::size_t at = b * width_ + block * UNITS, gates = cell_.input.gates;
        const float *x = x_.get() + (t * s_.batch + b) * gates_ + block * gates * UNITS;
        const float *bias = cell_.bias + block * gates * UNITS, *old = &h_[step % 2][at];
        float *now = &h_[(step + 1) % 2][at];
        const bool over = s_.lengths && std::int64_t(t) >= s_.lengths[b];
        if (cell_.kind == Cell::Kind::gru && !second) {
            float r[UNITS];
            gate_block(x, bias, sums, &z_[at]);
            gate_block(x + UNITS, bias + UNITS, sums + UNITS, r);
            for (std::size_t k = 0; k < UNITS; ++k) reset_[at + k] = r[k] * old[k];
            return;
        }
        std::copy_n(old, UNITS, now);
        if (over) return write(t, b, block, nullptr);
        if (cell_.kind == Cell::Kind::lstm) {
            lstm_block(x, bias, sums, &c_[at], now);
        } else {
            float added[UNITS], z[UNITS], r[UNITS];
            const float *late = cell_.late_bias + block * UNITS;
            if (second) {
                for (std::size_t k = 0; k < UNITS; ++k) added[k] = sums[k] + late[k];
            } else {
                gate_block(x, bias, sums, z);
                gate_block(x + UNITS, bias + UNITS, sums + UNITS, r);
                for (std::size_t k = 0; k < UNITS; ++k) added[k] = r[k] * (sums[2 * UNITS + k] + late[k]);
            }
            gru_block(x + 2 * UNITS, bias + 2 * UNITS, added, second ? &z_[at] : z, now);
        }
        write(t, b, block, now);
    }

    void write(std::size_t t, std::size_t b, std::size_t block, const float *values) {
        float *y = s_.y + t * s_.step_apart + b * s_.apart + block * UNITS;
        const std::size_t count = std::min(UNITS, cell_.hidden - block * UNITS);
        if (values) std::copy_n(values, count, y);
        else std::fill(y, y + count, 0.0f);
    }

    const Cell &cell_;
    const Sequence &s_;
    const std::size_t width_, gates_;
    std::unique_ptr<float[]> x_;
    Rounded rounded_;
    std::vector<float> h_[2], c_, reset_, z_;
};

std::size_t bytes_of(const Panels &panels, std::size_t blocks) {
    return blocks * panels.gates * UNITS * (panels.bytes.panels ? packed_depth(panels.depth) : sizeof(float) * panels.depth);
}

}  // namespace

void run_cells(const Cell *cells, const Sequence *sequences, std::size_t directions, unsigned threads) {
    std::vector<Run> runs;
    runs.reserve(directions);
    for (std::size_t d = 0; d < directions; ++d) runs.emplace_back(cells[d], sequences[d]);
    const std::size_t blocks = cells[0].blocks(), rows = runs[0].rows();
    const std::size_t read = bytes_of(cells[0].state, blocks), multiplied = rows * directions * bytes_of(cells[0].input, blocks);
    const bool alone = multiplied < 8 * WORTH || threads == 1;
    for (Run &run : runs) run.round_input();
    const std::size_t pieces = alone ? 1 : std::max<std::size_t>(1, std::min<std::size_t>(rows / ROWS, 4 * threads));
    parallel(directions * pieces, alone ? 1 : threads, [&](std::size_t index) {
        const std::size_t piece = index % pieces, first = rows * piece / pieces;
        runs[index / pieces].multiply_input(first, rows * (piece + 1) / pieces - first);
    });
    if (directions > 1) {  // each on its own thread
        parallel(directions, runs[0].phases() * read < 4 * WORTH ? 1 : threads, [&](std::size_t d) {
            Run::Scratch own;
            for (std::size_t phase = 0; phase < runs[d].phases(); ++phase)
                for (std::size_t block = 0; block < blocks; ++block) runs[d].block(phase, block, own);
        });
    } else {
        std::vector<Run::Scratch> own(threads);
        parallel_phases(runs[0].phases(), blocks, read < WORTH || runs[0].phases() < 4 ? 1 : threads,
                        [&](std::size_t phase, std::size_t block, std::size_t worker) { runs[0].block(phase, block, own[worker]); });
    }
    for (Run &run : runs) run.finish();
}

}  // namespace lut4tool
