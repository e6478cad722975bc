// Products with prepared float32 weights, on the vector operations of an instruction set: included after
// product_kernels.h. A panel is 16 columns of a weight [depth, 16], so that no sum crosses lanes.

#define INLINE inline __attribute__((always_inline))

constexpr std::size_t VECTORS = PANEL_COLUMNS / L;  // of a panel's row
constexpr std::size_t DEPTH_AT_ONCE = 128;          // what of four panels stays in L1 while rows pass
constexpr std::size_t MOST_ROWS = L >= 16 ? 6 : 3, MOST_PANELS = L >= 16 ? 4 : 2;  // whose sums the registers hold
static_assert(VECTORS * L == PANEL_COLUMNS);

// The sums over `length` of the depth, one chain each so that equal columns and rows give equal results, on top of what
// out has; of the bias, or of nothing, in the first part of the depth. Short chains also round less.
template <std::size_t ROWS, std::size_t PANELS>
INLINE void panel_block(const float *x, std::size_t stride, const float *panels, std::size_t depth, std::size_t length,
                        const float *bias, bool first, float *out, std::size_t out_stride) {
    constexpr std::size_t WIDTH = PANELS * VECTORS;
    F sums[ROWS][WIDTH];
    for (std::size_t row = 0; row < ROWS; ++row)
        for (std::size_t i = 0; i < WIDTH; ++i) sums[row][i] = Lanes::broadcast(0.0f);
    for (std::size_t k = 0; k < length; ++k) {
        F weights[WIDTH];
        for (std::size_t i = 0; i < WIDTH; ++i)
            weights[i] = Lanes::load(panels + (i / VECTORS * depth + k) * PANEL_COLUMNS + i % VECTORS * L);
        for (std::size_t row = 0; row < ROWS; ++row) {
            const F value = Lanes::broadcast(x[row * stride + k]);
            for (std::size_t i = 0; i < WIDTH; ++i) sums[row][i] = Lanes::fma(value, weights[i], sums[row][i]);
        }
    }
    for (std::size_t row = 0; row < ROWS; ++row) {
        for (std::size_t i = 0; i < WIDTH; ++i) {
            float *to = out + row * out_stride + i * L;
            F total = sums[row][i];
            if (!first) total = Lanes::add(total, Lanes::load(to));
            else if (bias) total = Lanes::add(total, Lanes::load(bias + i * L));
            Lanes::store(to, total);
        }
    }
}

// Rows of x with so many panels.
template <std::size_t PANELS>
INLINE void panel_group(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t depth,
                        const float *bias, float *out, std::size_t out_stride) {
    for (std::size_t k = 0; k < depth; k += DEPTH_AT_ONCE) {
        const std::size_t length = depth - k < DEPTH_AT_ONCE ? depth - k : DEPTH_AT_ONCE;
        std::size_t row = 0;
        const auto pass = [&](auto count) __attribute__((always_inline)) {
            constexpr std::size_t ROWS = decltype(count)::value;
            for (; row + ROWS <= rows; row += ROWS)
                panel_block<ROWS, PANELS>(x + row * stride + k, stride, panels + k * PANEL_COLUMNS, depth, length, bias,
                                          k == 0, out + row * out_stride, out_stride);
        };
        pass(std::integral_constant<std::size_t, MOST_ROWS>());
        if (MOST_ROWS > 4) pass(std::integral_constant<std::size_t, 4>());
        pass(std::integral_constant<std::size_t, 2>());
        pass(std::integral_constant<std::size_t, 1>());
    }
}

void panel_products(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t count,
                    std::size_t depth, const float *bias, float *out, std::size_t out_stride) {
    std::size_t panel = 0;
    const auto pass = [&](auto panels_at_once) __attribute__((always_inline)) {
        constexpr std::size_t PANELS = decltype(panels_at_once)::value;
        for (; panel + PANELS <= count; panel += PANELS) {
            const std::size_t column = panel * PANEL_COLUMNS;
            panel_group<PANELS>(x, stride, rows, panels + column * depth, depth, bias ? bias + column : nullptr, out + column,
                                out_stride);
        }
    };
    pass(std::integral_constant<std::size_t, MOST_PANELS>());
    if (MOST_PANELS > 3) pass(std::integral_constant<std::size_t, 3>());
    if (MOST_PANELS > 2) pass(std::integral_constant<std::size_t, 2>());
    pass(std::integral_constant<std::size_t, 1>());
}

#undef INLINE
