"""Timing one 4-bit product beside its peers on this machine: dense, decode and dense, onnxruntime's kernels, the floor.

Everything that is compared runs in turns in one process, so that a busy machine slows all of it: trust the ratios.
Weights are random, as times do not depend on them. onnxruntime has as many threads as the native
kernels, and they do not spin.
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lut4tool import formats, native
from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN, LOOKUP4_MATMUL, QMM, Lookup4Weight, QmmWeight
from lut4tool.runtime import backend

OURS, DENSE, DECODE, FLOOR = "lut4tool", "dense", "decode + dense", "floor"
ORT_DENSE, ORT_BNB4, ORT_NBITS = "onnxruntime dense", "onnxruntime MatMulBnb4", "onnxruntime MatMulNBits"

#: N and K of what large language models multiply by, and the rows of x that they are timed with.
STANDARD, STANDARD_ROWS = ((14336, 4096), (4096, 4096), (4096, 11008), (6656, 19968)), (1, 16, 128, 256, 512)

#: A weight that would be larger once dense is not made dense.
MOST_DENSE_BYTES = 2 << 30
#: What is read between runs whose weights are to come from memory, at least and at most.
_EVICT = (64 << 20, 1 << 30)

Run = Callable[[np.ndarray], Any]


class BenchError(Lut4Error):
    """Nothing to time."""


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
    """Milliseconds of one engine at M rows of x, and its time over ours: the median of ratios of one turn each."""

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
class Bench:
    """What was timed on which machine; gigabytes a second that it reads from memory on all threads."""

    machine: Mapping[str, Any]
    threads: int
    bandwidth: float
    timings: Sequence[Timing]

    def to_json(self) -> dict[str, Any]:
        """The document of `bench --json`."""
        rows = [timing.to_json() for timing in self.timings]
        return {"machine": dict(self.machine), "threads": self.threads, "bandwidth": self.bandwidth, "timings": rows}


def bench(
    shapes: Sequence[Shape],
    rows: Sequence[int] = (1, 16, 128),
    device: str = "auto",
    seconds: float = 2.0,
    cold: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Bench:
    """Time each shape at each number of rows of x, float32, in turns for about `seconds` (at least five turns).

    cold: also with the caches emptied before each run, for up to 4 rows. Raises BenchError for sizes that cannot be.
    """
    if not shapes or not rows or any(m < 1 for m in rows):
        raise BenchError("bench needs a shape and numbers of rows of at least 1")
    threads, bandwidth = native.thread_count(), _bandwidth(native.thread_count())
    timings: list[Timing] = []
    for index, shape in enumerate(shapes):
        engines, kernel, packed_bytes = _engines(shape, device, threads)
        for m in rows:
            for emptied in (False, True) if cold and m <= 4 else (False,):
                taken = _in_turns(engines, np.random.default_rng(0).random((m, shape.K), np.float32), seconds, emptied)
                timings += _timings(shape, m, emptied, taken, kernel)
                floor = packed_bytes / bandwidth / 1e6
                timings.append(Timing(shape, m, emptied, FLOOR, "", floor, floor, None))
        if progress:
            progress("shapes", index + 1, len(shapes))
    return Bench(backend.describe(backend.device(device)), threads, bandwidth, timings)


def shapes_of(model: onnx.ModelProto) -> list[Shape]:
    """The different shapes of a model's 4-bit products: chains that are recognized, and nodes already rewritten."""
    from lut4tool.recognize import recognize

    products = [(proof.op, dict(proof.attributes)) for proof in recognize(model).proofs]
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in (LOOKUP4_MATMUL, QMM):
            products.append((node.op_type, {a.name: helper.get_attribute_value(a) for a in node.attribute}))
    if not products:
        raise BenchError("the model has no 4-bit product")
    return list(dict.fromkeys(_shape(op, attributes) for op, attributes in products))


def _shape(op: str, a: Mapping[str, Any]) -> Shape:
    if op == QMM:
        return Shape(a["N"], a["K"], a["block_size"], affine=True)
    transposed = list(a["perm"]) == [1, 0]
    n, k = (a["rows"], a["cols"]) if transposed else (a["cols"], a["rows"])
    return Shape(n, k, a["block_size"], transposed)


# -- engines


def _engines(shape: Shape, device: str, threads: int) -> tuple[dict[str, Run], str, int]:
    """What multiplies x by one weight, by name, ours first; our kernel; the bytes of the packed weight."""
    weight = _weight(shape)
    ours, kernel = _ours(weight, device)
    engines: dict[str, Run] = {OURS: ours}
    on_cpu = backend.kind(backend.device(device)) == "cpu"
    if 4 * shape.N * shape.K <= MOST_DENSE_BYTES:
        matrix = _dense(weight)
        engines[DENSE] = _runtime_of(_model("MatMul", "", {"w": matrix}, {}), device)[0]
        if isinstance(weight, Lookup4Weight) and on_cpu:
            engines[DECODE] = _decode_and_dense(weight)
        if on_cpu and importlib.util.find_spec("onnxruntime"):
            engines[ORT_DENSE] = _onnxruntime(_model("MatMul", "", {"w": matrix}, {}), threads)
    if on_cpu and importlib.util.find_spec("onnxruntime"):
        engines |= _onnxruntime_packed(weight, threads)
    return engines, kernel, weight.packed.nbytes + weight.scales.nbytes


