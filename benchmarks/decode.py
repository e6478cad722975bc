"""Gigabytes of packed 4-bit weights decoded a second, for each type and block size; the best of several runs."""

from __future__ import annotations

import time

import numpy as np

from lut4tool import formats, native
from lut4tool.formats import FLOAT_DTYPES, NF4, Lookup4Weight

ROWS = COLS = 4096


def rate(weight: Lookup4Weight, elements: int, threads: int) -> float:
    """GB of packed data a second, into a buffer that is there already; threads 0 is NumPy."""
    out = np.empty(elements, FLOAT_DTYPES[weight.weight_dtype])
    times = []
    for _ in range(6):
        start = time.perf_counter()
        if threads:
            native.decode_elements(weight, 0, elements, out, threads)
        else:
            formats.decode_elements(weight, 0, elements)
        times.append(time.perf_counter() - start)
    return elements / 2 / min(times) / 1e9


def main() -> None:
    """Print the table: a whole 4096 x 4096 weight on one thread and on all, a panel of 2^18 elements, and NumPy."""
    threads = native.thread_count()
    print(f"{native.describe()}, GB of packed data a second")
    print(f"{'weight_dtype':14}{'block':>6}{'1 thread':>10}{f'{threads} threads':>11}{'panel':>8}{'NumPy':>8}")
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, ROWS * COLS // 2, dtype=np.uint8)
    for dtype in FLOAT_DTYPES:
        for block_size in (16, 64, 256):
            scales = rng.random(ROWS * COLS // block_size, np.float32)
            weight = Lookup4Weight(packed, scales, NF4, ROWS, COLS, block_size, weight_dtype=dtype)
            whole, panel = ROWS * COLS, 1 << 18
            rates = rate(weight, whole, 1), rate(weight, whole, threads), rate(weight, panel, 1), rate(weight, panel, 0)
            print(f"{dtype:14}{block_size:6}{rates[0]:10.2f}{rates[1]:11.2f}{rates[2]:8.2f}{rates[3]:8.3f}")


if __name__ == "__main__":
    main()
