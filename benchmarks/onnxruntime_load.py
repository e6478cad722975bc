"""What onnxruntime takes to load chains, measured in a process of its own, beside what `inspect` predicts.

python benchmarks/onnxruntime_load.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

import onnx
from rich.console import Console
from rich.table import Table

from lut4tool.measure import ONNXRUNTIME, measure
from lut4tool.recognize.summary import summarize
from lut4tool.storage import Tensors, size_text
from tests.build import Built, Chain, build, build_many


def models() -> dict[str, Built]:
    """One chain of two sizes, one with casts and a Transpose, and two in one model."""
    return {
        "2048 x 2048": build(Chain(rows=2048, cols=2048, block=64)),
        "4096 x 4096": build(Chain(rows=4096, cols=4096, block=64)),
        "2048 x 2048, rounded, transposed": build(
            Chain(rows=2048, cols=2048, block=64, rounding="float16", adjoint=True, perm="written")
        ),
        "two of 2048 x 2048": build_many(
            [Chain(prefix="a/", rows=2048, cols=2048, block=64), Chain(prefix="b/", rows=2048, cols=2048, block=64)]
        ),
    }


def main() -> None:
    """Print the table."""
    table = Table(title="peak memory for the model while it is loaded", title_justify="left")
    for heading in ("weights", "predicted", "measured", "measured / predicted"):
        table.add_column(heading)
    with tempfile.TemporaryDirectory() as folder:
        for name, built in models().items():
            path = Path(folder, "m.onnx")
            onnx.save(built.model, path)
            predicted = summarize(built.model, path.stat().st_size, Tensors(folder)).to_json()["onnxruntime_bytes"]
            measured = measure(path, built.feeds, ONNXRUNTIME, runs=1).model_bytes
            table.add_row(name, size_text(predicted), size_text(measured), f"{measured / predicted:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
