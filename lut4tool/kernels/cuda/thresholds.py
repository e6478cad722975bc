"""The most rows of x that each kernel is picked for, by class of type: where they cross at 14336 x 4096 on an H200.

Written by `python benchmarks/kernels_cuda.py --thresholds`. narrow and narrow_qmm: where the tile of wide_half.py
follows that of tile_half.py on Hopper, by kind of weight; older: where a decode follows the narrow one, which is all
that other GPUs have. In float32 no decode is picked: a plain product is not within 2^-21 * sum |x||w|.
"""

MOST_ROWS = {
    "half": {"gemv": 8, "narrow": 32, "narrow_qmm": 64, "tile": 1 << 62, "older": 256},
    "float32": {"gemv": 4, "tile": 1 << 62},
}
