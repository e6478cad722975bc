// Products with prepared float32 weights, on the vector operations of an instruction set: included after
// product_kernels.h. A panel is 16 columns of a weight [depth, 16], so that no sum crosses lanes.

#define INLINE inline __attribute__((always_inline))

constexpr std::size_t VECTORS = PANEL_COLUMNS / L;  // of a panel's row
static_assert(VECTORS * L == PANEL_COLUMNS);

template <std::size_t ROWS, std::size_t PANELS>
INLINE void panel_block(const float *x, std::size_t stride, const float *panels, std::size_t depth, float *out,
                        std::size_t out_stride) {
    constexpr std::size_t WIDTH = PANELS * VECTORS;
    constexpr std::size_t CHAINS = ROWS * WIDTH <= 2 ? 4 : ROWS * WIDTH <= 6 ? 2 : 1;  // sums that do not wait for each other
    F sums[CHAINS][ROWS][WIDTH];
    for (std::size_t chain = 0; chain < CHAINS; ++chain)
        for (std::size_t row = 0; row < ROWS; ++row)
            for (std::size_t i = 0; i < WIDTH; ++i) sums[chain][row][i] = Lanes::broadcast(0.0f);
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
    for (; k + CHAINS <= depth; k += CHAINS)
        for (std::size_t chain = 0; chain < CHAINS; ++chain) add(k + chain, sums[chain]);
    for (; k < depth; ++k) add(k, sums[0]);
    for (std::size_t row = 0; row < ROWS; ++row) {
        for (std::size_t i = 0; i < WIDTH; ++i) {
            F total = sums[0][row][i];
            for (std::size_t chain = 1; chain < CHAINS; ++chain) total = Lanes::add(total, sums[chain][row][i]);
            Lanes::store(out + row * out_stride + i * L, total);
        }
    }
}

// Rows of x with so many panels: the panels stay in L1 while the rows pass.
template <std::size_t PANELS>
INLINE void panel_group(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t depth,
                        float *out, std::size_t out_stride) {
    std::size_t row = 0;
    for (; row + 4 <= rows; row += 4)
        panel_block<4, PANELS>(x + row * stride, stride, panels, depth, out + row * out_stride, out_stride);
    for (; row + 2 <= rows; row += 2)
        panel_block<2, PANELS>(x + row * stride, stride, panels, depth, out + row * out_stride, out_stride);
    if (row < rows) panel_block<1, PANELS>(x + row * stride, stride, panels, depth, out + row * out_stride, out_stride);
}

void panel_products(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t count,
                    std::size_t depth, float *out, std::size_t out_stride) {
    constexpr std::size_t MANY = L >= 16 ? 4 : 1;  // panels whose sums for 4 rows the registers hold
    const auto at = [&](std::size_t panel) { return panels + panel * depth * PANEL_COLUMNS; };
    std::size_t panel = 0;
    for (; panel + MANY <= count; panel += MANY)
        panel_group<MANY>(x, stride, rows, at(panel), depth, out + panel * PANEL_COLUMNS, out_stride);
    if (count - panel == 3) return panel_group<3>(x, stride, rows, at(panel), depth, out + panel * PANEL_COLUMNS, out_stride);
    if (count - panel == 2) return panel_group<2>(x, stride, rows, at(panel), depth, out + panel * PANEL_COLUMNS, out_stride);
    if (panel < count) panel_group<1>(x, stride, rows, at(panel), depth, out + panel * PANEL_COLUMNS, out_stride);
}

#undef INLINE
