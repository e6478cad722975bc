"""One wrong model for each fact that the forms of forms_affine.py rest on beside those of build_affine's spellings."""

from __future__ import annotations

import numpy as np
import onnx
from build_affine import build_affine
from build_nbits import nbits
from forms import Model
from forms_affine import make_affine
from mutants import Edit, Mutant, attribute, before, literal, operator, tensor
from onnx import TensorProto, helper

from build import find_node

SHIFT, FLOOR, HQQ = "shift of signed integers", "floor division", "scattered halves"
WIDE, TILED, WIDENED = "expanded scales", "tiled scales", "halves widened"


def of(form: str, sentence: str, *edits: Edit) -> Mutant:
    """A wrong model of a form: 6 columns of 24 elements in blocks of 4."""
    return Mutant(f"{form}: {sentence[:60]}", sentence, edits, make=lambda: make_affine(form))


def reads(role: str, index: int, name: str) -> Edit:
    """Let a node read another value."""
    return lambda model: find_node(model, f"dec/{role}").input.__setitem__(index, name)


def without(role: str) -> Edit:
    """Take a node's attributes away."""
    return lambda model: find_node(model, f"dec/{role}").ClearField("attribute")


def other_rows(model: onnx.ModelProto) -> None:
    """Scatter the second half to rows in another order."""
    name = find_node(model, "dec/ScatterND2").input[1]
    found = next(entry for entry in model.graph.initializer if entry.name == name)
    rows = onnx.numpy_helper.to_array(found)
    found.CopyFrom(onnx.numpy_helper.from_array(np.roll(rows, 1, 0), name))


def other_bytes(model: onnx.ModelProto) -> None:
    """Add other bytes, their low nibbles, and what a shift of them would be filled with."""
    graph = model.graph
    graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((6, 12), np.uint8), "dec/other"))
    sixteen = onnx.numpy_helper.from_array(np.array(16, np.int32), "dec/sixteen")
    graph.initializer.append(sixteen)
    graph.node.insert(0, helper.make_node("Mod", ["dec/whole", "dec/sixteen"], ["dec/whole_rest"], "dec/WholeRest"))
    cast = helper.make_node("Cast", ["dec/other"], ["dec/whole"], "dec/Whole", to=TensorProto.INT32)
    graph.node.insert(0, cast)


def whole_shift(model: onnx.ModelProto) -> None:
    """Fill a shift with what other bytes give."""
    names = ["dec/whole", "dec/whole_wide"]
    wide = helper.make_node("Cast", names[:1], names[1:], "dec/WholeWide", to=TensorProto.UINT32)
    model.graph.node.insert(1, wide)
    four = onnx.numpy_helper.from_array(np.array(4, np.uint32), "dec/four")
    model.graph.initializer.append(four)
    moved = helper.make_node("BitShift", ["dec/whole_wide", "dec/four"], ["dec/moved"], "dec/Moved", direction="RIGHT")
    model.graph.node.insert(2, moved)
    find_node(model, "dec/BitwiseOr").input[0] = "dec/moved"


def offset_after(model: onnx.ModelProto) -> None:
    """Add zero points after the scaling, as tinygemm and GGUF's Q4_1 do."""
    sub, product, last = (find_node(model, f"dec/{role}") for role in ("Sub", "Mul", "Reshape2"))
    product.input[0] = sub.input[0]
    sub.op_type, sub.input[0], last.input[0] = "Add", product.output[0], sub.output[0]
    nodes = sorted(model.graph.node, key=lambda node: node.name != sub.name)  # the sum after the product
    place = [node.name for node in nodes].index(product.name)
    nodes.insert(place, nodes.pop(0))
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def picked(model: onnx.ModelProto) -> None:
    """Pick the scales of each block by a list."""
    order = onnx.numpy_helper.from_array(np.arange(6)[::-1].copy(), "dec/g_idx")
    model.graph.initializer.append(order)
    node = find_node(model, "dec/Mul")
    picks = helper.make_node("Gather", [node.input[1], "dec/g_idx"], ["dec/picked"], "dec/Gather", axis=1)
    model.graph.node.insert(0, picks)
    node.input[1] = "dec/picked"


def outside(model: onnx.ModelProto) -> None:
    """Move the bytes that a call gives to a file."""
    found = next(entry for entry in model.graph.initializer if entry.name == "dec/packed")
    found.ClearField("raw_data")
    found.data_location = TensorProto.EXTERNAL
    found.external_data.add(key="location", value="w.bin")


