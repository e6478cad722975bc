"""A large 4-bit weight on its way to a GPU: memory of the host and of the device until it has served one row.

    python benchmarks/upload_gpu.py --gibibytes 2

One process a row: W [N, K] and W [K, N], x in bfloat16 and float32, then `lut4tool run` on the first of them. Columns:
seconds, MB of the device (what stays, at the peak), MB of the host at the peak (anonymous, of files, all).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from scale import measure

BLOCK, COLUMNS = 64, 1 << 15
FIELDS = ("RssAnon", "RssFile", "VmRSS")


def make(folder: Path, gibibytes: float) -> None:
    """A model for each way, all on the same packed data: W of COLUMNS columns and random codes."""
    rows = int(gibibytes * 2**31) // COLUMNS
    rng = np.random.default_rng(0)
    with (folder / "weights.bin").open("wb") as file:
        for _ in range(rows * COLUMNS >> 23):
            file.write(rng.bytes(1 << 22))
        scales = file.tell()
        file.write((rng.random(rows * COLUMNS // BLOCK, np.float32) + 0.5).data)
    for kind, number in (("bfloat16", TensorProto.BFLOAT16), ("float32", TensorProto.FLOAT)):
        for perm in ([1, 0], [0, 1]):
            depth = COLUMNS if perm == [1, 0] else rows
            node = helper.make_node(
                "Lookup4MatMul", ["x", "packed", "scales", "codebook"], ["y"], "product", domain="ai.lut4tool",
                rows=rows, cols=COLUMNS, block_size=BLOCK, perm=perm, high_nibble_first=1, weight_dtype=number,
                dtype=number,
            )  # fmt: skip
            leaves = [
                _external("packed", TensorProto.UINT8, [scales], 0, scales),
                _external("scales", TensorProto.FLOAT, [scales * 2 // BLOCK], scales, scales * 8 // BLOCK),
                helper.make_tensor("codebook", TensorProto.FLOAT, [16], np.linspace(-1, 1, 16, dtype=np.float32)),
            ]
            graph = helper.make_graph(
                [node], "g",
                [helper.make_tensor_value_info("x", number, ["M", depth])],
                [helper.make_tensor_value_info("y", number, None)], leaves,
            )  # fmt: skip
            opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.lut4tool", 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
            (folder / f"{kind}-{perm[0]}{perm[1]}.onnx").write_bytes(model.SerializeToString())


def _external(name: str, kind: int, dims: list[int], offset: int, length: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def memory() -> dict[str, int]:
    """Kilobytes of this process now, by FIELDS."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {field: int(rows[field].split()[0]) for field in FIELDS}


def watch(most: dict[str, int], done: threading.Event) -> None:
    """Keep the largest of each until it is over."""
    while not done.wait(0.002):
        for field, value in memory().items():
            most[field] = max(most[field], value)


def one(path: Path) -> dict[str, Any]:
    """Plan and run one row in this process."""
    from lut4tool.runtime import Runtime
    from lut4tool.runtime.backend import mx

    mx.eval(mx.zeros(8) + 1)  # the device's own start is none of the weight's
    before, done = memory(), threading.Event()
    most, held = dict(before), mx.get_active_memory()
    mx.reset_peak_memory()
    watcher = threading.Thread(target=watch, args=(most, done))
    watcher.start()
    start = time.perf_counter()
    runtime = Runtime(path)
    planned = time.perf_counter() - start
    (given,) = runtime.get_inputs()
    x = np.ones((1, int(given.shape[1])), np.float32)
    (y,) = runtime.run(None, {"x": x.astype("bfloat16") if "bfloat16" in path.name else x})
    done.set()
    watcher.join()
    return {
        "kernel": ", ".join(choice.name for choice in runtime.kernels.values()),
        "seconds": planned,
        "device": [(mx.get_active_memory() - held) / 1e6, (mx.get_peak_memory() - held) / 1e6],
        "host": [(most[field] - before[field]) / 1e3 for field in FIELDS],
        "finite": bool(np.isfinite(y.astype(np.float32)).all()),
    }


def main() -> None:
    """Make the models, then measure each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gibibytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where the files are made, or lie already")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import ml_dtypes  # noqa: F401 - NumPy then knows bfloat16 by name

        print(json.dumps(one(options.one)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if not (folder / "weights.bin").exists():
            folder.mkdir(exist_ok=True)
            make(folder, options.gibibytes)
        print(f"{'':<24}{'seconds':>8}{'stays':>9}{'peak':>9}{'anon':>9}{'files':>9}{'all':>9}  kernel")
        for path in sorted(folder.glob("*.onnx"), reverse=True):
            command = [sys.executable, __file__, "--one", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{path.stem:<24}{done.stderr.strip().splitlines()[-1][:200]}", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            numbers = "".join(f"{value:9.0f}" for value in (*row["device"], *row["host"]))
            print(f"{path.stem:<24}{row['seconds']:8.2f}{numbers}  {row['kernel']} finite={row['finite']}", flush=True)
        model = str(folder / "float32-10.onnx")
        try:
            cost = measure([sys.executable, "-m", "lut4tool.cli", "run", model, "--random"])
            print(f"run: {cost.seconds:.2f} s, {cost.peak:.0f} MB resident, {cost.anonymous:.0f} MB of it anonymous")
        except SystemExit as error:
            print(f"run: {str(error)[-300:]}")


if __name__ == "__main__":
    main()
