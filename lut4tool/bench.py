"""Timing one 4-bit product beside its peers on this machine: dense products, onnxruntime, bitsandbytes, the floor.

Everything that is compared runs in turns in one process, so that a busy machine slows all of it: trust the ratios.
Weights are random, as times do not depend on them. Peers have as many threads as the native kernels; onnxruntime's do
not spin. What is timed is the same product: some outputs of every engine are compared with float64 first.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from lut4tool import formats, native
from lut4tool.engines import OURS, Call, Engine, EngineError, Product, call_of, engines_of, kind_of
from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN, FLOAT_DTYPES, LOOKUP4_MATMUL, QMM, Lookup4Weight, QmmWeight
from lut4tool.runtime import backend
from lut4tool.runtime.backend import mx
from lut4tool.storage import Tensors, size_text, subgraphs

FLOOR = "floor"

#: N and K of what large language models multiply by, and the rows of x that they are timed with.
STANDARD, STANDARD_ROWS = ((14336, 4096), (4096, 4096), (4096, 11008), (6656, 19968)), (1, 16, 128, 256, 512)

#: What is read between runs whose weights are to come from memory, at least and at most.
_EVICT = (64 << 20, 1 << 30)
#: Bytes of what a GPU copies to show its bandwidth.
_COPIED = 512 << 20
#: A product is the same one where |y - exact| is at most this share of sum |x||w|.
_SAME = {"float32": 2.0**-16, "float16": 2.0**-8, "bfloat16": 2.0**-6}
#: Outputs that are compared.
_COMPARED = 32

_WALL = {
    "cpu": "wall time of a run, NumPy in and out",
    "gpu": "wall time from the call until y is there (MLX's evaluation, torch's synchronisation); x and y stay on it",
}


class BenchError(Lut4Error):
    """Nothing to time, or a product that is wrong."""


@dataclass(frozen=True)
class Shape:
    """A product: Lookup4MatMul, or QMM (affine), of a weight with N outputs and depth K."""

    N: int
    K: int
    block_size: int = 64
    transposed: bool = True  # W is [N, K], perm [1, 0]; else [K, N]
    affine: bool = False

    def __str__(self) -> str:
        layout = "QMM" if self.affine else "W [N, K]" if self.transposed else "W [K, N]"
        return f"{self.N} x {self.K}, block {self.block_size}, {layout}"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one engine at M rows of x, and our time over its: the median of ratios of one turn each.

    kernel: what serves: our kernel, or a peer's version.
    """

    shape: Shape
    m: int
    cold: bool
    engine: str
    kernel: str
    best: float
    median: float
    ours_over_it: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {"shape": str(self.shape), "N": self.shape.N, "K": self.shape.K} | {
            key: value for key, value in vars(self).items() if key != "shape"
        }


@dataclass(frozen=True)
class Missing:
    """An engine that is not timed for a shape, and why."""

    shape: Shape
    engine: str
    reason: str


@dataclass(frozen=True)
class Bench:
    """What was timed on which machine; gigabytes a second that the device reads from memory, on a CPU on all threads.

    timed: what a time is of, in words.
    """

    machine: Mapping[str, Any]
    threads: int
    dtype: str
    bandwidth: float
    timed: str
    timings: Sequence[Timing]
    missing: Sequence[Missing]

    def to_json(self) -> dict[str, Any]:
        """The document of `bench --json`."""
        rows = [timing.to_json() for timing in self.timings]
        missing = [vars(one) | {"shape": str(one.shape)} for one in self.missing]
        return vars(self) | {"machine": dict(self.machine), "timings": rows, "missing": missing}