def padded(model: onnx.ModelProto) -> None:
    """Pad flat bytes before both nibbles are taken."""
    found = next(entry for entry in model.graph.initializer if entry.name == "dec/packed")
    found.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(found)[:-2], found.name))
    pads = onnx.numpy_helper.from_array(np.array([0, 2]), "dec/pads")
    model.graph.initializer.append(pads)
    model.graph.node.insert(0, helper.make_node("Pad", ["dec/packed", "dec/pads"], ["dec/padded"], "dec/Pad"))
    for role in ("Low", "High"):
        find_node(model, f"dec/{role}").input[0] = "dec/padded"


def called_twice() -> Model:
    """A MatMulNBits in a function, whose two calls give flat bytes of their own."""
    model, feeds, _ = nbits()
    for tensor_ in model.graph.initializer:
        if tensor_.name == "B":
            tensor_.dims[:] = [int(np.prod(tensor_.dims))]
    node = model.graph.node[0]
    names = [name for name in node.input if name]
    body = helper.make_function("f", "F", names, list(node.output), [node], list(model.opset_import))
    model.functions.append(body)
    other = onnx.TensorProto()
    other.CopyFrom(next(entry for entry in model.graph.initializer if entry.name == "B"))
    other.name = "other"
    model.graph.initializer.append(other)
    calls = [helper.make_node("F", names, [output], domain="f") for output in (node.output[0], "again")]
    calls[1].input[names.index("B")] = "other"
    del model.graph.node[:]
    model.graph.node.extend(calls)
    model.opset_import.append(helper.make_opsetid("f", 1))
    return Model(model, feeds, np.empty(0))


