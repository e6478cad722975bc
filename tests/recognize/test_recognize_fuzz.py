"""Random edits of every form and product: no rewrite changes what a model computes, and every refusal names a node.

onnx.reference says what an edited model means. The edits are of a fixed seed: 20,000 of them in the slow test.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from forms import FORMS, Model, make
from onnx import AttributeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from rewriting import run_reference

from build import make_tensor
from lut4tool.recognize import recognize
from lut4tool.recognize.layout import LayoutError
from lut4tool.rewrite import rewrite_model
from lut4tool.storage import Tensors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # onnx.reference, on what edits make of the numbers

#: Products beside MatMul; onnx.reference knows no FusedMatMul.
PRODUCTS: list[Callable[..., onnx.NodeProto] | None] = [
    None,
    lambda x, weight: helper.make_node("Gemm", [x, weight], ["y"], "dec/MatMul", alpha=0.5),
    lambda x, weight: helper.make_node("Gemm", [x, weight, x], ["y"], "dec/MatMul", transB=0, beta=0.0),
]
OPERATORS = ["Add", "Sub", "Mul", "Div", "Mod", "Identity", "Abs", "Neg", "Reshape", "Unsqueeze", "Transpose", "Cast"]
OPERATORS += ["Gather", "Slice", "BitShift", "BitwiseAnd", "Concat", "MatMul", "Gemm"]
INTEGERS = [-16, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 24, 32, 48, 60, 64]
TYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.float16, np.float32]


def edit_tensor(draw: random.Random, tensor: onnx.TensorProto) -> None:
    """Another number, shape or type."""
    array = np.array(numpy_helper.to_array(tensor))
    kind = draw.choice(["number", "number", "shape", "type"])
    if kind == "shape":
        flat = array.reshape(-1)
        shapes = [flat, flat[:, None], flat[None], flat[:-1], np.append(flat, flat[:1])]
        shapes += [flat.reshape(side, -1) for side in (2, 3, 4, 8) if flat.size % side == 0]
        shapes += [flat.reshape(-1, side) for side in (2, 3, 4, 8) if flat.size % side == 0]
        array = draw.choice(shapes)
    elif kind == "type":
        array = array.astype(draw.choice(TYPES))
    elif array.size and array.dtype.kind in "iu":
        least = np.iinfo(array.dtype).min
        array.flat[draw.randrange(array.size)] = draw.choice([number for number in INTEGERS if number >= least])
    tensor.CopyFrom(make_tensor(tensor.name, array))


def edit_attribute(draw: random.Random, attribute: AttributeProto) -> None:
    """Another value of the same type."""
    if attribute.type == AttributeProto.INT:
        attribute.i = draw.choice(INTEGERS[:12])
    elif attribute.type == AttributeProto.INTS:
        attribute.ints[:] = draw.choice([[0, 1], [1, 0], [0]])
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = draw.choice([0.0, 1.0, -2.0])
    elif attribute.type == AttributeProto.STRING:
        attribute.s = draw.choice([b"LEFT", b"RIGHT", b""])


def disturb(draw: random.Random, model: onnx.ModelProto) -> None:
    """One random edit: of a constant, an edge, an operator or an attribute."""
    graph = model.graph
    kind = draw.choice(["tensor", "tensor", "edge", "operator", "attribute", "swap"])
    position = draw.randrange(len(graph.node))
    node = graph.node[position]
    if kind == "tensor":
        edit_tensor(draw, draw.choice(list(graph.initializer)))
    elif kind == "edge" and node.input:
        made = [name for earlier in graph.node[:position] for name in earlier.output]
        names = ["x", *(tensor.name for tensor in graph.initializer), *made]
        node.input[draw.randrange(len(node.input))] = draw.choice(names)
    elif kind == "operator":
        node.op_type = draw.choice(OPERATORS)
    elif kind == "attribute" and node.attribute:
        edit_attribute(draw, draw.choice(list(node.attribute)))
    elif kind == "swap" and len(node.input) > 1:
        node.input[:2] = [node.input[1], node.input[0]]


def value_of(model: onnx.ModelProto, name: str) -> np.ndarray:
    """A value that needs no input, by onnx.reference on the nodes before it: others may be broken."""
    wanted, nodes = {name}, []
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            nodes.insert(0, node)
    graph = helper.make_graph(nodes, "weight", [], [onnx.ValueInfoProto(name=name)], model.graph.initializer)
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=model.opset_import)).run(None, {})[0]


def check_edited(built: Model, model: onnx.ModelProto) -> bool:
    """Whether an edited model is rewritten; asserts that it computes what it did, or is refused at a node."""
    report = recognize(model)
    for refusal in report.refusals:
        assert refusal.reason.endswith(f", at node '{refusal.at}'")
    if not report.proofs:
        return False
    after = copy.deepcopy(model)
    try:
        rewrite_model(after, Tensors(None))  # with its witness: the weight is what it was
    except LayoutError:
        with pytest.raises(IndexError):  # a code that Gather refuses
            value_of(model, report.proofs[0].weight)
        return False
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)  # onnx.reference takes mixed types
        expected: Any = run_reference(model, built.feeds)
    except Exception:  # noqa: BLE001 - the edit broke the model elsewhere, or x does not fit
        return True
    for now, before in zip(run_reference(after, built.feeds), expected, strict=True):
        assert (now.dtype, now.shape) == (before.dtype, before.shape)
        bound = (1e-2 if now.dtype == np.float16 else 1e-5) * np.nanmax(
            np.abs(before), initial=0, where=np.isfinite(before)
        )
        np.testing.assert_allclose(now, before, rtol=0, atol=bound)  # NumPy sums a transposed weight in another order
    return True


def run_edits(seed: int, count: int) -> int:
    """Make and check so many edited models; return how many were rewritten."""
    draw = random.Random(seed)
    bases = [(make(name, product=product), name) for name in FORMS for product in PRODUCTS]
    rewritten = 0
    for _ in range(count):
        built, _ = draw.choice(bases)
        model = copy.deepcopy(built.model)
        for _ in range(draw.choice([1, 1, 2, 3])):
            disturb(draw, model)
        rewritten += check_edited(built, model)
    return rewritten


@pytest.mark.parametrize("seed", range(4))
def test_edits(seed: int) -> None:
    assert run_edits(seed, 400) > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_edits(seed: int) -> None:
    assert run_edits(seed, 2000) > 150