def _weight(shape: Shape) -> Lookup4Weight | QmmWeight:
    rng = np.random.default_rng(0)
    if shape.affine:
        grid = (shape.N, -(-shape.K // shape.block_size))
        packed = rng.integers(0, 256, (*grid, shape.block_size // 2), dtype=np.uint8)
        scales = rng.random(grid, np.float32)
        return QmmWeight(packed, scales, np.full(grid, 8, np.uint8), shape.K, shape.N, shape.block_size)
    rows, cols = (shape.N, shape.K) if shape.transposed else (shape.K, shape.N)
    perm = (1, 0) if shape.transposed else (0, 1)
    packed = rng.integers(0, 256, (rows * cols + 1) // 2, dtype=np.uint8)
    scales = rng.random(-(-rows * cols // shape.block_size), np.float32)
    return Lookup4Weight(packed, scales, formats.NF4, rows, cols, shape.block_size, perm)


def _dense(weight: Lookup4Weight | QmmWeight) -> np.ndarray:
    """The matrix [K, N]."""
    if isinstance(weight, QmmWeight):
        return np.ascontiguousarray(native.decode_qmm(weight).T)
    elements = native.decode_elements(weight, 0, weight.rows * weight.cols)
    return np.ascontiguousarray(elements.reshape(weight.rows, weight.cols).transpose(weight.perm))


def _model(
    op: str, domain: str, leaves: Mapping[str, np.ndarray], attributes: Mapping[str, Any], version: int = 17
) -> onnx.ModelProto:
    node = helper.make_node(op, ["x", *leaves], ["y"], "product", domain=domain, **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(array, name) for name, array in leaves.items()]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", version), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _runtime_of(model: onnx.ModelProto, device: str) -> tuple[Run, str]:
    from lut4tool.runtime.session import Runtime

    runtime = Runtime(model, device)
    kernel = "".join(str(choice.name) for choice in runtime.kernels.values())
    return lambda x: runtime.run(None, {"x": x}), kernel


def _ours(weight: Lookup4Weight | QmmWeight, device: str) -> tuple[Run, str]:
    leaves = {"packed": weight.packed, "scales": weight.scales}
    if isinstance(weight, QmmWeight):
        name, leaves["zero_points"] = QMM, weight.zero_points
    else:
        name, leaves["codebook"] = LOOKUP4_MATMUL, weight.codebook
    return _runtime_of(_model(name, DOMAIN, leaves, weight.attributes("float32")), device)


def _decode_and_dense(weight: Lookup4Weight) -> Run:
    """The whole weight decoded in every run, then NumPy's product."""
    elements = np.empty(weight.rows * weight.cols, np.float32)
    matrix = elements.reshape(weight.rows, weight.cols).transpose(weight.perm)

    def run(x: np.ndarray) -> np.ndarray:
        native.decode_elements(weight, 0, elements.size, elements)
        product: np.ndarray = x @ matrix
        return product

    return run


def _onnxruntime(model: onnx.ModelProto, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})


def _onnxruntime_packed(weight: Lookup4Weight | QmmWeight, threads: int) -> dict[str, Run]:
    """The operator of onnxruntime on the same packed weight, where it has one for this layout."""
    size = weight.block_size
    if size < 16 or size & (size - 1):
        return {}
    if isinstance(weight, QmmWeight):
        zeros = np.full((weight.N, (weight.scales.shape[1] + 1) // 2), 0x88, np.uint8)
        leaves = {"b": weight.packed, "scales": weight.scales.reshape(-1), "zeros": zeros.reshape(-1)}
        sizes = {"K": weight.K, "N": weight.N, "bits": 4, "block_size": size, "accuracy_level": 0}
        return {ORT_NBITS: _onnxruntime(_model("MatMulNBits", "com.microsoft", leaves, sizes), threads)}
    if tuple(weight.perm) != (1, 0):
        return {}
    sizes = {"K": weight.cols, "N": weight.rows, "block_size": size, "quant_type": 1}
    leaves = {"b": weight.packed, "absmax": weight.scales}
    return {ORT_BNB4: _onnxruntime(_model("MatMulBnb4", "com.microsoft", leaves, sizes), threads)}


# -- time


def _in_turns(engines: Mapping[str, Run], x: np.ndarray, seconds: float, cold: bool) -> dict[str, list[float]]:
    """Milliseconds of each engine, one run each a turn."""
    evict = np.zeros(_evicted_bytes() // 8) if cold else None
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        run(x)
    start = time.perf_counter()
    while len(taken[OURS]) < 5 or time.perf_counter() - start < seconds:
        for name, run in engines.items():
            if evict is not None:
                np.add(evict, 1, out=evict)
            begin = time.perf_counter()
            run(x)
            taken[name].append(1e3 * (time.perf_counter() - begin))
    return taken


def _timings(shape: Shape, m: int, cold: bool, taken: Mapping[str, list[float]], kernel: str) -> Iterator[Timing]:
    for name, times in taken.items():
        ratio = statistics.median(ours / it for ours, it in zip(taken[OURS], times, strict=True))
        served = kernel if name == OURS else ""
        yield Timing(shape, m, cold, name, served, min(times), statistics.median(times), None if served else ratio)


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


def _evicted_bytes() -> int:
    """Twice the last cache where Linux says how large it is, within bounds."""
    sizes = [_bytes(file.read_text()) for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return int(np.clip(2 * max(sizes, default=0), *_EVICT))


def _bytes(text: str) -> int:
    """A size as Linux writes it, such as 2048K."""
    return int(text.strip().rstrip("K")) * 1024
