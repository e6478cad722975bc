"""The benchmark of one product: what is timed and compared, and what the command prints; no times are held."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from build_nbits import nbits
from typer.testing import CliRunner

from build import build
from lut4tool import bench as benching
from lut4tool import cli, native
from lut4tool.bench import BenchError, Shape, Timing, bench, shapes_of
from lut4tool.formats import NF4
from lut4tool.storage import Tensors
from tests.products import lookup4, product_model, qmm

ROOT = Path(__file__).parents[2]
SHAPES = [Shape(96, 64, 32), Shape(96, 64, 32, transposed=False), Shape(96, 64, 32, affine=True), Shape(5, 33, 6)]
LOOKUP = {"lut4tool", "dense", "decode + dense", "onnxruntime dense", "floor"}
ENGINES = [
    LOOKUP | {"onnxruntime MatMulBnb4"},
    LOOKUP,
    {"lut4tool", "dense", "onnxruntime dense", "onnxruntime MatMulNBits", "floor"},
    LOOKUP,
]


def by_engine(timings: list[Timing], m: int) -> dict[str, Timing]:
    return {timing.engine: timing for timing in timings if timing.m == m and timing.engine != "bitsandbytes"}


@pytest.mark.parametrize(("shape", "engines"), list(zip(SHAPES, ENGINES, strict=True)), ids=map(str, SHAPES))
def test_every_engine_takes_its_turns(shape: Shape, engines: set[str]) -> None:
    pytest.importorskip("onnxruntime", reason="its kernels are what is compared with")
    result = bench([shape], [1, 3], "cpu", seconds=0)
    for m in (1, 3):
        rows = by_engine(result.timings, m)
        assert set(rows) == engines
        assert all(0 < timing.best <= timing.median for timing in rows.values())
        ratios = {name for name, timing in rows.items() if timing.ours_over_it is not None}
        assert ratios == engines - {"lut4tool", "floor"}
        served = f"cpu {native.product_instruction_set()}" if native.compiled() else "reference"
        assert rows["lut4tool"].kernel == served
        blocks = 96 * 2 if shape != SHAPES[3] else 28
        packed = 96 * 32 if shape != SHAPES[3] else 83
        assert rows["floor"].best == pytest.approx((packed + 4 * blocks) / result.bandwidth / 1e6)
    assert result.timed == "wall time of a run, NumPy in and out"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_are_timed_in_their_own_type(shape: Shape, dtype: str) -> None:
    result = bench([shape], [1], "cpu", seconds=0, dtype=dtype)
    assert set(by_engine(result.timings, 1)) == {"lut4tool", "dense", "floor"}
    reasons = {missing.engine: missing.reason for missing in result.missing}
    assert reasons["onnxruntime"] == "timed on a CPU in float32 only"
    assert ("decode + dense" in reasons) == (not shape.affine)


def test_on_a_gpu_the_runs_are_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that a GPU gets, made on this machine's CPU by MLX."""
    for part in ("engines", "bench"):
        monkeypatch.setattr(f"lut4tool.{part}.kind_of", lambda device: "cuda")
    monkeypatch.setattr("lut4tool.bench._COPIED", 1 << 20)
    result = bench(SHAPES[:3], [1, 3], "cpu", seconds=0)
    assert set(by_engine(result.timings[:8], 1)) == {"lut4tool", "dense", "decode + dense", "floor"}
    assert result.bandwidth > 0
    assert "MLX's evaluation" in result.timed
    assert {(m.engine, m.reason) for m in result.missing} >= {("onnxruntime", "timed on a CPU in float32 only")}
    with pytest.raises(BenchError, match="cold runs are timed on a CPU only"):
        bench(SHAPES[:1], [1], "cpu", cold=True)


# -- bitsandbytes


