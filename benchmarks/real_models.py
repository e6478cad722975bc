"""The real models in lut4tool and in onnxruntime: float, and for the real cases also quantized and rewritten.

python benchmarks/real_models.py [NAME...] [--runs 20]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from rich.console import Console
from rich.table import Table

from lut4tool.measure import FOLDING_OFF, LUT4TOOL, ONNXRUNTIME, difference, measure
from lut4tool.produce import quantize_file
from lut4tool.rewrite import rewrite
from lut4tool.storage import size_text
from models.feeds import feeds
from models.fetch import MODELS, fetch
from models.real_case import NAMES


def variants(name: str, folder: Path) -> list[tuple[str, Path, str]]:
    """The forms of a model to measure, and how onnxruntime runs each."""
    source = fetch(name)
    rows = [("float", source, ONNXRUNTIME)]
    if name in NAMES:
        chains, packed = folder / f"{name}.nf4.onnx", folder / f"{name}.lut4.onnx"
        quantize_file(source, chains)
        rewrite(chains, packed)
        rows += [("NF4 chains", chains, ONNXRUNTIME), ("rewritten", packed, FOLDING_OFF)]
    return rows


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description="Time the real models in lut4tool and onnxruntime, two threads each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all where none is given")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each, after one that is not")
    chosen = parser.parse_args()
    table = Table(title="Median of one run, and peak memory of the process; ratio: onnxruntime's time over lut4tool's")
    for heading in ("model", "form", "file", "onnxruntime", "peak", "lut4tool", "peak", "ratio", "difference"):
        table.add_column(heading, justify="right" if heading not in ("model", "form") else "left", no_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names or MODELS:
            for form, path, engine in variants(name, Path(folder)):
                theirs, ours = (measure(path, feeds(name), which, chosen.runs) for which in (engine, LUT4TOOL))
                table.add_row(
                    name,
                    form,
                    size_text(path.stat().st_size),
                    f"{theirs.run_milliseconds:.2f} ms",
                    size_text(theirs.peak_bytes),
                    f"{ours.run_milliseconds:.2f} ms",
                    size_text(ours.peak_bytes),
                    f"{theirs.run_milliseconds / ours.run_milliseconds:.2f}",
                    f"{difference(ours.outputs, theirs.outputs):.1e}",
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