def bench(
    shapes: Sequence[Shape],
    rows: Sequence[int] = (1, 16, 128),
    device: str = "auto",
    seconds: float = 2.0,
    cold: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    dtype: str = "float32",
) -> Bench:
    """Time each shape at each number of rows of x, in turns for about `seconds` (at least five turns).

    dtype: of x and y, "float32", "float16" or "bfloat16"; the weight is rounded to it.
    cold: also with the caches emptied before each run, on a CPU and for up to 4 rows.
    Raises BenchError for sizes that cannot be, and where our product is wrong.
    """
    if not shapes or not rows or any(m < 1 for m in rows):
        raise BenchError("bench needs a shape and numbers of rows of at least 1")
    if dtype not in FLOAT_DTYPES:
        raise BenchError(f"there is no type {dtype!r} of x; use {', '.join(FLOAT_DTYPES)}")
    kind = kind_of(device)
    if cold and kind != "cpu":
        raise BenchError("cold runs are timed on a CPU only")
    for shape in shapes:
        _check_fits(shape, max(rows), dtype)
    threads = native.thread_count()
    bandwidth = _bandwidth(threads) if kind == "cpu" else _device_bandwidth(device)
    timings: list[Timing] = []
    missing: dict[Missing, None] = {}
    done = 0
    for shape in shapes:
        product = Product(_weight(shape, dtype), dtype, device, threads)
        engines, reasons = engines_of(product)
        compared = _columns(product.weight)
        for m in rows:
            x = np.random.default_rng(0).random((m, shape.K), np.float32).astype(FLOAT_DTYPES[dtype])
            calls, failed = _same(engines, x, compared, shape.N, dtype)
            missing |= dict.fromkeys(Missing(shape, name, why) for name, why in (reasons | failed).items())
            for emptied in (False, True) if cold and m <= 4 else (False,):
                taken = _in_turns({engine.name: call for engine, call in calls}, seconds, emptied)
                timings += _timings(shape, m, emptied, taken, [engine for engine, _ in calls])
                floor = _packed_bytes(product.weight) / bandwidth / 1e6
                timings.append(Timing(shape, m, emptied, FLOOR, "", floor, floor, None))
            done += 1
            if progress:
                progress("products", done, len(shapes) * len(rows))
    machine = backend.describe(backend.device(device))
    timed = _WALL["cpu" if kind == "cpu" else "gpu"]
    return Bench(machine, threads, dtype, bandwidth, timed, timings, list(missing))


def shapes_of(model: onnx.ModelProto, tensors: Tensors | None = None) -> list[Shape]:
    """The different shapes of a model's 4-bit products: chains that are recognized, and packed weights, ours or not.

    tensors: reads literals that are external data. Raises BenchError where there is none.
    """
    from lut4tool.recognize import recognize

    report = recognize(model, vendor=True, tensors=tensors)
    products = [(proof.op, dict(proof.attributes)) for proof in report.proofs]
    functions = (function.node for function in model.functions if function.domain != DOMAIN)
    waiting = [model.graph.node, *functions]
    for nodes in waiting:
        for node in nodes:
            if node.domain == DOMAIN and node.op_type in (LOOKUP4_MATMUL, QMM):
                written = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
                products.append((node.op_type, written))
            waiting += [graph.node for graph in subgraphs(node)]
    if not products:
        refused = "".join(f" that is proved: {first.node}: {first.reason}" for first in report.refusals[:1])
        raise BenchError(f"the model has no 4-bit product{refused}")
    return list(dict.fromkeys(_shape(op, attributes) for op, attributes in products))


def _shape(op: str, a: Mapping[str, Any]) -> Shape:
    """A product's shape from its attributes. Raises BenchError where they are none of one."""
    names = ("N", "K", "block_size") if op == QMM else ("rows", "cols", "block_size")
    rows, cols, block = sizes = [a.get(name, 0) for name in names]
    perm = [1, 0] if op == QMM else a.get("perm")
    whole = all(isinstance(size, int) and size > 0 for size in sizes) and block % 2 == 0
    if not whole or perm not in ([0, 1], [1, 0], (0, 1), (1, 0)):
        raise BenchError(f"{op} of {rows} x {cols}, block {block} and perm {perm} is no product that can be timed")
    if op == QMM:
        return Shape(rows, cols, block, affine=True)
    transposed = list(perm) == [1, 0]
    n, k = (rows, cols) if transposed else (cols, rows)
    return Shape(n, k, block, transposed)


# -- weights