class Tensor:
    """As much of torch's as is used, over NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.reshape = lambda *shape: Tensor(array.reshape(*shape))
        self.t = lambda: Tensor(array.T)
        self.to = self.float = self.cpu = lambda *_: self
        self.numpy = lambda: array


class QuantState:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


def matmul_4bit(A: Tensor, B: Tensor, quant_state: QuantState) -> Tensor:
    """What bitsandbytes documents: the high nibble first, a scale for each block of the flat [N, K] weight."""
    packed = B.array.reshape(-1)
    codes = np.stack((packed >> 4, packed & 15), 1).reshape(-1)[: np.prod(quant_state.shape)]
    scales = np.repeat(quant_state.absmax.array, quant_state.blocksize)[: codes.size]
    return Tensor(A.array @ (quant_state.code.array[codes] * scales).reshape(quant_state.shape).T)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Modules that stand for torch and bitsandbytes, which are not installed in development."""

    def module(name: str, **contents: Any) -> types.ModuleType:
        made = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    threads: list[int] = []
    torch = module(
        "torch",
        __version__="9.9",
        from_numpy=Tensor,
        device=str,
        Size=tuple,
        float32="float32",
        set_num_threads=threads.append,
        no_grad=contextlib.nullcontext,
        cuda=types.SimpleNamespace(is_available=lambda: False),
    )
    functional = types.SimpleNamespace(QuantState=QuantState, get_4bit_type=lambda *_, **__: Tensor(NF4))
    library = module("bitsandbytes", __version__="7.7", functional=functional, matmul_4bit=matmul_4bit)
    return types.SimpleNamespace(torch=torch, library=library, threads=threads)


def bitsandbytes_of(*shapes: Shape, **options: Any) -> tuple[list[Timing], list[str]]:
    """Its times, and why it has none."""
    result = bench(shapes, [1, 3], "cpu", seconds=0, **options)
    reasons = [missing.reason for missing in result.missing if missing.engine == "bitsandbytes"]
    return [timing for timing in result.timings if timing.engine == "bitsandbytes"], reasons


def test_bitsandbytes_makes_the_same_product_with_as_many_threads(fakes: types.SimpleNamespace) -> None:
    timings, reasons = bitsandbytes_of(Shape(96, 64, 32), Shape(5, 33, 64))
    assert [(timing.shape.N, timing.m, timing.kernel) for timing in timings] == [
        (n, m, "7.7, torch 9.9") for n in (96, 5) for m in (1, 3)
    ]
    assert all(timing.ours_over_it for timing in timings)
    assert reasons == []
    assert set(fakes.threads) == {native.thread_count()}


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (SHAPES[1], "it multiplies by weights that lie as [N, K] only"),
        (SHAPES[2], "it has no affine weights"),
        (SHAPES[3], "its blocks are powers of two from 32 to 4096, not 6"),
    ],
    ids=str,
)
def test_what_bitsandbytes_does_not_have_is_said(fakes: types.SimpleNamespace, shape: Shape, reason: str) -> None:
    assert bitsandbytes_of(shape) == ([], [reason])


