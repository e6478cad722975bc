"""The real models in lut4tool and in onnxruntime: float, and for the real cases also quantized and rewritten.

python benchmarks/real_models.py [NAME...] [--runs 20]

The aim: where onnxruntime takes 5 ms or more, 2 times its time in the geometric mean and never over 4; where it takes
less, 8 microseconds a node and 100 more.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from rich.console import Console
from rich.table import Table

from lut4tool.measure import FOLDING_OFF, LUT4TOOL, ONNXRUNTIME, Measured, difference, measure
from lut4tool.produce import quantize_file
from lut4tool.rewrite import rewrite
from lut4tool.runtime import Runtime
from lut4tool.runtime.profile import Profile
from lut4tool.storage import size_text
from models.feeds import feeds
from models.fetch import MODELS, fetch, light_models
from models.real_case import NAMES

LONG, TIMES, MEAN = 5.0, 4.0, 2.0  # milliseconds; times onnxruntime's, at most; the same in the geometric mean
NODE, CALL = 8e-3, 0.1  # milliseconds


@dataclass(frozen=True)
class Row:
    """One form of one model in both engines: nodes that a run executes, and what of it costs most."""

    name: str
    form: str
    size: int
    theirs: Measured
    ours: Measured
    nodes: int
    costliest: str

    @property
    def times(self) -> float:
        """Our time over onnxruntime's."""
        return self.ours.run_milliseconds / self.theirs.run_milliseconds

    @property
    def allowed(self) -> float:
        """Milliseconds that the aim gives us."""
        theirs = self.theirs.run_milliseconds
        return TIMES * theirs if theirs >= LONG else CALL + NODE * self.nodes

    def cells(self) -> list[str]:
        """What the table shows."""
        theirs, ours = self.theirs, self.ours
        return [
            self.name,
            self.form,
            size_text(self.size),
            f"{theirs.run_milliseconds:.2f}",
            f"{ours.run_milliseconds:.2f}",
            f"{self.times:.2f}",
            f"{1e3 * ours.run_milliseconds / self.nodes:.1f}",
            "yes" if ours.run_milliseconds <= self.allowed else f"no, {self.allowed:.2f}",
            size_text(theirs.peak_bytes),
            size_text(ours.peak_bytes),
            f"{difference(ours.outputs, theirs.outputs):.1e}",
            self.costliest,
        ]


HEADINGS = (
    "model, form, file, onnxruntime, lut4tool, times, us a node, aim met, peak, peak, difference, costliest operators"
)
LEFT = ("model", "form", "costliest operators")


def variants(name: str, folder: Path) -> list[tuple[str, Path, str]]:
    """The forms of a model to measure, and how onnxruntime runs each."""
    source = light_models().get(name) or fetch(name)
    rows = [("as it is", source, ONNXRUNTIME)]
    if name in NAMES:
        chains, packed = folder / f"{name}.nf4.onnx", folder / f"{name}.lut4.onnx"
        quantize_file(source, chains)
        rewrite(chains, packed)
        rows += [("NF4 chains", chains, ONNXRUNTIME), ("rewritten", packed, FOLDING_OFF)]
    return rows


def costs(path: Path, values: dict[str, Any]) -> tuple[int, str]:
    """How many nodes a run executes, and the three operators that take most of it, with their milliseconds."""
    runtime = Runtime(path)
    runtime.run(None, values)
    with Profile(runtime.plan) as profile:
        runtime.run(None, values)
    seconds: dict[str, float] = collections.defaultdict(float)
    for event in profile.events:
        if event.step.operator.name not in ("If", "Loop", "Scan"):  # what their bodies run is counted by itself
            seconds[event.step.operator.name] += event.seconds
    most = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    nodes = sum(1 + len(event.step.fused) for event in profile.events)
    return nodes, ", ".join(f"{op} {1e3 * cost:.2f}" for op, cost in most)


def measured(name: str, form: str, path: Path, engine: str, runs: int) -> Row:
    """Measure one form of a model in both engines."""
    values = feeds(name)
    theirs, ours = (measure(path, values, which, runs) for which in (engine, LUT4TOOL))
    return Row(name, form, path.stat().st_size, theirs, ours, *costs(path, values))


def main() -> None:
    """Measure, and print one table and what it comes to."""
    known = [*MODELS, *light_models()]
    parser = argparse.ArgumentParser(description="Time the real models in lut4tool and onnxruntime, two threads each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all where none is given")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each, after one that is not")
    chosen = parser.parse_args()
    table = Table(title="Median milliseconds of one run; lut4tool's times onnxruntime's; peak memory of each")
    for heading in HEADINGS.split(", "):
        table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names or known:
            for form, path, engine in variants(name, Path(folder)):
                rows.append(measured(name, form, path, engine, chosen.runs))
                table.add_row(*rows[-1].cells())
    console = Console(width=240, soft_wrap=True)
    console.print(table)
    missed = [f"{row.name} ({row.form})" for row in rows if row.ours.run_milliseconds > row.allowed]
    long = [row.times for row in rows if row.theirs.run_milliseconds >= LONG and row.form == "as it is"]
    if long:
        mean = statistics.geometric_mean(long)
        console.print(
            f"where onnxruntime takes {LONG:g} ms or more: {mean:.2f} times its time in the geometric mean of"
        )
        console.print(f"{len(long)} models as they are (aim {MEAN:g}), {max(long):.2f} at worst (aim {TIMES:g})")
    console.print(f"over their aim: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
