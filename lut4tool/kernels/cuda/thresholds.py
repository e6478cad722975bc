"""The most rows of x that each kernel is picked for, by class of type: where they cross at 14336 x 4096 on an H200.

Written by `python benchmarks/kernels_cuda.py --thresholds`. In float32 no decode is picked: a plain product is not
within 2^-21 * sum |x||w|.
"""

MOST_ROWS = {
    "half": {"gemv": 8, "tile": 128},
    "float32": {"gemv": 4, "tile": 1 << 62},
}
