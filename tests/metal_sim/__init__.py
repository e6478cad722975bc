"""Metal kernels on a Linux CPU: the text that MLX gives Apple's compiler, compiled by clang and run thread by thread.

A Simulator's metal_kernel takes what MLX's takes. Mode "fast" finds what goes far out of bounds, barriers that not all
threads reach, and NaN from memory nobody wrote; "check" also finds races, exact bounds, uninitialised reads, misaligned
vectors and outputs never written, and counts what is asked of memory. `install` puts it in the place of MLX's own.

It cannot tell: Apple's order of summation in matrix products (varied by `matrix_order`), speed, registers, occupancy,
and whether Apple's compiler takes the text (lint.py finds the usual reasons).
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from .compiler import compiled, scheduler
from .signature import Signature, signature

ORDERS = ("forward", "reverse", "random")
_REPORT_BYTES = 1 << 14


class KernelError(Exception):
    """What a run found, a finding a line, at lines of "kernel.metal" (the generated text)."""


@dataclass(frozen=True)
class How:
    """How to run: the mode, the order of threads, the order of sums in a matrix product, fused multiply-adds.

    skip_groups: so many threadgroups are left out, for weights too large to be run whole.
    """

    mode: str = "check"
    order: str = "random"
    seed: int = 0
    matrix_order: int = 0
    contract: bool = False
    skip_groups: int = 0


@dataclass(frozen=True)
class Traffic:
    """Loads and stores of single threads, and their bytes."""

    requests: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """What a run asked for; memory only in mode "check"."""

    barriers: int
    meetings: int
    matrix_products: int
    threadgroup_bytes: int
    device_reads: Traffic
    device_writes: Traffic
    threadgroup_reads: Traffic
    threadgroup_writes: Traffic


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("element_bytes", ctypes.c_uint32),
        ("is_output", ctypes.c_uint32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("order", "seed", "check", "matrix_order", "skip_groups")),
        ("report", ctypes.c_char_p),
        ("report_bytes", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("barriers", "meetings", "matrix_products", "threadgroup_bytes")),
        ("traffic", ctypes.c_uint64 * 8),
    ]


def run(
    made: Signature,
    arrays: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    how: How,
) -> Cost:
    """Run a kernel; `outputs` are written. Raises KernelError with everything that was found."""
    library = compiled(made, how.mode, how.contract)
    buffers = []
    for parameter in made.parameters:
        array = outputs[parameter.name] if parameter.kind == "output" else arrays[parameter.name]
        is_output = parameter.kind == "output"
        buffers.append(_Buffer(array.ctypes.data, array.nbytes, parameter.name.encode(), array.itemsize, is_output))
    machine, kernel = _scheduler(), _loaded(library)
    report = ctypes.create_string_buffer(_REPORT_BYTES)
    launch = _Launch(
        entry=ctypes.cast(kernel.entry, ctypes.c_void_p),
        buffers=(_Buffer * len(buffers))(*buffers),
        buffer_count=len(buffers),
        grid=tuple(grid),
        threadgroup=tuple(threadgroup),
        order=ORDERS.index(how.order),
        seed=how.seed,
        check=how.mode == "check",
        matrix_order=how.matrix_order,
        skip_groups=how.skip_groups,
        report=ctypes.cast(report, ctypes.c_char_p),
        report_bytes=_REPORT_BYTES,
    )
    if machine.sim_run(ctypes.byref(launch)):
        raise KernelError(_with_lines(report.value.decode(), library))
    pairs = [Traffic(*launch.traffic[i : i + 2]) for i in range(0, 8, 2)]
    return Cost(launch.barriers, launch.meetings, launch.matrix_products, launch.threadgroup_bytes, *pairs)


@functools.cache
def _scheduler() -> ctypes.CDLL:
    return ctypes.CDLL(str(scheduler()), mode=ctypes.RTLD_GLOBAL)


@functools.lru_cache(maxsize=512)
def _loaded(library: Path) -> ctypes.CDLL:
    _scheduler()
    return ctypes.CDLL(str(library))


def _with_lines(report: str, library: Path) -> str:
    """Addresses to lines of the kernel's text."""
    for address in set(re.findall(r"\[pc ([0-9a-f]+)\]", report)):
        found = subprocess.run(
            ["addr2line", "-i", "-e", str(library), "0x" + address], capture_output=True, text=True, check=True
        )
        lines = [line for line in found.stdout.splitlines() if "kernel.metal" in line]
        if lines:
            report = report.replace(f"[pc {address}]", "at line " + lines[0].rsplit(":", 1)[1].split()[0])
    return report


# -- in the place of MLX's


@dataclass
class Call:
    """One launch: its kernel's name, the text, the grid and what it cost."""

    name: str
    signature: Signature
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    outputs: Sequence[np.ndarray]
    cost: Cost


@dataclass
class Simulator:
    """Serves `mx.fast.metal_kernel`; keeps every launch. `edit` may change a kernel's text first (planted bugs)."""

    how: How = field(default_factory=How)
    calls: list[Call] = field(default_factory=list)
    edit: Any = None

    def install(self, monkeypatch: Any) -> None:
        """Replace MLX's metal_kernel by this one for the length of a test."""
        monkeypatch.setattr(mx.fast, "metal_kernel", self.metal_kernel)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)

    def metal_kernel(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
    ) -> Any:
        """Take what mx.fast.metal_kernel takes, and return what it returns: a function that launches."""
        if not (source + header).isascii():
            raise ValueError("MLX takes kernels in ASCII only")

        def launch(
            *,
            inputs: Sequence[mx.array],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            template: Sequence[tuple[str, Any]] = (),
        ) -> list[mx.array]:
            arrays = {key: to_numpy(array) for key, array in zip(input_names, inputs, strict=True)}
            types = [numpy_type(dtype) for dtype in output_dtypes]
            written = [(key, numpy_type(value) if isinstance(value, mx.Dtype) else value) for key, value in template]
            text, top = (source, header) if self.edit is None else self.edit(name, source, header)
            made = signature(name, arrays, dict(zip(output_names, types, strict=True)), text, top, written)
            shapes = {f"{key}_shape": np.array(array.shape, np.int32) for key, array in arrays.items()}
            outputs = [np.zeros(shape, dtype) for shape, dtype in zip(output_shapes, types, strict=True)]
            results = dict(zip(output_names, outputs, strict=True))
            cost = run(made, {**arrays, **shapes}, results, grid, threadgroup, self.how)
            self.calls.append(Call(name, made, grid, threadgroup, outputs, cost))
            return [to_mlx(output) for output in outputs]

        return launch


def numpy_type(dtype: mx.Dtype) -> np.dtype:
    """NumPy's name of an MLX type."""
    return np.dtype(ml_dtypes.bfloat16) if dtype == mx.bfloat16 else np.dtype(str(dtype).removeprefix("mlx.core."))


def to_numpy(array: mx.array) -> np.ndarray:
    """An array's values in row order, with its 0-d shape kept."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def to_mlx(array: np.ndarray) -> mx.array:
    """The array in MLX, bit for bit."""
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)