def _check_fits(shape: Shape, m: int, dtype: str) -> None:
    """Raise BenchError where a weight as the engines hold it, x and y would take over half of the memory."""
    width = FLOAT_DTYPES[dtype].itemsize
    needed = 4 * (shape.N * shape.K // 2 + 4 * (shape.N * shape.K // shape.block_size))
    needed += width * m * (shape.K + 2 * shape.N)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory // 2:
        raise BenchError(
            f"{shape}, M {m}, would take about {size_text(needed)}, over half of this machine's {size_text(memory)}"
        )


def _weight(shape: Shape, dtype: str) -> Lookup4Weight | QmmWeight:
    rng = np.random.default_rng(0)
    if shape.affine:
        grid = (shape.N, -(-shape.K // shape.block_size))
        packed = rng.integers(0, 256, (*grid, shape.block_size // 2), dtype=np.uint8)
        scales = rng.random(grid, np.float32).astype(FLOAT_DTYPES[dtype])
        return QmmWeight(packed, scales, np.full(grid, 8, np.uint8), shape.K, shape.N, shape.block_size)
    rows, cols = (shape.N, shape.K) if shape.transposed else (shape.K, shape.N)
    perm = (1, 0) if shape.transposed else (0, 1)
    packed = rng.integers(0, 256, (rows * cols + 1) // 2, dtype=np.uint8)
    scales = rng.random(-(-rows * cols // shape.block_size), np.float32)
    return Lookup4Weight(packed, scales, formats.NF4, rows, cols, shape.block_size, perm, weight_dtype=dtype)


def _packed_bytes(weight: Lookup4Weight | QmmWeight) -> int:
    return weight.packed.nbytes + weight.scales.nbytes


def _columns(weight: Lookup4Weight | QmmWeight) -> np.ndarray:
    """The first columns of the matrix in float64 [K, some], decoded by NumPy."""
    if isinstance(weight, QmmWeight):
        return formats.decode_qmm(weight, 0, min(weight.N, _COMPARED)).T.astype(np.float64)
    k, n = weight.shape
    few, size = min(n, _COMPARED), weight.block_size
    if weight.perm == (1, 0):
        return formats.decode_elements(weight, 0, few * k).reshape(few, k).T.astype(np.float64)
    parts = []
    for row in range(0, k, size):  # so many rows begin with a block
        piece = formats.decode_elements(weight, row * n, min(row + size, k) * n)
        parts.append(piece.reshape(-1, n)[:, :few].astype(np.float64))
    return np.concatenate(parts)


# -- the same product


def _same(
    engines: Sequence[Engine], x: np.ndarray, columns: np.ndarray, outputs: int, dtype: str
) -> tuple[list[tuple[Engine, Call]], dict[str, str]]:
    """The engines whose product of x is right, each with its call, and by name what the others did.

    Raises BenchError where ours is not.
    """
    wide = x.astype(np.float64)
    exact, most = wide @ columns, _SAME[dtype] * (np.abs(wide) @ np.abs(columns))
    calls, failed = [], {}
    for engine in engines:
        try:
            call, y = call_of(engine, x)
            if y.shape != (len(x), outputs):
                raise EngineError(f"another product: of shape {list(y.shape)}, not {[len(x), outputs]}")
            off = np.abs(y[:, : columns.shape[1]].astype(np.float64) - exact) / np.maximum(most, 1e-300)
            if not off.max() <= 1:
                raise EngineError(f"another product: {off.max():.3g} times what rounding in {dtype} explains")
            calls.append((engine, call))
        except EngineError as error:
            if engine.name == OURS:
                raise BenchError(f"our own product by {engine.kernel}: {error}; see lut4tool selftest") from error
            failed[engine.name] = str(error)
    return calls, failed


# -- time


def _in_turns(calls: Mapping[str, Call], seconds: float, cold: bool) -> dict[str, list[float]]:
    """Milliseconds of each engine, one run each a turn; each has made its product before."""
    evict = np.zeros(_evicted_bytes() // 8) if cold else None
    taken: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    while len(taken[OURS]) < 5 or time.perf_counter() - start < seconds:
        for name, call in calls.items():
            if evict is not None:
                np.add(evict, 1, out=evict)
            begin = time.perf_counter()
            call()
            taken[name].append(1e3 * (time.perf_counter() - begin))
    return taken


def _timings(
    shape: Shape, m: int, cold: bool, taken: Mapping[str, list[float]], engines: Sequence[Engine]
) -> Iterator[Timing]:
    for engine in engines:
        times = taken[engine.name]
        ratio = statistics.median(ours / it for ours, it in zip(taken[OURS], times, strict=True))
        over = None if engine.name == OURS else ratio
        yield Timing(shape, m, cold, engine.name, engine.kernel, min(times), statistics.median(times), over)


def _bandwidth(threads: int) -> float:
    """Gigabytes a second that all threads together read from memory: the best of some passes over a large array."""
    data = np.ones(_evicted_bytes() // 8)
    parts, best = np.array_split(data, threads), 0.0
    for _ in range(5):
        readers = [threading.Thread(target=part.max) for part in parts]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def _device_bandwidth(device: str) -> float:
    """Gigabytes a second that a GPU reads and writes while it copies: the best of some passes over 512 MB."""
    best, steps = 0.0, 4
    with mx.stream(backend.device(device)):
        data = mx.zeros(_COPIED // 4, mx.float32)
        mx.eval(data)
        for _ in range(8):
            start, copy = time.perf_counter(), data
            for _ in range(steps):
                copy = copy + 1.0
            mx.eval(copy)
            best = max(best, 2 * steps * data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def _evicted_bytes() -> int:
    """Twice the last cache where Linux says how large it is, within bounds."""
    sizes = [_bytes(file.read_text()) for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return int(np.clip(2 * max(sizes, default=0), *_EVICT))


def _bytes(text: str) -> int:
    """A size as Linux writes it, such as 2048K."""
    return int(text.strip().rstrip("K")) * 1024
