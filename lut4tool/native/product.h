// Products y = x W with a 4-bit weight that stays packed: float32 x and y, any instruction set.
// |y - exact| <= 2^-21 sum |x||w| (plus K 2^-149 where float32 underflows), proved in product_kernels.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "floats.h"

namespace lut4tool {

// A packed matrix of `rows` x `cols` elements; element (r, c) has flat index i = r * stride + c, and is
// rounded(table[code i] * scale[i / block_size]), or rounded(rounded(code i - zero point) * scale) with zero points.
struct Packed4 {
    enum class Zeros { none, codes, floats };

    const std::uint8_t *packed;
    Floats scales;
    const void *zero_points;  // one, or one a block; floats have the scales' type
    Zeros zeros;
    bool shared_zero;
    float table[16];  // the codebook, or 0 ... 15 under zero points
    std::size_t rows, cols, stride, block_size;
    bool high_nibble_first;
    bool along_k;    // rows are outputs and cols the depth K (W transposed); otherwise rows are the depth
    Float rounding;  // what each product is rounded to

    std::size_t depth() const { return along_k ? cols : rows; }
    std::size_t outputs() const { return along_k ? rows : cols; }
};

// gemv: one row of x at a time, weights in registers only. tile: panels decoded into cache, shared by the rows of x.
// digits: the same in whole numbers, where the machine has the means (product_amx.cpp).
enum class ProductKernel { automatic, gemv, tile, digits };

// Whether gemv serves this weight: runs of 32 elements that begin at a multiple of 32 have one scale.
bool serves_gemv(const Packed4 &weight);

// x [M, depth], y [M, outputs], both dense -> the kernel that made y: tile where x is nothing for digits. `weight` must
// serve a forced gemv; forced digits serve any M.
ProductKernel multiply(const Packed4 &weight, const float *x, std::size_t M, float *y, ProductKernel kernel, unsigned threads);

// Which kernel `automatic` means for M rows of x: gemv for one where it serves, else tile; digits are asked for.
ProductKernel chosen_kernel(const Packed4 &weight, std::size_t M);

// Columns of a panel of a prepared float32 weight.
constexpr std::size_t PANEL_COLUMNS = 16;

// out [rows, 16 * count] = x [rows, depth] times panels [count, depth, 16] plus bias [16 * count], which may be null; on
// this thread.
void multiply_panels(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t count,
                     std::size_t depth, const float *bias, float *out, std::size_t out_stride);

// "amx", "avx512", "avx2", "neon" or "portable"; the second is false where this machine lacks it.
const char *product_instruction_set();
bool use_product_instruction_set(const char *name);

// ---- What the kernels of an instruction set are given ----

// The block that a flat index lies in, without a division where block_size is a power of two.
struct Blocks {
    std::size_t size;
    int shift;

    explicit Blocks(std::size_t block_size) : size(block_size), shift(-1) {
        if ((block_size & (block_size - 1)) == 0) {
            for (shift = 0; (std::size_t(1) << shift) < block_size;) ++shift;
        }
    }
    std::size_t of(std::size_t flat) const { return shift >= 0 ? flat >> shift : flat / size; }
};

static inline float scale_of(const Packed4 &weight, std::size_t block) { return load(weight.scales, block); }

static inline unsigned code_zero_of(const Packed4 &weight, std::size_t block) {
    return static_cast<const std::uint8_t *>(weight.zero_points)[weight.shared_zero ? 0 : block];
}

static inline float zero_of(const Packed4 &weight, std::size_t block) {
    if (weight.zeros == Packed4::Zeros::codes) return float(code_zero_of(weight, block));
    return load({weight.zero_points, weight.scales.type}, weight.shared_zero ? 0 : block);
}

// Elements [begin, end) of a row, whatever the blocks: the slow way, for what the vector paths do not serve.
void decode_run(const Packed4 &weight, std::size_t row, std::size_t begin, std::size_t end, float *out);

// Depth of a decoded panel, a strip of which stays in L1, and what the last one is padded to.
constexpr std::size_t PANEL = 128, PADDING = 32;

// Rows of x of a tile product, packed as [panel][tile][depth of the panel][rows of the tile]: the order they are read in.
struct PackedRows {
    const float *values;
    std::size_t rows, tiles;

    std::size_t begin(std::size_t tile) const { return rows * tile / tiles; }
};

// What digits of M rows of x take: `tiles` of 16 rows, `panels` along the depth, bytes, scales.
struct DigitShape {
    std::size_t M, tiles, panels, bytes, scales;
};

// Of a tile's panel: the power of two that each row's digits count, over the row's; what shows its products' bound.
struct DigitScales {
    alignas(64) float unit[16];
    float left[16], error[16];
};

// Rows of x as digits of 8 bits: planes and scales [panel][tile].
struct DigitRows {
    DigitShape shape;
    std::int8_t *planes;
    DigitScales *scales;
    double *row_scale;  // [16 tiles]
};

// Tile products in whole numbers: product_amx.cpp has one set, and says how the bound is kept.
struct DigitKernels {
    bool (*serves)(const Packed4 &);
    DigitShape (*shape)(const Packed4 &, std::size_t M);
    void (*split)(const Packed4 &, const float *x, std::size_t tile, const DigitRows &);  // x is finite
    // Outputs [begin, end) of all rows -> how many are NaN because their bound is not shown.
    std::size_t (*multiply)(const Packed4 &, const DigitRows &, float *y, std::size_t begin, std::size_t end);
};

struct ProductKernels {
    const char *name;
    std::size_t lanes;         // a strip of outputs, and a chunk of codes, is twice that
    std::size_t rows_of_tile;  // at most
    // Outputs [begin, end) of one row of x: x in chunks of a chunk's two lookups where the weight lies along K.
    void (*gemv)(const Packed4 &, const float *x, float *y, std::size_t begin, std::size_t end);
    // Strips [begin, end) of all rows; y has `outputs` columns.
    void (*tile)(const Packed4 &, const PackedRows &, float *y, std::size_t begin, std::size_t end);
    // As multiply_panels.
    void (*panels)(const float *x, std::size_t stride, std::size_t rows, const float *panels, std::size_t count,
                   std::size_t depth, const float *bias, float *out, std::size_t out_stride);
    const DigitKernels *digits;  // nullptr where there are none
};

// Values that begin at a cache line; a thread keeps its own, as fresh pages cost more than a small product.
template <typename Value>
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { ::operator delete(data_, std::align_val_t(64)); }

    Value *at_least(std::size_t count) {
        if (count > count_) {
            ::operator delete(data_, std::align_val_t(64));
            data_ = nullptr, count_ = 0;
            data_ = static_cast<Value *>(::operator new(count * sizeof(Value), std::align_val_t(64)));
            count_ = count;
        }
        return data_;
    }

  private:
    Value *data_ = nullptr;
    std::size_t count_ = 0;
};

// The digit products of this machine, nullptr where it has none.
const DigitKernels *amx_digits();

extern const ProductKernels portable_products, avx2_products, avx512_products, neon_products;

}  // namespace lut4tool
