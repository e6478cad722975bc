"""Time CUDA kernels from CUDA graphs of many calls, each on another weight: microseconds between one and the next.

Our kernels' own texts are compiled by nvcc as MLX would compile them, and replayed by CuPy: MLX itself needs longer on
the host for a product than the smallest of them takes, and a profiler adds the start of each kernel.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lut4tool.kernels.cuda.program import Program
from tests.cuda_text import translation_unit

REPLAYS = 9


@dataclass(frozen=True)
class Launch:
    """A kernel as a product launches it: its arrays, its results (of zeros), its grid."""

    program: Program
    arrays: list[Any]
    results: list[Any]
    grid: tuple[int, ...]


def launches_of(multiply: Callable[[Any, Any], Any], x: Any, weight: Any) -> list[Launch]:
    """What a product launches, in order; nothing runs. A result that a later one takes is the same array in both."""
    import mlx.core as mx

    launches: list[Launch] = []
    original = Program.launch

    def record(program: Program, arrays: Any, shapes: Any, grid: Any) -> Any:
        types = [getattr(mx, dtype) for _, dtype in program.outputs]
        results = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
        launches.append(Launch(program, list(arrays), results, tuple(grid)))
        return results

    Program.launch = record  # type: ignore[method-assign]
    try:
        multiply(x, weight)
    finally:
        Program.launch = original  # type: ignore[method-assign]
    return launches


def compile_all(programs: Iterable[Program]) -> None:
    """Compile with as many processes as the machine has cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(cubin, set(programs)))


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


def time_launches(launches: list[Launch], sets: int) -> float:
    """Microseconds of a product's launches, over `sets` weights of random bytes; small arrays are their own."""
    import cupy
    import numpy as np

    rng = np.random.default_rng(0)
    results = {id(array): cupy.empty(array.nbytes, cupy.uint8) for launch in launches for array in launch.results}

    def copies(name: str, dtype: str, array: Any) -> list[Any]:
        if id(array) in results:
            return [results[id(array)]]
        if name == "x" and dtype != "float32":  # random bytes, but the exponents of halves of about 0.1
            noise = rng.integers(0, 1 << 16, array.size, dtype=np.uint16)
            return [cupy.asarray(noise & 0x807F | 0x3D80 if dtype == "bfloat16" else noise & 0x83FF | 0x2C00)]
        if array.nbytes < 1 << 20 or name == "x":
            return [cupy.asarray(np.array(array))]
        if dtype == "float32":
            return [cupy.random.uniform(0.01, 0.1, array.size, dtype=cupy.float32) for _ in range(sets)]
        if dtype == "uint32":  # scale and zero point of a QMM weight
            return [cupy.full(array.size, 0xC3083DCC, dtype=cupy.uint32) for _ in range(sets)]
        return [cupy.random.randint(0, 256, array.size, dtype=cupy.uint8) for _ in range(sets)]

    def arguments_of(launch: Launch) -> tuple[list[tuple[list[Any], Any]], list[Any]]:
        inputs = []
        for (name, dtype), array in zip(launch.program.inputs, launch.arrays, strict=True):
            shape = np.array([*array.shape, *[0] * (10 - array.ndim)], np.int32).view("V40")
            inputs.append((copies(name, dtype, array), shape if f"{name}_shape" in launch.program.body else None))
        return inputs, [results[id(array)] for array in launch.results]

    prepared = [(launch, _loaded(launch.program), *arguments_of(launch)) for launch in launches]

    def run(i: int) -> None:
        for launch, kernel, inputs, outputs in prepared:
            arguments: list[Any] = []
            for arrays, shape in inputs:
                arguments += [arrays[i % len(arrays)], *([] if shape is None else [shape])]
            program = launch.program
            kernel((*launch.grid, 1, 1)[:3], (program.threads, 1, 1), (*arguments, *outputs), shared_mem=program.shared)

    cupy.cuda.Device().synchronize()  # the arrays are made in another stream
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run(0)
        stream.begin_capture()
        for i in range(sets):
            run(i)
        graph = stream.end_capture()
        times = []
        for _ in range(REPLAYS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1000 / sets)
    prepared.clear()
    results.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    return statistics.median(times[2:])


def time_torch(call: Callable[[int], Any], sets: int) -> float:
    """Microseconds of a call of torch by the number of the weight, from a torch graph."""
    import torch

    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / sets)
    return statistics.median(times[2:])


def _loaded(program: Program) -> Any:
    import cupy

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(program))
        file.flush()
        kernel = cupy.RawModule(path=file.name).get_function(f"custom_kernel_{program.name}")
    kernel.max_dynamic_shared_size_bytes = program.shared
    return kernel
