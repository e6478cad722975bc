"""Time and peak memory of `lut4tool rewrite`, a whole process each: start-up, witness and saving included.

    python benchmarks/rewrite.py [megabytes ...]

Models are stacks of 4096 x 1536 NF4 projections (3.5 MB packed each), inline and with external data. The floor is the
peak of `lut4tool rewrite --help`; `x file` is the peak above it in units of the model's own bytes (imports of onnx,
onnx.reference and onnxscript are about 80 MB of it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this process stays small: a child's peak begins with its parent's size
    import onnx

ROWS, COLS, BLOCK = 4096, 1536, 64


def stack(megabytes: float) -> onnx.ModelProto:
    """A model of so many packed megabytes: each projection reads the same input."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from onnx import TensorProto, helper

    from build import Chain, spell

    blocks = ROWS * COLS // BLOCK
    count = max(1, round(megabytes * 1e6 / (blocks * (BLOCK // 2 + 4))))
    nodes, tensors, outputs = [], {}, []
    for index in range(count):
        parts = spell(Chain(rows=ROWS, cols=COLS, block=BLOCK, perm="written", prefix=f"p{index}/", seed=index))
        nodes += [*parts.nodes, helper.make_node("MatMul", ["x", parts.weight], [f"y{index}"], f"MatMul{index}")]
        tensors |= {tensor.name: tensor for tensor in parts.tensors}
        outputs.append(helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, ["batch", ROWS]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", COLS])
    graph = helper.make_graph(nodes, "stack", [x], outputs, list(tensors.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(arguments: list[str]) -> tuple[float, float, str]:
    """Run a command; return its seconds, its peak resident megabytes and its output."""
    start = time.perf_counter()
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, error = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit {process.returncode}: {error}")
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return seconds, usage.ru_maxrss / scale, output


def write(path: str, megabytes: str, external: str) -> None:
    """Build a model and save it; runs in a process of its own."""
    import onnx

    data = {"save_as_external_data": True, "location": "weights.bin"} if external == "external" else {}
    onnx.save(stack(float(megabytes)), path, **data)


def main() -> None:
    """Print one row a model."""
    sizes = sys.argv[1:] or ["12", "100", "400"]
    command = [sys.executable, "-m", "lut4tool.cli", "rewrite"]
    _, floor, _ = measure([*command, "--help"])
    print(f"floor (--help): {floor:.0f} MB")
    print(f"{'model':>18} {'file MB':>8} {'seconds':>8} {'peak MB':>8} {'x file':>7}  witness")
    for megabytes in sizes:
        for kind in ("inline", "external"):
            with tempfile.TemporaryDirectory() as scratch:
                source, target = f"{scratch}/in.onnx", f"{scratch}/out.onnx"
                measure([sys.executable, __file__, "--write", source, megabytes, kind])
                size = sum(path.stat().st_size for path in Path(scratch).iterdir()) / 1e6
                for flags in ([], ["--verify"]):
                    seconds, peak, output = measure([*command, source, target, "--json", "--force", *flags])
                    witness = json.loads(output)["rewritten"][0]["witness"]
                    print(
                        f"{' '.join([kind, *flags]):>18} {size:8.1f} {seconds:8.2f} {peak:8.0f}"
                        f" {(peak - floor) / size:7.2f}  {witness['compared']} of {witness['elements']}"
                    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(*sys.argv[2:])
    else:
        main()
