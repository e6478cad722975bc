"""Dense float32 products on this CPU: MLX as shipped, MLX over the BLAS that lut4tool loads, NumPy and onnxruntime.

Each runs in a process of its own, so that no library's threads or symbols reach another. Prints median milliseconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SHAPES = [(1, 4096, 4096), (32, 4096, 4096), (512, 4096, 4096)]


def mlx_product(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A product in MLX, over whatever BLAS the environment asks lut4tool for."""
    from lut4tool.runtime.backend import mx

    x, y = mx.array(a), mx.array(b)
    mx.eval(x, y)
    return lambda: mx.eval(mx.matmul(x, y, stream=mx.cpu))


def numpy_product(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A product in NumPy."""
    return lambda: a @ b


def onnxruntime_product(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    """A MatMul node in onnxruntime's CPU provider, both sides being inputs."""
    import onnxruntime
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, None]) for n in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"a": a, "b": b})


CASES: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Callable[[], Any]], dict[str, str]]] = {
    "mlx as shipped": (mlx_product, {"LUT4TOOL_BLAS": "none"}),
    "mlx with the BLAS": (mlx_product, {}),
    "numpy": (numpy_product, {}),
    "onnxruntime": (onnxruntime_product, {}),
}


def measure(case: str) -> list[float]:
    """Median milliseconds of each shape, at least three runs and about a second."""
    medians = []
    for rows, inner, columns in SHAPES:
        rng = np.random.default_rng(0)
        a, b = rng.random((rows, inner), np.float32), rng.random((inner, columns), np.float32)
        run = CASES[case][0](a, b)
        run()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < 1000 and len(times) < 50):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times))
    return medians


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    print("float32 product, ms".ljust(22) + "".join("x".join(map(str, shape)).rjust(16) for shape in SHAPES))
    for case, (_, environment) in CASES.items():
        command = [sys.executable, __file__, case]
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
        print(case.ljust(22) + "".join(f"{value:16.2f}" for value in json.loads(done.stdout)), flush=True)


if __name__ == "__main__":
    main()
