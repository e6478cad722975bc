// The inner loops of conv.cpp over one set of Lanes. Included within a namespace, after lanes_*.h.

constexpr std::size_t L = Lanes::count;
constexpr std::size_t ROWS = Lanes::rows_of_tile >= 6 ? 8 : 4;  // 32 registers or 16
constexpr std::size_t VECTORS = 3, VECTORS_OF_ONE = 8;

template <std::size_t N>
using Count = std::integral_constant<std::size_t, N>;

// out [R, V * L] = bias [R] + sum over d, t of a [d, t, R] * x [d * plane + taps[t] ...], between low and high; rows of
// out are `stride` apart.
template <std::size_t R, std::size_t V>
void multiply(const float *a, const float *bias, const float *x, std::size_t depth, std::size_t plane,
              const std::size_t *taps, std::size_t count, float low, float high, float *out, std::size_t stride) {
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
    const Lanes::F least = Lanes::broadcast(low), most = Lanes::broadcast(high);
#pragma GCC unroll 8  // else the sums go through memory
    for (std::size_t r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (std::size_t v = 0; v < V; ++v) Lanes::store(out + r * stride + v * L, Lanes::clip(sums[r][v], least, most));
}

// R rows of V vectors of one channel with a kernel of its own. What a row's last vector writes past its end the next rows
// write over; past `end` nothing is written, and nothing past a row where rows do not follow each other.
template <std::size_t R, std::size_t V>
void multiply_rows(const float *a, float bias, const float *x, std::size_t width, const std::size_t *taps,
                   std::size_t count, std::size_t columns, float low, float high, float *out, std::size_t stride,
                   const float *end) {
    Lanes::F sums[R][V];
    for (std::size_t r = 0; r < R; ++r)
        for (std::size_t v = 0; v < V; ++v) sums[r][v] = Lanes::broadcast(bias);
    for (std::size_t t = 0; t < count; ++t) {
        const Lanes::F weight = Lanes::broadcast(a[t]);
        for (std::size_t r = 0; r < R; ++r)
            for (std::size_t v = 0; v < V; ++v)
                sums[r][v] = Lanes::fma(weight, Lanes::load(x + taps[t] + r * width + v * L), sums[r][v]);
    }
    const Lanes::F least = Lanes::broadcast(low), most = Lanes::broadcast(high);
    for (std::size_t r = 0; r < R; ++r) {
        for (std::size_t v = 0; v < V; ++v) {
            const Lanes::F sum = Lanes::clip(sums[r][v], least, most);
            float *to = out + r * stride + v * L;
            if ((v + 1) * L <= columns || (stride == columns && to + L <= end)) {
                Lanes::store(to, sum);
            } else {
                float last[L];
                Lanes::store(last, sum);
                std::memcpy(to, last, (columns - v * L) * sizeof(float));
            }
        }
    }
}

// The rows of a channel: lines of x are `width` apart, rows of out `stride`.
void multiply_plane(const float *a, float bias, const float *x, std::size_t width, const std::size_t *taps,
                    std::size_t count, std::size_t rows, std::size_t columns, float low, float high, float *out,
                    std::size_t stride) {
    const float *const end = out + (rows - 1) * stride + columns;
    std::size_t row = 0;
    const auto pass = [&](auto rows_at_once, auto vectors) {  // whole rows: what a vector spoils is written after it
        constexpr std::size_t R = decltype(rows_at_once)::value, V = decltype(vectors)::value;
        for (; row + R <= rows; row += R)
            multiply_rows<R, V>(a, bias, x + row * width, width, taps, count, columns, low, high, out + row * stride,
                                stride, end);
    };
    if (columns <= L) pass(Count<4>(), Count<1>()), pass(Count<1>(), Count<1>());
    if (columns <= 2 * L) pass(Count<2>(), Count<2>()), pass(Count<1>(), Count<2>());
    for (; row < rows; ++row) {
        for (std::size_t column = 0; column < columns;) {
            const std::size_t left = columns - column, vectors = left > 2 * L ? 3 : left > L ? 2 : 1;
            const auto part = vectors == 3 ? multiply_rows<1, 3> : vectors == 2 ? multiply_rows<1, 2> : multiply_rows<1, 1>;
            part(a, bias, x + row * width + column, width, taps, count, left, low, high, out + row * stride + column,
                 stride, end);
            column += vectors * L;
        }
    }
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
