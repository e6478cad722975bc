"""On a GPU: models run step by step and with their regions compiled (mx.compile), in turns in one process.

python benchmarks/compile_gpu.py [NAME or FILE...] [--runs 30] [--tokens 64]

NAME: of the real models and onnx's light ones; or "decoder", generated, of eight layers, and "small-decoder", with
"-nf4" for 4-bit weights; FILE: a decoder with caches. Decoders generate a token a run, after a prompt of 16, with
Runtime.state. Times are of the last half of the runs; difference: the largest one over the largest value of an output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from lut4tool.produce import quantize_file
from lut4tool.rewrite import rewrite
from lut4tool.runtime import Runtime
from lut4tool.runtime.regions import SWITCH, Region
from models.feeds import feeds
from models.fetch import fetch, light_models
from tests import decoders

MODELS = ("ocr-recogniser", "ocr-classifier", "minilm-int8", "light-resnet50", "light-densenet121", "silero-vad")
DECODERS = {
    "small-decoder": {},
    "decoder": {"VOCABULARY": 8192, "WIDTH": 768, "HEADS": 12, "GROUPS": 4, "SIZE": 64, "LAYERS": 8},
}
PROMPT = 16

#: Runs a model once and returns its outputs as NumPy arrays.
Run = Callable[[], list[np.ndarray]]


@dataclass(frozen=True)
class Subject:
    """A model in both forms; `begin` gives what runs it, from the start of a generation where it is a decoder."""

    name: str
    path: Path
    begin: Callable[[Runtime], Run]
    runs: int


def subject(name: str, folder: Path, runs: int, tokens: int) -> Subject:
    """What a name or file stands for."""
    if name.removesuffix("-nf4") in DECODERS:
        return Subject(name, generated(name, folder), decoding, tokens)
    if Path(name).suffix == ".onnx":
        return Subject(Path(name).parent.name, Path(name), decoding, tokens)
    values = feeds(name)
    path = light_models().get(name) or fetch(name)
    return Subject(name, path, lambda runtime: lambda: runtime.run(None, values), runs)


def generated(name: str, folder: Path) -> Path:
    """A decoder with GroupQueryAttention, where asked with its weights as NF4 and rewritten."""
    for key, value in DECODERS[name.removesuffix("-nf4")].items():
        setattr(decoders, key, value)
    layers = range(decoders.LAYERS)
    decoders.CARRY = {f"past_{what}_{at}": f"present_{what}_{at}" for at in layers for what in ("key", "value")}
    path, chains, packed = (folder / f"{name}{end}.onnx" for end in ("", ".chains", ".packed"))
    onnx.save(decoders.decoder(decoders.gqa), path)
    if not name.endswith("-nf4"):
        return path
    quantize_file(path, chains)
    rewrite(chains, packed)
    return packed


def decoding(runtime: Runtime) -> Run:
    """One token a call after a prompt, the caches in a state."""
    inputs = {info.name: info for info in runtime.get_inputs()}
    outputs = {info.name for info in runtime.get_outputs()}
    names = {name: name.replace("past_key_values", "present").replace("past", "present") for name in inputs}
    carry = {name: source for name, source in names.items() if source in outputs and source != name}
    state, total, token = runtime.state(carry), 0, np.zeros((1, PROMPT), np.int64) + 5
    kinds = {name: np.int64 if "int64" in info.type else np.int32 for name, info in inputs.items()}

    def run() -> list[np.ndarray]:
        nonlocal total, token
        total += token.shape[1]
        positions = np.arange(total - token.shape[1], total)[None]
        given = {"input_ids": token, "attention_mask": np.ones((1, total)), "position_ids": positions}
        fed: Mapping[str, Any] = {name: given[name].astype(kinds[name]) for name in given if name in inputs}
        (logits,) = state.run(["logits"], fed)
        token = logits[:, -1].argmax(-1).reshape(1, 1)
        return [logits]

    return run


@dataclass
class Form:
    """One form of a model: its runtime, the milliseconds of each of its runs, what the last one gave."""

    runtime: Runtime
    run: Run
    milliseconds: list[float]
    results: list[np.ndarray]


def form(what: Subject, switch: str) -> Form:
    """A model with regions, or without."""
    os.environ[SWITCH] = switch
    runtime = Runtime(what.path)
    return Form(runtime, what.begin(runtime), [], [])


def measured(what: Subject) -> list[str]:
    """Run both forms in turns; return what the table shows."""
    forms = [form(what, "0"), form(what, "1")]
    worst = 0.0
    for _ in range(what.runs):
        for each in forms:
            start = time.perf_counter()
            each.results = each.run()
            each.milliseconds.append(1e3 * (time.perf_counter() - start))
        worst = max(worst, *map(difference, forms[0].results, forms[1].results))
    sizes = [len(steps) for graph in forms[1].runtime.plan.graphs() for steps in graph.regions()]
    steps, made = len(forms[1].runtime.plan.steps()), compilations(forms[1].runtime)
    before, after = (statistics.median(each.milliseconds[what.runs // 2 :]) for each in forms)
    early = " ".join(f"{cost:.0f}" for cost in forms[1].milliseconds[:6])
    return [
        what.name,
        str(steps),
        f"{sum(sizes)} in {len(sizes)}",
        str(made),
        f"{before:.2f}",
        f"{after:.2f}",
        f"{after / before:.2f}",
        f"{1e3 * before / steps:.1f}",
        f"{1e3 * after / steps:.1f}",
        f"{worst:.1e}",
        early,
    ]


def difference(mine: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference over the largest value."""
    if mine.shape != theirs.shape:
        return float("inf")
    gap = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
    return float(gap.max(initial=0) / max(np.abs(theirs.astype(np.float64)).max(initial=0), 1e-30))


def compilations(runtime: Runtime) -> int:
    """How many functions were compiled."""
    lines = [line for graph in runtime.plan.graphs() for line in graph.lines]
    total = 0
    while lines:
        call = lines.pop()[0]
        if isinstance(call, Region):
            total += call.compilations
            lines += call.lines
    return total


HEADINGS = (
    "model, steps, in regions, compiled, step by step, compiled, ratio, us a step, us a step, difference, first runs"
)


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description="Time models on a GPU step by step and compiled.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; a handful where none is given")
    parser.add_argument("--runs", type=int, default=30, help="runs of each form; the last half is timed")
    parser.add_argument("--tokens", type=int, default=64, help="the same for a decoder")
    chosen = parser.parse_args()
    table = Table(title="Median milliseconds of one run on a GPU, results as NumPy arrays")
    for heading in HEADINGS.split(", "):
        table.add_column(heading, justify="left" if heading in ("model", "first runs") else "right", no_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names or (*MODELS, *DECODERS, "decoder-nf4"):
            row = measured(subject(name, Path(folder), chosen.runs, chosen.tokens))
            print(*row, sep="  ", file=sys.stderr, flush=True)
            table.add_row(*row)
    Console(width=200, soft_wrap=True).print(table)


if __name__ == "__main__":
    main()
