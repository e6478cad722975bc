// Products with prepared float32 weights, on the vector operations of an instruction set: included after
// product_kernels.h. A panel is 16 columns of a weight [depth, 16], so that no sum crosses lanes.

#define INLINE inline __attribute__((always_inline))

constexpr std::size_t VECTORS = PANEL_COLUMNS / L;  // of a panel's row
constexpr std::size_t DEPTH_AT_ONCE = 128;          // of four panels: what stays in L1 while rows pass
static_assert(VECTORS * L == PANEL_COLUMNS);

// `length` of the depth, added to out where it is not the first part of it; else to the bias, if there is one.
template <std::size_t ROWS, std::size_t PANELS>
INLINE void panel_block(const float *x, std::size_t stride, const float *panels, std::size_t depth, std::size_t length,
                        const float *bias, bool first, float *out, std::size_t out_stride) {
    constexpr std::size_t WIDTH = PANELS * VECTORS;
    constexpr std::size_t CHAINS = ROWS * WIDTH <= 2 ? 4 : ROWS * WIDTH <= 6 ? 2 : 1;  // sums that do not wait for each other
    F sums[CHAINS][ROWS][WIDTH];
    for (std::size_t row = 0; row < ROWS; ++row) {
        for (std::size_t i = 0; i < WIDTH; ++i) {
            sums[0][row][i] = !first ? Lanes::load(out + row * out_stride + i * L)
                              : bias ? Lanes::load(bias + i * L)
                                     : Lanes::broadcast(0.0f);
            for (std::size_t chain = 1; chain < CHAINS; ++chain) sums[chain][row][i] = Lanes::broadcast(0.0f);
        }
    }
    const auto add = [&](std::size_t k, F(&totals)[ROWS][WIDTH]) __attribute__((always_inline)) {
        F weights[WIDTH];
        for (std::size_t i = 0; i < WIDTH; ++i)
            weights[i] = Lanes::load(panels + (i / VECTORS * depth + k) * PANEL_COLUMNS + i % VECTORS * L);
        for (std::size_t row = 0; row < ROWS; ++row) {
            const F value = Lanes::broadcast(x[row * stride + k]);
            for (std::size_t i = 0; i < WIDTH; ++i) totals[row][i] = Lanes::fma(value, weights[i], totals[row][i]);
        }
    };
    std::size_t k = 0;
    for (; k + CHAINS <= length; k += CHAINS)
        for (std::size_t chain = 0; chain < CHAINS; ++chain) add(k + chain, sums[chain]);
    for (; k < length; ++k) add(k, sums[0]);
    for (std::size_t row = 0; row < ROWS; ++row) {
        for (std::size_t i = 0; i < WIDTH; ++i) {
            F total = sums[0][row][i];
            for (std::size_t chain = 1; chain < CHAINS; ++chain) total = Lanes::add(total, sums[chain][row][i]);
            Lanes::store(out + row * out_stride + i * L, total);
        }
    }
}

// Rows of x with so many panels.
template <std::size_t PANELS>
INLINE void panel_group(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t depth,
                        const float *bias, float *out, std::size_t out_stride) {
    constexpr std::size_t MOST = L >= 16 ? 6 : 4;  // rows whose sums the registers hold
    const std::size_t most = rows <= MOST ? depth : DEPTH_AT_ONCE;
    for (std::size_t k = 0; k < depth; k += most) {
        const std::size_t length = depth - k < most ? depth - k : most;
        const float *part = panels + k * PANEL_COLUMNS;
        std::size_t row = 0;
        const auto at = [&](std::size_t r) { return x + r * stride + k; };
        for (; row + MOST <= rows; row += MOST)
            panel_block<MOST, PANELS>(at(row), stride, part, depth, length, bias, k == 0, out + row * out_stride, out_stride);
        for (; row + 4 <= rows; row += 4)
            panel_block<4, PANELS>(at(row), stride, part, depth, length, bias, k == 0, out + row * out_stride, out_stride);
        for (; row + 2 <= rows; row += 2)
            panel_block<2, PANELS>(at(row), stride, part, depth, length, bias, k == 0, out + row * out_stride, out_stride);
        if (row < rows)
            panel_block<1, PANELS>(at(row), stride, part, depth, length, bias, k == 0, out + row * out_stride, out_stride);
    }
}

void panel_products(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t count,
                    std::size_t depth, const float *bias, float *out, std::size_t out_stride) {
    constexpr std::size_t MANY = L >= 16 ? 4 : 1;  // panels whose sums the registers hold
    const auto multiply = [&](std::size_t panel, auto panels_at_once) __attribute__((always_inline)) {
        constexpr std::size_t PANELS = decltype(panels_at_once)::value;
        const std::size_t column = panel * PANEL_COLUMNS;
        panel_group<PANELS>(x, stride, rows, panels + column * depth, depth, bias ? bias + column : nullptr, out + column,
                            out_stride);
    };
    std::size_t panel = 0;
    for (; panel + MANY <= count; panel += MANY) multiply(panel, std::integral_constant<std::size_t, MANY>());
    if (count - panel == 3) return multiply(panel, std::integral_constant<std::size_t, 3>());
    if (count - panel == 2) return multiply(panel, std::integral_constant<std::size_t, 2>());
    if (panel < count) multiply(panel, std::integral_constant<std::size_t, 1>());
}

#undef INLINE
