"""What `inspect` says of 4-bit weights that no product reads, and of nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from build_affine import build_affine
from forms import FORMS, make
from forms_affine import AFFINE_FORMS, make_affine
from mutants import MUTANTS
from onnx import helper, numpy_helper

from build import build_calls
from lut4tool.recognize import recognize
from lut4tool.recognize.outside import outside
from lut4tool.recognize.proof import Refusal

CODES = np.random.default_rng(0).integers(0, 16, (8, 16))
UINT4, BYTES = CODES.astype(ml_dtypes.uint4), (CODES[:, ::2] | CODES[:, 1::2] << 4).astype(np.uint8)
SCALES = np.linspace(0.1, 1, 8, dtype=np.float32)


def said(nodes: list[onnx.NodeProto], tensors: dict[str, Any], opset: int = 21) -> tuple[Refusal, ...]:
    """What is said of a model with inputs x (floats) and ids."""
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()]
    inputs = [helper.make_tensor_value_info("x", 1, None), helper.make_tensor_value_info("ids", 7, None)]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], 1, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, held)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return of(helper.make_model(graph, opset_imports=imports))


def of(model: onnx.ModelProto, vendor: bool = False) -> tuple[Refusal, ...]:
    return outside(model, recognize(model, vendor=vendor))


def node(op: str, inputs: str, output: str, name: str = "", domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name or op, domain=domain, **attributes)


FOUND = {
    "a convolution": (
        [node("DequantizeLinear", "w s", "d", axis=0), node("Reshape", "d to", "k"), node("Conv", "x k", "y", "c1")],
        {"w": UINT4, "s": SCALES, "to": [8, 16, 1, 1]},
        "'w', UINT4 [8, 16], holds 4-bit codes that Conv reads; weights of MatMul, Gemm and FusedMatMul are kept"
        " packed, at node 'c1'",
    ),
    "an embedding": (
        [node("DequantizeLinear", "w s", "d", axis=0), node("Gather", "d ids", "y", "embed")],
        {"w": UINT4, "s": SCALES}, "that Gather reads",
    ),
    "an embedding that is picked first": (
        [node("Gather", "b ids", "p", "embed"), node("BitwiseAnd", "p f", "l"), node("Cast", "l", "y", to=1)],
        {"b": BYTES, "f": np.uint8(15)}, "'b', UINT8 [8, 8], holds 4-bit codes that Gather reads",
    ),
    "com.microsoft's embedding": (
        [node("GatherBlockQuantized", "b ids s", "y", "embed", "com.microsoft", block_size=16)],
        {"b": BYTES, "s": SCALES[:, None]}, "that GatherBlockQuantized reads",
    ),
    "com.microsoft's experts": (
        [node("QMoE", "x x b s", "y", "experts", "com.microsoft")],
        {"b": BYTES[None], "s": SCALES[None]}, "'b', UINT8 [1, 8, 8], holds 4-bit codes that QMoE reads",
    ),
    "an Einsum of nibbles": (
        [node("BitwiseAnd", "b f", "l"), node("Cast", "l", "c", to=1),
         node("Einsum", "x c", "y", "sum", equation="ij,jk->ik")],
        {"b": BYTES, "f": np.array([15], np.uint8)}, "that Einsum reads",
    ),
    "words that are shifted by a list": (
        [node("BitShift", "b f", "l", direction="RIGHT"), node("Cast", "l", "c", to=1), node("Add", "x c", "y", "add")],
        {"b": np.arange(32, dtype=np.uint32)[:, None], "f": np.arange(0, 32, 4, dtype=np.uint32)}, "that Add reads",
    ),
    "one that no node reads": ([node("Relu", "x", "y")], {"w": UINT4}, "that no product reads"),
}  # fmt: skip

SILENT = {
    "8 bits": ([node("GatherBlockQuantized", "b ids s", "y", "embed", "com.microsoft", bits=8)],
               {"b": BYTES, "s": SCALES}),
    "positions": ([node("Mod", "p f", "l"), node("Cast", "l", "c", to=1), node("Add", "x c", "y")],
                  {"p": np.arange(64), "f": np.int64(16)}),
    "another mask": ([node("BitwiseAnd", "b f", "l"), node("Cast", "l", "c", to=1), node("Add", "x c", "y")],
                     {"b": BYTES, "f": np.uint8(31)}),
    "few numbers": ([node("Relu", "x", "y")], {"w": UINT4.reshape(-1)[:16]}),
    "int8 convolution": ([node("DequantizeLinear", "w s", "k"), node("Conv", "x k", "y")],
                         {"w": np.ones((8, 4, 3), np.int8), "s": np.float32(1)}),
    "no constant": ([node("Cast", "ids", "b", to=2), node("BitwiseAnd", "b f", "l"), node("Cast", "l", "y", to=1)],
                    {"f": np.uint8(15)}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_reads_it_is_named(name: str) -> None:
    nodes, tensors, sentence = FOUND[name]
    (refusal,) = said(nodes, tensors)
    assert sentence in refusal.reason
    assert refusal.node in tensors
    assert refusal.reason.count(f"'{refusal.node}'") == 1
    assert f"'{refusal.at}'" in refusal.reason


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_of_what_is_no_weight(name: str) -> None:
    assert said(*SILENT[name]) == ()


@pytest.mark.parametrize("name", FORMS)
def test_nothing_is_said_of_what_is_proved(name: str) -> None:
    assert of(make(name).model) == ()


@pytest.mark.parametrize("name", AFFINE_FORMS)
def test_nothing_is_said_of_affine_weights_that_are_proved(name: str) -> None:
    assert of(make_affine(name).model) == ()


def test_nothing_is_said_of_what_is_refused_or_in_functions() -> None:
    for mutant in MUTANTS:
        model = mutant.model()
        if recognize(model).refusals:
            assert of(model) == (), mutant.name
    assert of(build_calls(2).model) == ()
    constants = {"literals": "constant", "leaves": "constant"}
    assert of(build_affine(place=["function"], **constants).model) == ()
    assert of(build_affine(place=["function"], hold="leaves", literals="constant", calls=2).model) == ()
    assert of(build_affine(place=["Loop", "If"]).model) == ()


def test_inspect_prints_it(tmp_path: Path) -> None:
    nodes, tensors, _ = FOUND["an embedding"]
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()]
    infos = [helper.make_tensor_value_info("ids", 7, ["n"]), helper.make_tensor_value_info("y", 1, ["n", 16])]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    run = [sys.executable, "-c", "from lut4tool.cli import main; main()", "inspect", str(tmp_path / "m.onnx")]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "outside of every product: 'w', UINT4 [8, 16], holds 4-bit codes that Gather reads" in " ".join(text.split())
    document = json.loads(subprocess.run([*run, "--json"], capture_output=True, text=True, check=True).stdout)
    assert [left["at"] for left in document["outside"]] == ["embed"]
