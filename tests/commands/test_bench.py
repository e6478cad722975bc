"""The benchmark of one product: what is timed and compared, and what the command prints; no times are held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lut4tool import cli, native
from lut4tool.bench import BenchError, Shape, bench, shapes_of
from tests.products import lookup4, product_model, qmm

ROOT = Path(__file__).parents[2]
SHAPES = [Shape(96, 64, 32), Shape(96, 64, 32, transposed=False), Shape(96, 64, 32, affine=True), Shape(5, 33, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_engine_takes_its_turns(shape: Shape) -> None:
    pytest.importorskip("onnxruntime", reason="its kernels are what is compared with")
    result = bench([shape], [1, 3], "cpu", seconds=0)
    engines = {"lut4tool", "dense", "onnxruntime dense", "floor"}
    engines |= set() if shape.affine else {"decode + dense"}
    engines |= {"onnxruntime MatMulNBits"} if shape.affine else set()
    engines |= {"onnxruntime MatMulBnb4"} if shape == SHAPES[0] else set()
    for m in (1, 3):
        rows = {timing.engine: timing for timing in result.timings if timing.m == m}
        assert set(rows) == engines
        assert all(0 < timing.best <= timing.median for timing in rows.values())
        ratios = {name for name, timing in rows.items() if timing.ours_over_it is not None}
        assert ratios == engines - {"lut4tool", "floor"}
        served = f"cpu {native.product_instruction_set()}" if native.compiled() else "reference"
        assert rows["lut4tool"].kernel == served
        blocks = 96 * 2 if shape != SHAPES[3] else 28
        packed = 96 * 32 if shape != SHAPES[3] else 83
        assert rows["floor"].best == pytest.approx((packed + 4 * blocks) / result.bandwidth / 1e6)


def test_cold_runs_stand_beside_hot_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lut4tool.bench._EVICT", (1 << 16, 1 << 16))
    result = bench(SHAPES[:1], [1, 5], "cpu", seconds=0, cold=True)
    assert {(timing.m, timing.cold) for timing in result.timings} == {(1, False), (1, True), (5, False)}


def test_the_shapes_of_a_model_are_its_products() -> None:
    weight, affine = lookup4(64, 96, 32), qmm(24, 64, 32)
    leaves = {"packed": weight.packed, "scales": weight.scales, "codebook": weight.codebook}
    model = product_model("Lookup4MatMul", leaves, weight.attributes("float32"), "float32")
    assert shapes_of(model) == [Shape(96, 64, 32, transposed=False)]
    leaves = {"packed": affine.packed, "scales": affine.scales, "zero_points": affine.zero_points}
    assert shapes_of(product_model("QMM", leaves, affine.attributes("float32"), "float32")) == [
        Shape(24, 64, 32, affine=True)
    ]
    with pytest.raises(BenchError, match="the model has no 4-bit product"):
        shapes_of(product_model("Relu", {}, {}, "float32"))


def test_the_standard_shapes_are_those_of_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def timed(shapes: list[Shape], rows: list[int], *rest: object) -> object:
        asked.extend((shapes, rows))
        raise BenchError("that will do")

    monkeypatch.setattr("lut4tool.bench.bench", timed)
    done = CliRunner().invoke(cli.app, ["bench", "--shape", "standard", "--shape", "8,32,16", "--m", "standard"])
    assert done.exit_code != 0
    sizes = [(14336, 4096), (4096, 4096), (4096, 11008), (6656, 19968)]
    assert asked == [[*(Shape(n, k) for n, k in sizes), Shape(8, 32, 16)], [1, 16, 128, 256, 512]]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "lut4tool.cli", "bench", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_one_document_or_a_table() -> None:
    done = command("--shape", "96,64,32", "--m", "1,2", "--device", "cpu", "--seconds", "0", "--json")
    document = json.loads(done.stdout)
    assert {(row["N"], row["K"], row["m"]) for row in document["timings"]} == {(96, 64, 1), (96, 64, 2)}
    assert document["machine"]["device"] == "cpu"
    done = command("--shape", "96,64", "--m", "1", "--device", "cpu", "--seconds", "0")
    assert "96 x 64, block 64, W [N, K]" in done.stdout


@pytest.mark.parametrize(
    "arguments", [[], ["--shape", "96"], ["--shape", "96,64", "--m", "0"], ["x", "--shape", "1,2"]]
)
def test_arguments_that_say_nothing_to_time_are_usage_errors(arguments: list[str]) -> None:
    assert command(*arguments).returncode == 2
