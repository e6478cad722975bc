"""The CUDA kernels' texts as MLX builds them, one of every kind, for a compiler without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from lut4tool.formats import NF4, Lookup4Weight
from lut4tool.kernels.cuda import decode, gemv_float, gemv_half, general, tile_float, tile_half, weights, wide_half
from lut4tool.kernels.cuda.program import CUDA_TYPE, Program

# What MLX puts in front, as far as the texts use it.
PREAMBLE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cooperative_groups.h>
#include <cstdint>
struct Shape { int v[10]; __device__ int operator[](int i) const { return v[i]; } };
"""


def translation_unit(program: Program) -> str:
    """The source that MLX compiles for a program: inputs in order, with their `_shape` where the body has it."""
    arguments = []
    for name, dtype in program.inputs:
        arguments.append(f"const {CUDA_TYPE[dtype]}* {name}")
        if f"{name}_shape" in program.body:
            arguments.append(f"const __grid_constant__ Shape {name}_shape")
    arguments += [f"{CUDA_TYPE[dtype]}* {name}" for name, dtype in program.outputs]
    head = f"__global__ void custom_kernel_{program.name}({', '.join(arguments)}) {{\n"
    return f"{PREAMBLE}{program.header}namespace mlx::core::cu {{\n{head}{program.body}\n}}\n}}\n"


def weight(**facts: Any) -> Any:
    """What programs ask of a weight on the device: 14336 x 4096 in blocks of 64 unless told."""
    usual = {
        "rows": 14336,
        "tile": 16,
        "chunks": 32,
        "groups": 2,
        "span": 0,
        "affine": False,
        "float_points": False,
        "fold": True,
    }
    kind = mx.uint32 if facts.pop("interleaved", False) else mx.float32
    return SimpleNamespace(**usual | facts, scales=SimpleNamespace(dtype=kind))


def _programs() -> Iterator[tuple[str, Program]]:
    yield "arrange", weights.ARRANGER
    lookup, along_n = weight(), weight(span=64, groups=1)
    lookup_4, along_n_4 = weight(tile=4), weight(tile=4, span=64, groups=1)
    for half in ("bfloat16", "float16"):
        affine = weight(affine=True, interleaved=True, groups=4)
        points = weight(affine=True, interleaved=True, groups=8, float_points=True)
        for kind, given in (("lookup", lookup), ("along n", along_n), ("affine", affine), ("float points", points)):
            for m in (1, 8, 16):
                yield f"gemv {half} {kind} {m}", gemv_half.program(half, given, m)
            for columns in (16, 64, 128):
                yield f"tile {half} {kind} {columns}", tile_half.program(half, given, columns, 1)[0]
            for columns, parts in ((64, 2), (256, 1)):
                yield f"wide {half} {kind} {columns}", wide_half.program(half, given, columns, parts)
            yield f"decode {half} {kind}", decode.program(given, half)
        yield f"arrange x {half}", wide_half.arrange(half, 64)
    for kind, given, rounding in (
        ("lookup", lookup_4, "float32"),
        ("rounded", lookup_4, "bfloat16"),
        ("along n", along_n_4, "float32"),
        ("affine", weight(tile=4, affine=True, groups=4), "float16"),
        ("long", weight(tile=4, fold=False, groups=8, chunks=112), "float32"),
    ):
        for m in (1, 2, 4):
            yield f"gemv float32 {kind} {m}", gemv_float.program(given, m, rounding)[0]
        for columns in (8, 16):
            yield f"tile float32 {kind} {columns}", tile_float.program(given, rounding, columns)
        yield f"decode float32 {kind}", decode.program(given, rounding)
    small = Lookup4Weight(np.zeros(8, np.uint8), np.ones(1, np.float32), NF4, 4, 4, 16)
    for dtype in ("float32", "float16", "bfloat16"):
        yield f"general {dtype}", general.program(small, dtype)


PROGRAMS = dict(_programs())
