"""4-bit products on this CPU beside onnxruntime: the folded chain (dense), MatMulBnb4, MatMulNBits, and the floor.

    python benchmarks/kernels_cpu.py [--quick] [--isa avx512|avx2|portable]

NumPy in and NumPy out through Runtime.run, all engines in turns; a ratio is the median over turns of our time over the
engine's, and stands beside what it is meant to be at most.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

SHAPES = [(14336, 4096), (4096, 4096), (4096, 11008)]
ROWS = (1, 4, 16, 128, 512)

#: (rows of x, engine) -> our time over the engine's, at most; for 14336 x 4096 and AVX-512.
BARS = {
    (1, "onnxruntime dense"): 0.6,
    (1, "onnxruntime MatMulBnb4"): 0.15,
    (1, "onnxruntime MatMulNBits"): 1.0,
    (4, "onnxruntime dense"): 0.9,
    (4, "onnxruntime MatMulBnb4"): 0.3,
    (128, "onnxruntime dense"): 1.25,
    (128, "onnxruntime MatMulBnb4"): 1.1,
    (512, "onnxruntime dense"): 1.15,
}
BARS_OF_AVX2 = {(1, "onnxruntime dense"): 0.7}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape, fewer rows")
    parser.add_argument("--isa", default="", help="force an instruction set")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape and number of rows")
    asked = parser.parse_args()
    if asked.isa:
        os.environ["LUT4TOOL_CPU_ISA"] = asked.isa  # read when lut4tool is imported

    from lut4tool import native
    from lut4tool.bench import OURS, Shape, bench

    bars = BARS if native.product_instruction_set() == "avx512" else BARS_OF_AVX2
    rows = (1, 4) if asked.quick else ROWS
    for n, k in SHAPES[:1] if asked.quick else SHAPES:
        shapes = [Shape(n, k), Shape(n, k, transposed=False), Shape(n, k, 32, affine=True)]
        for shape in shapes:
            result = bench([shape], rows, "cpu", asked.seconds, cold=not asked.quick)
            kernel = next(timing.kernel for timing in result.timings if timing.engine == OURS)
            print(f"{shape}: {kernel}, {result.threads} threads, {result.bandwidth:.1f} GB/s from memory")
            for timing in result.timings:
                bar = bars.get((timing.m, timing.engine)) if (n, k) == SHAPES[0] and not timing.cold else None
                ratio = "" if timing.ours_over_it is None else f"ours / it {timing.ours_over_it:5.2f}"
                meant = "" if bar is None else f"at most {bar}"
                where = "cold" if timing.cold else "hot"
                print(
                    f"  M {timing.m:4} {where:5}{timing.engine:26}best {timing.best:9.3f} ms"
                    f"  median {timing.median:9.3f} ms  {ratio}  {meant}".rstrip(),
                    flush=True,
                )


if __name__ == "__main__":
    main()
