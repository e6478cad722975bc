"""4-bit products on this CPU beside onnxruntime: the folded chain (dense), MatMulBnb4, MatMulNBits, and the floor.

    python benchmarks/kernels_cpu.py [--quick] [--isa amx|avx512|avx2|portable]
    python benchmarks/kernels_cpu.py --memory          of each engine alone, what its imports did not take
    python benchmarks/kernels_cpu.py --thresholds      where our kernels cross, into lut4tool/kernels/thresholds.py

NumPy in and NumPy out through Runtime.run, all engines in turns; a ratio is the median over turns of our time over the
engine's, and stands beside what it is meant to be at most. Thresholds are of the least processor time of both threads
together, which a busy machine changes less than the time on the wall.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

THRESHOLDS = Path(__file__).parents[1] / "lut4tool/kernels/thresholds.py"
SHAPES = [(14336, 4096), (4096, 4096), (4096, 11008), (6656, 19968)]  # bench.STANDARD, which is not imported here
ROWS = (1, 4, 16, 128, 256, 512)

#: (rows of x, engine) -> our time over the engine's, at most; for 14336 x 4096 and AVX-512 or AMX.
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
#: Megabytes over the imports, at the first shape.
MOST_MEMORY = 150


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape, fewer rows")
    parser.add_argument("--isa", default="", help="force an instruction set")
    parser.add_argument("--thresholds", action="store_true", help="write where our kernels cross")
    parser.add_argument("--memory", action="store_true", help="measure memory, nothing else")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape and number of rows")
    asked = parser.parse_args()
    if asked.isa:
        os.environ["LUT4TOOL_CPU_ISA"] = asked.isa  # read when lut4tool is imported

    from lut4tool import native
    from lut4tool.bench import OURS, Shape, bench

    if asked.thresholds:
        write_thresholds(asked.seconds)
        return
    print_memory()
    if asked.memory:
        return
    bars = BARS if native.product_instruction_set() in ("amx", "avx512") else BARS_OF_AVX2
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


def print_memory() -> None:
    """Load and run the first shape's weight in a process of each engine's own: the peak over what its imports took."""
    import numpy as np
    import onnx

    from lut4tool import formats, native
    from lut4tool.measure import LUT4TOOL, ONNXRUNTIME, measure

    n, k = SHAPES[0]
    rng = np.random.default_rng(0)
    packed, scales = rng.integers(0, 256, n * k // 2, dtype=np.uint8), rng.random(n * k // 64, np.float32)
    weight = formats.Lookup4Weight(packed, scales, formats.NF4, n, k, 64, (1, 0))
    dense = np.ascontiguousarray(native.decode_elements(weight, 0, n * k).reshape(n, k).T)
    leaves = {"packed": packed, "scales": scales, "codebook": formats.NF4}
    bnb4 = {"K": k, "N": n, "block_size": 64, "quant_type": 1}
    models = {
        "lut4tool": model_of(formats.LOOKUP4_MATMUL, formats.DOMAIN, leaves, weight.attributes("float32")),
        "onnxruntime MatMulBnb4": model_of("MatMulBnb4", "com.microsoft", {"b": packed, "absmax": scales}, bnb4),
        "onnxruntime dense": model_of("MatMul", "", {"w": dense}, {}),
    }
    print(f"{n} x {k}, {(packed.nbytes + scales.nbytes) / 1e6:.0f} MB packed: memory over the imports, M 1 and 128")
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            path = Path(folder, "model.onnx")
            onnx.save(model, path)
            taken = []
            for rows in (1, 128):
                x = rng.standard_normal((rows, k)).astype(np.float32)
                taken.append(measure(path, {"x": x}, LUT4TOOL if name == "lut4tool" else ONNXRUNTIME, 3).model_bytes)
            meant = f"  at most {MOST_MEMORY}" if name == "lut4tool" else ""
            print(f"  {name:26}{taken[0] / 1e6:7.0f} MB {taken[1] / 1e6:7.0f} MB{meant}", flush=True)


def model_of(op: str, domain: str, leaves: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """A model of one product of x with constants."""
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node(op, ["x", *leaves], ["y"], "product", domain=domain, **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    constants = [numpy_helper.from_array(array, name) for name, array in leaves.items()]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], constants)
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def write_thresholds(seconds: float) -> None:
    """Time each kernel beside the next one of the table for some M, and write up to which M it is the cheaper."""
    from lut4tool import native
    from lut4tool.kernels import thresholds

    lines = []
    for group, most in thresholds.MOST_ROWS["cpu"].items():
        try:
            native._native.use_instruction_set(group.split(", ")[-1])
        except ValueError as error:
            print(f"{group}: kept, {error}")
        else:
            for kernel, following in itertools.pairwise(most):
                most[kernel] = crossing(group, kernel, following, seconds)
        limits = ", ".join(f'"{name}": {"1 << 62" if rows == 1 << 62 else rows}' for name, rows in most.items())
        lines.append(f'        "{group}": {{{limits}}},\n')
    text = THRESHOLDS.read_text()
    THRESHOLDS.write_text(re.sub(r'(?<="cpu": \{\n)(        ".*\n)*', "".join(lines), text))
    print("".join(lines), end="")


def crossing(group: str, kernel: str, following: str, seconds: float) -> int:
    """Up to how many rows of x a kernel costs no more than the next one."""
    most = 0
    for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32, 48):
        own, other = costs(rows, (kernel, following), group, seconds)
        print(f"{group}, M {rows:2}: {kernel} {own:8.2f} ms, {following} {other:8.2f} ms", flush=True)
        if own > other:
            break
        most = rows
    return most


def costs(rows: int, kernels: tuple[str, ...], group: str, seconds: float) -> list[float]:
    """The least milliseconds of processor time of each kernel, in turns, at the first shape."""
    import numpy as np

    from lut4tool import formats
    from lut4tool.kernels import cpu

    n, k = SHAPES[0]
    rng = np.random.default_rng(0)
    packed, scales = rng.integers(0, 256, n * k // 2, dtype=np.uint8), rng.random(n * k // 64, np.float32)
    sizes, perm = ((n, k), (1, 0)) if group.startswith("W [N, K]") else ((k, n), (0, 1))
    dtype = "bfloat16" if "bfloat16" in group else "float32"
    weight = formats.Lookup4Weight(packed, scales, formats.NF4, *sizes, 64, perm, weight_dtype=dtype)
    x = rng.standard_normal((rows, k)).astype(formats.FLOAT_DTYPES[dtype])
    least = dict.fromkeys(kernels, float("inf"))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for kernel in kernels:
            start = time.process_time()
            cpu.lookup4_matmul(x, weight, kernel)
            least[kernel] = min(least[kernel], 1e3 * (time.process_time() - start))
    return list(least.values())


if __name__ == "__main__":
    main()
