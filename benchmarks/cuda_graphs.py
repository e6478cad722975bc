"""Time the CUDA kernels from CUDA graphs of many calls, each on another weight: microseconds between one and the next.

The kernels' own texts are compiled by nvcc as MLX would compile them, and replayed by CuPy: MLX itself needs longer on
the host for a product than the smallest of them takes, and a profiler adds the start of each kernel.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lut4tool.kernels.cuda.program import Program
from tests.cuda_text import translation_unit

SETS, REPLAYS = 40, 9


def time_product(multiply: Callable[[Any, Any], Any], x: Any, weight: Any) -> float:
    """Microseconds of a product that is one kernel; its weight's arrays are replaced by SETS random ones."""
    import cupy
    import numpy as np

    launches: list[tuple[Program, list[Any], list[Any], Any]] = []
    original = Program.launch

    def record(program: Program, arrays: Any, shapes: Any, grid: Any) -> Any:
        launches.append((program, list(arrays), list(shapes), grid))
        return original(program, arrays, shapes, grid)

    Program.launch = record  # type: ignore[method-assign]
    try:
        multiply(x, weight)
    finally:
        Program.launch = original  # type: ignore[method-assign]
    ((program, arrays, shapes, grid),) = launches
    kernel = _compiled(program)
    rng = np.random.default_rng(0)

    def copies(name: str, dtype: str, array: Any) -> list[Any]:
        size = {"float32": 4, "uint32": 4, "uint8": 1, "int64": 8}.get(dtype, 2) * array.size
        count = SETS if size > 1 << 20 and name != "x" else 1
        if dtype == "float32":
            return [cupy.random.uniform(0.01, 0.1, array.size, dtype=cupy.float32) for _ in range(count)]
        if dtype in ("bfloat16", "float16", "uint32"):  # halves of about 0.1
            half = np.uint16(0x3DCC)
            return [cupy.full(size // 2, half, dtype=cupy.uint16) for _ in range(count)]
        return [cupy.asarray(rng.integers(0, 256, size, dtype=np.uint8)) for _ in range(count)]

    inputs = [
        (name, copies(name, dtype, array), np.array([*array.shape, *[0] * (10 - array.ndim)], np.int32).view("V40"))
        for (name, dtype), array in zip(program.inputs, arrays, strict=True)
    ]
    out = cupy.empty(int(np.prod(shapes[0])) * 4, dtype=cupy.uint8)

    def launch(i: int) -> None:
        arguments: list[Any] = []
        for name, sets, shape in inputs:
            arguments.append(sets[i % len(sets)])
            if f"{name}_shape" in program.body:
                arguments.append(shape)
        kernel((*grid, 1, 1)[:3], (program.threads, 1, 1), (*arguments, out), shared_mem=program.shared)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch(0)
        stream.begin_capture()
        for i in range(SETS):
            launch(i)
        graph = stream.end_capture()
        times = []
        for _ in range(REPLAYS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1000 / SETS)
    return statistics.median(times[2:])


@cache
def cubin(program: Program) -> bytes:
    """The program compiled by nvcc for the H100 and H200."""
    text = translation_unit(program).replace("__global__ void custom", 'extern "C" __global__ void custom')
    with tempfile.TemporaryDirectory() as folder:
        source, done = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(text)
        target = "-gencode=arch=compute_90a,code=sm_90a"
        subprocess.run(["nvcc", "-std=c++17", "-cubin", target, "-o", str(done), str(source)], check=True)
        return done.read_bytes()


def _compiled(program: Program) -> Any:
    import cupy

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(program))
        file.flush()
        kernel = cupy.RawModule(path=file.name).get_function(f"custom_kernel_{program.name}")
    kernel.max_dynamic_shared_size_bytes = program.shared
    return kernel