AFFINE_FORMS_WRONG = [
    # Halves of bytes
    of(SHIFT, "Concat with axis 5 of shape [6, 12, 1]", attribute("Concat", axis=5)),
    of(SHIFT, "Concat without an axis", without("Concat")),
    of(SHIFT, "initializer 'dec/packed', not the output of Div", reads("Concat", 1, "dec/packed")),
    of(SHIFT, "Less than 1, not than 0", literal("Less", 1, 1, np.int32)),
    of(SHIFT, "Greater, not Less", operator("Less", "Greater")),
    of(SHIFT, "BitwiseXor, not BitwiseOr", operator("BitwiseOr", "BitwiseXor")),
    of(SHIFT, "Where of several values, not of one packed value", other_bytes, reads("Less", 0, "dec/whole")),
    of(SHIFT, "Where of several values, not of one packed value", other_bytes, whole_shift),
    of(SHIFT, "BitwiseOr with [7, 7], not with one number", literal("BitwiseOr", 1, [7, 7], np.uint32)),
    of(SHIFT, "packed 'dec/packed', UINT8 [], is not of rank 1 or more", tensor("packed", np.array(7, np.uint8))),
    of(FLOOR, "Sub of several values, not of one packed value", other_bytes, reads("Less", 0, "dec/whole"),
       literal("Less", 1, 0, np.int32)),
    of(FLOOR, "Sub of several values, not of one packed value", other_bytes, reads("Cast2", 0, "dec/whole_rest")),
    of(HQQ, "Expand of shape [1, 1], not of one number", literal("Expand", 0, [[0]], np.float32)),
    of(HQQ, "Expand of shape [2], not of one number", literal("Expand", 0, [0, 0], np.float32)),
    of("codes of int4", "Sub in INT8 of INT4 codes, which may wrap", attribute("Cast", to=TensorProto.INT8)),
    of(SHIFT, "Where over Where, more than 8 deep", reads("Where", 2, "dec/Where_out")),
    of(SHIFT, "is UINT32, not INT32", reads("Where", 2, "dec/BitShift_out"),
       operator("BitShift", "BitwiseAnd"), without("BitShift"), reads("BitShift", 0, "dec/Cast_out")),
    of(FLOOR, "Equal to 0, not to True", literal("Equal", 1, False, np.bool_)),
    of(FLOOR, "Xor, not Equal", operator("Equal", "Xor")),
    of(FLOOR, "Or, not And", operator("And", "Or")),
    of(FLOOR, "Not, not Cast", operator("Cast2", "Not"), without("Cast2")),
    of(FLOOR, "Abs, not Cast", operator("Cast3", "Abs"), without("Cast3")),
    of(HQQ, "Less than 1, not than 0", reads("Less", 0, "dec/packed"), literal("Less", 1, 1, np.uint8)),
    of(HQQ, "the upper of each byte, not one nibble of it", reads("Cast3", 0, "dec/BitwiseAnd_out")),
    of(HQQ, "Cast of the bytes to DOUBLE", attribute("Cast3", to=TensorProto.DOUBLE)),
    of(HQQ, "BitwiseAnd of the upper half of each byte", reads("BitwiseAnd2", 0, "dec/BitwiseAnd_out")),
    of(HQQ, "BitShift of the low nibble, not of the bytes", reads("BitShift", 0, "dec/BitwiseAnd2_out")),
    of(HQQ, "BitwiseAnd by 241, not 15", literal("BitwiseAnd", 1, 241, np.uint8)),
    of(HQQ, "ScatterND of the low nibble twice", reads("ScatterND", 2, "dec/Cast4_out")),
    of(HQQ, "ScatterND to other rows than 18 to 35 in order", other_rows),
    of(HQQ, "Expand to [37, 4], not to [36, 4], both nibbles", literal("Expand", 1, [37, 4])),
    of(HQQ, "Reshape, not Expand", operator("Expand", "Reshape")),
    of(HQQ, "with reduction", attribute("ScatterND", reduction="add")),
    # What repeats scales and zero points
    of(WIDE, "Expand to [1, 1, 4] of shape [1, 3], not to a list", literal("Expand", 1, [[1, 1, 4]])),
    of(WIDE, "Expand to [1, 0, 4], not to positive sizes", literal("Expand", 1, [1, 0, 4])),
    of(WIDE, "Expand of elements that lie as [6, 6, 1]", literal("Expand", 1, [1, 4, 4])),
    of(TILED, "Tile of shape [6, 6, 1] by [2, 1, 4], not along dimensions of 1", literal("Tile", 1, [2, 1, 4])),
    of(WIDE, "in blocks of 6 along K, which is not several of 4",
       literal("Expand", 1, [1, 1, 6]), tensor("points", np.ones((6, 4, 1), np.float32))),
    of("columns of bytes without unsqueeze", "Squeeze on axes 0 of shape [72, 2]",
       before("Reshape", 0, "Squeeze"), lambda m: find_node(m, "new/Reshape").input.append("dec/zero"),
       tensor("zero", np.array([0]))),
    of("codes by columns", "the weight is of shape [24, 2, 3], not a matrix", literal("Reshape2", 1, [24, 2, 3])),
    of(SHIFT, "Add, not a zero point that Sub takes off codes before they are scaled", offset_after),
    of(SHIFT, "scales that an index picks, as GPTQ's g_idx does", picked),
    # Types
    of(WIDENED, "Cast of the scales to DOUBLE, not FLOAT", attribute("Cast7", to=TensorProto.DOUBLE)),
    of("zero points in nibbles", "Sub of INT64 zero points from INT32 codes",
       before("Sub", 1, "Cast", to=TensorProto.INT64)),
    of("integer zero points", "Cast of the zero points to INT8, which may not hold them",
       before("Sub", 1, "Cast", to=TensorProto.INT8)),
    of("integer zero points", "Sub in UINT32, not in signed integers", attribute("Cast5", to=TensorProto.UINT32)),
    of("codes of int4", "Cast of the codes to UINT8, which does not hold them all",
       attribute("Cast", to=TensorProto.UINT8)),
    Mutant("zero points rounded", "zero points that are rounded by a Cast and taken off in FLOAT",
           (before("WidenPoints", 0, "Cast", to=TensorProto.BFLOAT16),),
           make=lambda: build_affine(chain="arithmetic", scales="float16", float_points=True)),
    # Where bytes are laid out anew, or padded
    Mutant("bytes that a call gives from a file", "is external data that a call gives", (outside,),
           make=lambda: build_affine(place=["function"], hold="leaves", literals="constant")),
    Mutant("padded bytes", "Pad of the bytes of an affine weight", (padded,),
           make=lambda: build_affine(chain="nibbles", bytes="flat", k=16, points=False)),
    Mutant("MatMulNBits in two calls", "is another tensor at each call; one is expected", make=called_twice),
]  # fmt: skip
