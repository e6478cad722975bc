"""The MSL text that MLX makes of a `mx.fast.metal_kernel` call: for Apple's compiler, and here for the simulator.

Held against MLX itself in tests/kernels/test_metal_sim.py: mx.export_function traces a kernel and prints its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

#: NumPy type -> the name that MLX writes.
TYPES: Mapping[np.dtype, str] = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "float16_t",
    np.dtype(ml_dtypes.bfloat16): "bfloat16_t",
    np.dtype(np.uint8): "uint8_t",
    np.dtype(np.uint32): "uint32_t",
    np.dtype(np.int32): "int32_t",
}

#: Kernel attributes in MLX's order -> their number of components; MLX writes those whose name is in the source.
ATTRIBUTES: Mapping[str, int] = {
    "dispatch_quadgroups_per_threadgroup": 1,
    "dispatch_simdgroups_per_threadgroup": 1,
    "dispatch_threads_per_threadgroup": 3,
    "grid_origin": 3,
    "grid_size": 3,
    "quadgroup_index_in_threadgroup": 1,
    "quadgroups_per_threadgroup": 1,
    "simdgroup_index_in_threadgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "thread_execution_width": 1,
    "thread_index_in_quadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "thread_index_in_threadgroup": 1,
    "thread_position_in_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 3,
    "threadgroups_per_grid": 3,
    "threads_per_grid": 3,
    "threads_per_simdgroup": 1,
    "threads_per_threadgroup": 3,
}

#: An array of fewer elements is passed in `constant` memory.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class Parameter:
    """A buffer of the kernel: `kind` is "input", "output", "shape", "strides" or "ndim" of the array `name`."""

    kind: str
    name: str
    type: str
    is_reference: bool = False


@dataclass(frozen=True)
class Signature:
    """The whole text, the kernel's name with its template arguments, its buffers in order, its attributes."""

    text: str
    call: str
    parameters: Sequence[Parameter]
    attributes: Sequence[str]


def signature(
    name: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.dtype],
    source: str,
    header: str,
    template: Sequence[tuple[str, Any]],
) -> Signature:
    """Generate the text of a kernel for these inputs, letter for letter as MLX does."""
    arguments = [_template_argument(value) for _, value in template]
    instance = "<" + ", ".join(written for _, written in arguments) + ">" if template else ""
    mangled = "custom_kernel_" + name
    if template:
        mangled += "_" + "_".join(["", *(written for _, written in arguments)])
    for array in inputs.values():
        mangled += "_" + TYPES[array.dtype]
        mangled += "s" if array.ndim == 0 else "c" if array.size < CONSTANT_BELOW else ""
    mangled += "".join("_" + TYPES[dtype] for dtype in outputs.values())

    parameters, lines = [], []
    for key, array in inputs.items():
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        parameters.append(Parameter("input", key, TYPES[array.dtype], array.ndim == 0))
        lines.append(f"const {space} {TYPES[array.dtype]}{'&' if array.ndim == 0 else '*'} {key}")
        for kind, written in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if array.ndim and f"{key}_{kind}" in source:
                parameters.append(Parameter(kind, f"{key}_{kind}", written[:-1], written[-1] == "&"))
                lines.append(f"const constant {written} {key}_{kind}")
    for key, dtype in outputs.items():
        parameters.append(Parameter("output", key, TYPES[dtype]))
        lines.append(f"device {TYPES[dtype]}* {key}")
    attributes = [attribute for attribute in ATTRIBUTES if attribute in source]
    if not attributes:
        raise ValueError("a kernel without attributes gets a broken signature from MLX")
    buffers = ",\n".join(f"  {line} [[buffer({index})]]" for index, line in enumerate(lines))
    threads = ",\n".join(f"  {'uint3' if ATTRIBUTES[a] == 3 else 'uint'} {a} [[{a}]]" for a in attributes)
    text = header
    if template:
        text += "template <" + ", ".join(f"{t} {n}" for (t, _), (n, _) in zip(arguments, template, strict=True)) + ">\n"
    text += f"[[kernel]] void {mangled}(\n{buffers},\n{threads}) {{\n{source}\n}}\n"
    if template:
        text += f'\ntemplate [[host_name("{mangled}")]] [[kernel]] decltype({mangled}{instance}) {mangled}{instance};\n'
    return Signature(text, mangled + instance, parameters, attributes)


def _template_argument(value: Any) -> tuple[str, str]:
    if isinstance(value, bool):
        return "bool", "1" if value else "0"
    if isinstance(value, int):
        return "int", str(value)
    return "typename", TYPES[np.dtype(value)]
