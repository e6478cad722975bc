// The inner loops of conv.cpp over one set of Lanes. Included within a namespace, after lanes_*.h.

constexpr std::size_t L = Lanes::count;
constexpr std::size_t ROWS = Lanes::rows_of_tile >= 6 ? 8 : 4;  // 32 registers or 16
constexpr std::size_t VECTORS = 3, VECTORS_OF_ONE = 8;

// out [R, V * L] = bias [R] + sum over d, t of a [d, t, R] * x [d * plane + taps[t] ...]; rows of out are `stride` apart.
template <std::size_t R, std::size_t V>
void multiply(const float *a, const float *bias, const float *x, std::size_t depth, std::size_t plane,
              const std::size_t *taps, std::size_t count, float *out, std::size_t stride) {
    Lanes::F sums[R][V];
    for (std::size_t r = 0; r < R; ++r)
        for (std::size_t v = 0; v < V; ++v) sums[r][v] = Lanes::broadcast(bias[r]);
    for (std::size_t d = 0; d < depth; ++d, x += plane) {
        for (std::size_t t = 0; t < count; ++t, a += R) {
            const float *from = x + taps[t];
            Lanes::F values[V];
            for (std::size_t v = 0; v < V; ++v) values[v] = Lanes::load(from + v * L);
            for (std::size_t r = 0; r < R; ++r) {
                const Lanes::F weight = Lanes::broadcast(a[r]);
                for (std::size_t v = 0; v < V; ++v) sums[r][v] = Lanes::fma(weight, values[v], sums[r][v]);
            }
        }
    }
    for (std::size_t r = 0; r < R; ++r)
        for (std::size_t v = 0; v < V; ++v) Lanes::store(out + r * stride + v * L, sums[r][v]);
}

template <std::size_t R>
constexpr ConvKernels::Multiply by_vectors(std::size_t vectors) {
    switch (vectors) {
        case 1: return multiply<R, 1>;
        case 2: return multiply<R, 2>;
        default: return multiply<R, 3>;
    }
}

constexpr ConvKernels::Multiply of_one(std::size_t vectors) {
    switch (vectors) {
        case 4: return multiply<1, 4>;
        case 5: return multiply<1, 5>;
        case 6: return multiply<1, 6>;
        case 7: return multiply<1, 7>;
        case 8: return multiply<1, 8>;
        default: return by_vectors<1>(vectors);
    }
}

ConvKernels::Multiply chosen_multiply(std::size_t rows, std::size_t vectors) {
    switch (rows) {
        case 1: return of_one(vectors);
        case 2: return by_vectors<2>(vectors);
        case 4: return by_vectors<4>(vectors);
        default: return by_vectors<ROWS>(vectors);
    }
}
