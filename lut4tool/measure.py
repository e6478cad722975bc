"""Measuring a model in an engine, in a process of its own: outputs, times, peak memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lut4tool.errors import Lut4Error

#: The engines: our Runtime, and onnxruntime as it comes, without constant folding, without any optimization.
LUT4TOOL = "lut4tool"
ONNXRUNTIME = "onnxruntime"
FOLDING_OFF = "onnxruntime, no constant folding"
OPTIMIZATIONS_OFF = "onnxruntime, no optimizations"
ENGINES = (LUT4TOOL, ONNXRUNTIME, FOLDING_OFF, OPTIMIZATIONS_OFF)

_THREADS = 2

#: What a loader returns: names of the outputs, a function that runs, and the kernels that serve, in words.
_Loaded = tuple[list[str], Callable[[dict[str, np.ndarray]], list[np.ndarray]], list[str]]


class MeasureError(Lut4Error):
    """A model that could not be loaded or run in an engine."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What one process did: medians in milliseconds, memory in bytes, outputs by name, kernels as "node: kernel"."""

    load_milliseconds: float
    run_milliseconds: float
    peak_bytes: int
    model_bytes: int  # of the peak, what was not there before the model was loaded
    kernels: tuple[str, ...]
    outputs: Mapping[str, np.ndarray]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain lists, numbers and strings, without the outputs."""
        return {key: value for key, value in vars(self).items() if key != "outputs"} | {"kernels": list(self.kernels)}


def difference(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Largest |difference| of any output over the largest magnitude of that output; NaN where either has one."""
    ratios = [0.0]
    for name, wanted in expected.items():
        wide = wanted.astype(np.float64)
        largest = np.abs(outputs[name].astype(np.float64) - wide).max(initial=0)
        ratios.append(largest / max(np.abs(wide).max(initial=0), np.finfo(np.float64).tiny))
    return float(np.max(ratios))


def measure(model: Path, feeds: Mapping[str, np.ndarray], engine: str, runs: int = 5) -> Measured:
    """Load a model in a process of its own, run it once and then `runs` times, and return what that took and gave.

    engine: one of ENGINES; onnxruntime has two threads. Types are NumPy's own (an npz file carries them).
    Raises MeasureError, with the process's last line, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, results = Path(folder, "inputs.npz"), Path(folder, "results.npz")
        np.savez(inputs, **feeds)  # type: ignore[arg-type]
        command = [sys.executable, "-m", "lut4tool.measure", str(model), str(inputs), engine, str(results), str(runs)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise MeasureError(f"{model.name} failed in {engine}: {last}")
        with np.load(results) as saved:
            outputs = {name: saved[name] for name in saved.files}
    facts = json.loads(str(outputs.pop("facts of the process")))
    return Measured(**facts | {"kernels": tuple(facts["kernels"])}, outputs=outputs)


def _measure_here(model: str, inputs: str, engine: str, results: str, runs: int) -> None:
    """What the process of `measure` does."""
    with np.load(inputs) as saved:
        feeds = {name: saved[name] for name in saved.files}
    load = _loader(engine)
    before = _memory("VmRSS")
    start = time.perf_counter()
    names, run, kernels = load(model)
    loaded = time.perf_counter()
    outputs = run(feeds)  # the first run also builds kernels: it is not timed
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run(feeds)
        times.append(1000 * (time.perf_counter() - begin))
    peak = _memory("VmHWM")
    facts = {
        "load_milliseconds": 1000 * (loaded - start),
        "run_milliseconds": statistics.median(times),
        "peak_bytes": peak,
        "model_bytes": max(peak - before, 0),
        "kernels": kernels,
    }
    values = {"facts of the process": np.array(json.dumps(facts)), **dict(zip(names, outputs, strict=True))}
    np.savez(results, **values)  # type: ignore[arg-type]


def _loader(engine: str) -> Callable[[str], _Loaded]:
    """Import an engine, so that this is not counted, and return what loads a model in it."""
    return _load_ours() if engine == LUT4TOOL else _load_onnxruntime(engine)


def _load_ours() -> Callable[[str], _Loaded]:
    from lut4tool.runtime.session import Runtime

    def load(path: str) -> _Loaded:
        runtime = Runtime(path)
        names = [value.name for value in runtime.get_outputs()]
        kernels = [f"{node}: {choice}" for node, choice in runtime.kernels.items()]
        return names, lambda feeds: runtime.run(None, feeds), kernels

    return load


def _load_onnxruntime(engine: str) -> Callable[[str], _Loaded]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _THREADS
    options.log_severity_level = 3
    if engine == OPTIMIZATIONS_OFF:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    disabled = ["ConstantFolding"] if engine == FOLDING_OFF else []

    def load(path: str) -> _Loaded:
        session = onnxruntime.InferenceSession(path, options, disabled_optimizers=disabled)
        return [value.name for value in session.get_outputs()], lambda feeds: session.run(None, feeds), []

    return load


def _memory(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the peak) of this process; elsewhere than on Linux the peak for both."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent: a child inherits its peak
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    _measure_here(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    sys.stdout.flush()
    os._exit(0)  # what an engine does at exit is no part of the measurement