def test_a_peer_that_is_wrong_or_fails_is_not_timed(
    fakes: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fakes.library.matmul_4bit
    fakes.library.matmul_4bit = lambda A, B, quant_state: Tensor(1.01 * right(A, B, quant_state).array)
    timings, reasons = bitsandbytes_of(SHAPES[0])
    assert timings == []
    assert all(reason.startswith("another product: ") and "rounding in float32" in reason for reason in reasons)
    assert reasons
    fakes.library.matmul_4bit = lambda A, B, quant_state: Tensor(right(A, B, quant_state).array[:, 1:])
    assert bitsandbytes_of(SHAPES[0])[1][0] == "another product: of shape [1, 95], not [1, 96]"
    fakes.library.matmul_4bit = lambda *_, **__: 1 / 0
    assert bitsandbytes_of(SHAPES[0]) == ([], ["failed: ZeroDivisionError: division by zero"])
    monkeypatch.setattr("lut4tool.engines.kind_of", lambda device: "cuda")
    assert bitsandbytes_of(SHAPES[0]) == ([], ["the torch that is installed sees no CUDA device"])
    monkeypatch.setattr("lut4tool.engines.kind_of", lambda device: "metal")
    assert bitsandbytes_of(SHAPES[0]) == ([], ["timed on a CPU and with CUDA only"])


def test_our_own_product_must_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = benching._columns
    monkeypatch.setattr("lut4tool.bench._columns", lambda weight: 1.01 * columns(weight))
    with pytest.raises(BenchError, match=r"our own product by .* another product: .* selftest"):
        bench(SHAPES[:1], [1], "cpu", seconds=0)


def test_a_peer_that_is_not_installed_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = {"onnxruntime", "bitsandbytes"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else find(name, *rest))
    result = bench(SHAPES[:2], [1], "cpu", seconds=0)
    assert {(missing.engine, missing.reason) for missing in result.missing} == {(n, "not installed") for n in absent}
    assert set(by_engine(result.timings[:4], 1)) == {"lut4tool", "dense", "decode + dense", "floor"}
    done = CliRunner().invoke(cli.app, ["bench", "--shape", "96,64", "--m", "1", "--device", "cpu", "--seconds", "0"])
    assert "\nbitsandbytes: not installed\n" in done.stdout
    absent.remove("bitsandbytes")
    absent.add("torch")
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    sys.modules["bitsandbytes"].__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    assert bitsandbytes_of(SHAPES[0])[1] == ["torch, which it needs, is not installed"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bitsandbytes_itself(dtype: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes and torch, which are no dependency, are not installed")
    timings, reasons = bitsandbytes_of(Shape(96, 64, 32), Shape(33, 192, 64), dtype=dtype)
    assert (len(timings), reasons) == (4, [])
    assert all("torch" in timing.kernel for timing in timings)


# -- shapes and the command


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


def test_shapes_of_vendors_nodes_and_of_external_literals(tmp_path: Path) -> None:
    assert shapes_of(nbits()[0])[0].affine
    model = build(rows=12, cols=10, block=8).model
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert shapes_of(model, Tensors(tmp_path)) == [Shape(10, 12, 8, transposed=False)]
    (tmp_path / "w.bin").unlink()
    with pytest.raises(BenchError, match=r"no 4-bit product that is proved: .* file 'w.bin', cannot be read"):
        shapes_of(model, Tensors(tmp_path))


def test_sizes_over_the_limits_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lut4tool.engines.MOST_DENSE_BYTES", 4 * 96 * 64 - 1)
    result = bench(SHAPES[:3], [1], "cpu", seconds=0)
    dense = {missing.engine for missing in result.missing if "of dense weight, over" in missing.reason}
    assert dense == {"dense", "decode + dense", "onnxruntime dense"}
    assert not {timing.engine for timing in result.timings} & dense
    with pytest.raises(BenchError, match=r"1000000 x 1000000, .* over half of this machine's"):
        bench([Shape(1_000_000, 1_000_000)], [1], "cpu")
    with pytest.raises(BenchError, match="M 9999999999, would take"):
        bench(SHAPES, [1, 9_999_999_999], "cpu")
    with pytest.raises(BenchError, match="there is no type 'int8' of x"):
        bench(SHAPES, [1], "cpu", dtype="int8")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "lut4tool.cli", "bench", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_one_document_or_a_table() -> None:
    done = command("--shape", "96,64,32", "--m", "1,2", "--device", "cpu", "--seconds", "0", "--json")
    document = json.loads(done.stdout)
    assert {(row["N"], row["K"], row["m"]) for row in document["timings"]} == {(96, 64, 1), (96, 64, 2)}
    assert document["machine"]["device"] == "cpu"
    assert "imported before" not in document["machine"]["blas_reason"]  # or dense products would be slow
    done = command("--shape", "96,64", "--m", "1", "--device", "cpu", "--seconds", "0")
    assert "96 x 64, block 64, W [N, K]" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--shape", "96"],
        ["--shape", "96,64", "--m", "0"],
        ["x", "--shape", "1,2"],
        ["--shape", "96,64,7"],
        ["--shape", "96,64", "--seconds", "-1"],
    ],
)
def test_arguments_that_say_nothing_to_time_are_usage_errors(arguments: list[str]) -> None:
    assert command(*arguments).returncode == 2
