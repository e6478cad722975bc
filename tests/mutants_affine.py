"""One wrong model for each fact that a proof of an affine weight rests on, with the sentence that refuses it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from build_affine import BuiltAffine, build_affine
from build_nbits import nbits
from mutants import Edit, Mutant, add, attribute, before, inputs, listed, literal, named, operator, reference
from onnx import TensorProto, helper

from build import find_node

NIBBLES = {"chain": "nibbles", "k": 9}
WIDE = {"chain": "nibbles", "nibbles": ("Mod", "Div"), "wide": TensorProto.INT64}
ARITHMETIC = {"chain": "arithmetic", "nibbles": ("Mod", "Div"), "wide": TensorProto.INT64, "opset": 17}
HALF = {**ARITHMETIC, "scales": "float16"}
COLUMN = {"by": "column"}
CALLS = {"place": ["function"], "hold": "leaves", "literals": "constant", "calls": 2}


def mutant(name: str, sentence: str, *edits: Edit, **spelling: Any) -> Mutant:
    """A wrong edit of an affine weight: k 10, n 6, blocks of 4."""
    return Mutant(name, sentence, edits, make=lambda: built(**spelling))


def built(**spelling: Any) -> BuiltAffine:
    """The model before the edit."""
    return build_affine(**spelling)


def recast(name: str, dtype: str, shape: Any = None) -> Edit:
    """Give an initializer another type and shape, its values zero."""

    def edit(model: onnx.ModelProto) -> None:
        found = named(model, name)
        dims = list(found.dims) if shape is None else shape
        kind = TensorProto.DataType.Value(dtype)
        found.CopyFrom(helper.make_tensor(name, kind, dims, np.zeros(int(np.prod(dims)))))

    return edit


def rebound(index: int, name: str) -> Edit:
    """Bind another value at the function's second call."""
    return lambda model: find_node(model, "Call1").input.__setitem__(index, name)


def no_input(role: str, index: int) -> Edit:
    """Leave an optional input out."""
    return lambda model: find_node(model, f"dec/{role}").input.__setitem__(index, "")


def imports(version: int) -> Edit:
    """Declare another opset."""
    return lambda model: setattr(model.opset_import[0], "version", version)


# affine.py: DequantizeLinear.
DEQUANTIZE = [
    mutant(
        "perm",
        "changes with each element along K, not with each block of them as in QMM",
        attribute("Transpose", perm=[0, 1]),
    ),
    mutant("cast to double", "Cast of the weight to DOUBLE, not FLOAT", attribute("Cast", to=11), cast="float16"),
    mutant(
        "two casts",
        "2 Casts of the weight, which would round it twice",
        before("Cast", 0, "Cast", to=1),
        cast="float16",
    ),
    mutant(
        "two Transposes",
        "changes with each element along K, not with each block of them as in QMM",
        before("Transpose", 0, "Transpose", perm=[1, 0]),
    ),
    mutant("absolute", "Abs, not Mul by scales", before("Transpose", 0, "Abs")),
    mutant(
        "reshaped",
        "Reshape of elements that lie as [6, 10], which it would not keep in one piece",
        add("dec/flat", np.array([6, 10])),
        before("Transpose", 0, "Reshape"),
        lambda m: find_node(m, "new/Transpose").input.append("dec/flat"),
    ),
    mutant(
        "output type", "DequantizeLinear with output_dtype 1, not 0", attribute("Dequantize", output_dtype=1), opset=23
    ),
    mutant("int8", "codes 'dec/packed', INT8 [6, 10], is not INT4 or UINT4", recast("dec/packed", "INT8"), **COLUMN),
    mutant("opset", "opset 19, not 21 or later", imports(19), **COLUMN),
    mutant(
        "codes of rank 3",
        "scales [6, 3], not [6, 2, 2], along axis 1 of [6, 5, 2]",
        recast("dec/packed", "UINT4", [6, 5, 2]),
    ),
    mutant("no codes", "codes 'dec/packed', UINT4 [6, 0], is empty", recast("dec/packed", "UINT4", [6, 0])),
    mutant(
        "scales double", "scales 'dec/scales', DOUBLE [6, 3], is not FLOAT, FLOAT16", recast("dec/scales", "DOUBLE")
    ),
    mutant(
        "points of another type",
        "zero points 'dec/points', INT4 [6, 3], is not of the codes' type",
        recast("dec/points", "INT4"),
    ),
    mutant(
        "points of another shape",
        "zero points 'dec/points', UINT4 [1, 3], is not of the scales' shape",
        recast("dec/points", "UINT4", [1, 3]),
    ),
    mutant("axis 2", "DequantizeLinear with axis 2 of [6, 10]", attribute("Dequantize", axis=2)),
    mutant("axis -3", "DequantizeLinear with axis -3 of [6, 10]", attribute("Dequantize", axis=-3)),
    mutant("blocks along N", "scales [6, 3], not [2, 10], along axis 0 of [6, 10]", attribute("Dequantize", axis=0)),
    mutant(
        "blocks along N, by columns",
        "scales [3, 6], not [10, 2], along axis 1 of [10, 6]",
        attribute("Dequantize", axis=1),
        first="k",
    ),
    mutant(
        "not transposed",
        "changes with each element along K, not with each block of them as in QMM",
        inputs("MatMul", "x", "Dequantize"),
    ),
    mutant(
        "scales along K",
        "changes with each element along K, not with each block of them as in QMM",
        attribute("Dequantize", axis=1),
        k=6,
        n=6,
        **COLUMN,
    ),
    mutant(
        "scales of another size",
        "scales [5], not [6], along axis 0 of [6, 10]",
        recast("dec/scales", "FLOAT", [5]),
        recast("dec/points", "UINT4", [5]),
        **COLUMN,
    ),
    mutant(
        "odd block",
        "a block of 5 elements along K, which is odd",
        attribute("Dequantize", block_size=5),
        recast("dec/scales", "FLOAT", [6, 2]),
        recast("dec/points", "UINT4", [6, 2]),
    ),
    mutant(
        "negative block", "DequantizeLinear with block_size -4, not positive", attribute("Dequantize", block_size=-4)
    ),
    mutant(
        "other block",
        "scales [6, 3], not [6, 5], along axis 1 of [6, 10]",
        attribute("Dequantize", block_size=2),
    ),
    mutant(
        "scales turned",
        "scales [3, 6], not [6, 3], along axis 1 of [6, 10]",
        recast("dec/scales", "FLOAT", [3, 6]),
        recast("dec/points", "UINT4", [3, 6]),
    ),
    mutant(
        "computed codes", "scales [6, 3], not [10, 2], along axis 1 of [10, 6]", before("Dequantize", 0, "Transpose")
    ),
    mutant("computed scales", "Abs, not a constant of scales", before("Dequantize", 1, "Abs")),
    mutant(
        "codes of calls",
        "'formal_dec/packed', UINT4 [6, 10], is another tensor at each call",
        rebound(1, "dec/scales"),
        rebound(2, "dec/points"),
        **CALLS,
    ),
    mutant(
        "points of calls",
        "'formal_dec/points', UINT4 [6, 3], is another tensor at each call",
        rebound(0, "dec/packed"),
        rebound(1, "dec/scales"),
        **CALLS,
    ),
]

# affine.py: nibbles of bytes.
BYTES = [
    mutant(
        "no cast",
        "DequantizeLinear of codes cast to UINT8, not to UINT4",
        inputs("Dequantize", "ToCodes", "dec/scales"),
        **NIBBLES,
    ),
    mutant(
        "no reshape", "scales [6, 3], not [6, 2, 2], along axis 1 of [6, 5, 2]", inputs("Four", "Concat"), **NIBBLES
    ),
    mutant(
        "cast to int4",
        "Cast of the codes to INT4, which does not hold them all",
        attribute("Four", to=TensorProto.INT4),
        no_input("Dequantize", 2),
        **NIBBLES,
    ),
    mutant("codes of rank 1", "Slice on axis 1 of shape [60]", literal("ToCodes", 1, [60]), **NIBBLES),
    mutant(
        "nibbles of rank 3",
        "scales [6, 3], not [6, 2, 2], along axis 1 of [6, 5, 2]",
        literal("ToCodes", 1, [6, 5, 2]),
        **NIBBLES,
    ),
    mutant(
        "shape of rank 2",
        "Reshape to [6, 10] of shape [1, 2], not to a list of dimensions",
        literal("ToCodes", 1, [[6, 10]]),
        **NIBBLES,
    ),
    mutant(
        "other rows",
        "Reshape of 60 elements to [5, 10], which they do not fill",
        literal("ToCodes", 1, [5, 10]),
        **NIBBLES,
    ),
    mutant("cut start", "Slice from [1], not from [0]", literal("Cut", 1, [1]), **NIBBLES),
    mutant("cut to two ends", "Slice to [9, 9], not to one end", literal("Cut", 2, [9, 9]), **NIBBLES),
    mutant("cut step", "Slice with steps [2], not [1]", literal("Cut", 4, [2]), **NIBBLES),
    mutant(
        "three nibbles",
        "Concat of 3 values, not of the two nibbles",
        inputs("Concat", "UnsqueezeLow", "UnsqueezeHigh", "UnsqueezeLow"),
        **NIBBLES,
    ),
    mutant("low twice", "Concat of the low nibble twice", inputs("Concat", "UnsqueezeLow", "UnsqueezeLow"), **NIBBLES),
    mutant(
        "high twice", "Concat of the high nibble twice", inputs("Concat", "UnsqueezeHigh", "UnsqueezeHigh"), **NIBBLES
    ),
    mutant(
        "two packed",
        "Concat of nibbles of two values, not of one",
        add("other", np.zeros((6, 5), np.uint8)),
        inputs("Low", "other", "dec/low_by"),
        **NIBBLES,
    ),
    mutant("packed int8", "packed 'dec/packed', INT8 [6, 5], is not UINT8", recast("dec/packed", "INT8"), **WIDE),
    mutant(
        "packed scalar",
        "is not of rank 1 or more",
        recast("dec/packed", "UINT8", []),
        **NIBBLES,
    ),
    mutant(
        "low axis",
        "Concat of nibbles that are moved in two ways, not in one",
        literal("UnsqueezeLow", 1, [1]),
        **NIBBLES,
    ),
    mutant(
        "high axis",
        "Concat of nibbles that are moved in two ways, not in one",
        literal("UnsqueezeHigh", 1, [1]),
        **NIBBLES,
    ),
    mutant("mask", "BitwiseAnd by 7, not 15", literal("Low", 1, [7], np.uint8), **NIBBLES),
    mutant("shift", "BitShift by 3, not 4", literal("High", 1, [3], np.uint8), **NIBBLES),
    mutant("shift left", "BitShift with direction LEFT, not RIGHT", attribute("High", direction="LEFT"), **NIBBLES),
    mutant("mod", "Mod by 15, not 16", literal("Low", 1, [15]), **WIDE),
    mutant("div", "Div by 15, not 16", literal("High", 1, [15]), **WIDE),
    mutant("list of masks", "BitwiseAnd by [15, 15]", literal("Low", 1, [15, 15], np.uint8), **NIBBLES),
    mutant("mask of another type", "is INT64, not UINT8", literal("Low", 1, [15]), **NIBBLES),
    mutant(
        "cast to int8",
        "Cast of the bytes to INT8, not INT64, INT32",
        attribute("Wide", to=TensorProto.INT8),
        **WIDE,
    ),
    mutant("cast to float", "Cast of the bytes to FLOAT, not INT64, INT32", attribute("Wide", to=1), **WIDE),
    mutant(
        "bytes of calls",
        "'formal_dec/packed', UINT8 [6, 5], is another tensor at each call",
        **CALLS,
        chain="nibbles",
        points=False,
    ),
    mutant(
        "points of another width",
        "zero points 'dec/points', UINT8 [6, 2], is not of the scales' shape",
        literal("pointsCut", 2, [2]),
        **NIBBLES,
    ),
] + [
    mutant(f"{role} is {op}", sentence, operator(role, op), **base)
    for role, op, sentence, base in (
        (
            "ToCodes",
            "Expand",
            "Expand of elements that lie as [6, 5, 2], which it would not keep in one piece",
            {"chain": "nibbles"},
        ),
        ("Concat", "Max", "Max, not Concat of the nibbles of bytes", {"chain": "nibbles"}),
        ("UnsqueezeLow", "Squeeze", "Squeeze, not Div, BitShift", {"chain": "nibbles"}),
        ("UnsqueezeHigh", "Squeeze", "Squeeze, not Div, BitShift", {"chain": "nibbles"}),
        ("Low", "BitwiseOr", "BitwiseOr, not Div, BitShift", {"chain": "nibbles"}),
        ("High", "BitwiseXor", "BitwiseXor, not Div", {"chain": "nibbles"}),
        ("Four", "CastLike", "CastLike, not Concat of the nibbles of bytes", {"chain": "nibbles"}),
    )
]

# affine.py: arithmetic.
STEPS = [
    mutant(
        "not turned",
        "changes with each element along K, not with each block of them as in QMM",
        inputs("MatMul", "x", "Cut"),
        **ARITHMETIC,
    ),
    mutant("matrix", "Transpose with perm [1, 0] of shape [6, 6, 2]", literal("ToMatrix", 1, [6, 6, 2]), **ARITHMETIC),
    mutant(
        "matrix of rank 2",
        "Reshape to [6, 12] of shape [1, 2], not to a list of dimensions",
        literal("ToMatrix", 1, [[6, 12]]),
        **ARITHMETIC,
    ),
    mutant(
        "matrix turned",
        "Reshape of elements that lie as [6, 3, 4], which it would not keep in one piece",
        literal("ToMatrix", 1, [12, 6]),
        **ARITHMETIC,
    ),
    mutant(
        "arithmetic: scales double",
        "DOUBLE [6, 3], is not FLOAT, FLOAT16",
        recast("dec/scales", "DOUBLE"),
        **ARITHMETIC,
    ),
    mutant(
        "scales axis",
        "Mul of [6, 3, 4] and [6, 1, 3], which do not fit",
        literal("UnsqueezeScales", 1, [1]),
        **ARITHMETIC,
    ),
    mutant(
        "points axis",
        "Sub of [6, 1, 3] from [6, 3, 4], which do not fit",
        literal("UnsqueezePoints", 1, [1]),
        **ARITHMETIC,
    ),
    mutant(
        "steps in bfloat16", "Cast of the steps to BFLOAT16, not the scales' type", attribute("Narrow", to=16), **HALF
    ),
    mutant(
        "steps cast to an integer",
        "Cast of the steps to INT32, not the scales' type",
        attribute("Narrow", to=6),
        **HALF,
    ),
    mutant(
        "no cast of the steps",
        "Mul of FLOAT steps by FLOAT16 scales, not of one type",
        inputs("Mul", "Sub", "UnsqueezeScales"),
        **HALF,
    ),
    mutant(
        "codes in half",
        "Sub in FLOAT16, not in signed integers, FLOAT or the scales' FLOAT",
        attribute("Widen", to=10),
        **ARITHMETIC,
    ),
    mutant(
        "points in half",
        "Sub of FLOAT16 zero points from FLOAT codes, not of one type",
        attribute("WidenPoints", to=10),
        **ARITHMETIC,
    ),
    mutant("points of another half", "BFLOAT16 [6, 3], is not UINT8", recast("dec/points", "BFLOAT16"), **HALF),
    mutant(
        "float points of half scales",
        "zero points 'dec/points', FLOAT [6, 3], is not UINT8",
        recast("dec/points", "FLOAT"),
        inputs("UnsqueezePoints", "dec/points", "dec/points_axis"),
        **HALF,
    ),
    mutant(
        "points uncast",
        "Sub of UINT8 zero points from FLOAT codes, not of one type",
        inputs("UnsqueezePoints", "dec/points", "dec/points_axis"),
        **ARITHMETIC,
    ),
    mutant(
        "blocks of rank 2",
        "Sub of [6, 3, 1] from [6, 12], which do not fit",
        literal("ToBlocks", 1, [6, 12]),
        **ARITHMETIC,
    ),
    mutant(
        "blocks of rank 4",
        "Sub of [6, 3, 1] from [6, 3, 2, 2], which do not fit",
        literal("ToBlocks", 1, [6, 3, 2, 2]),
        **ARITHMETIC,
    ),
    mutant(
        "block shape of rank 2",
        "Reshape to [6, 3, 4] of shape [1, 3], not to a list of dimensions",
        literal("ToBlocks", 1, [[6, 3, 4]]),
        **ARITHMETIC,
    ),
    mutant("arithmetic: cut start", "Slice from [1], not from [0]", literal("Cut", 1, [1]), **ARITHMETIC),
    mutant("computed points", "Abs, not a constant of zero points", before("WidenPoints", 0, "Abs"), **ARITHMETIC),
    mutant(
        "scales of two types",
        "FLOAT [6, 3] or FLOAT16 [6, 3], is not of one type",
        recast("call1/dec/scales", "FLOAT16"),
        **ARITHMETIC,
        **CALLS,
    ),
    mutant(
        "points of two types",
        "FLOAT [6, 3] or UINT8 [6, 3], is not of one type",
        recast("call1/dec/points", "FLOAT"),
        **ARITHMETIC,
        **CALLS,
    ),
    mutant(
        "bytes of two ranks",
        "UINT8 [36] or UINT8 [6, 3, 2], is not of one shape",
        recast("call1/dec/packed", "UINT8", [36]),
        **ARITHMETIC,
        **CALLS,
    ),
    mutant(
        "BitwiseAnd before opset 18",
        "BitwiseAnd, which opset 17 does not have",
        imports(17),
        chain="arithmetic",
        opset=18,
    ),
] + [
    mutant(f"arithmetic: {role} is {op}", sentence, operator(role, op), **base)
    for role, op, sentence, base in (
        ("ToBlocks", "Expand", "Expand of elements that lie as [6, 3, 2, 2]", ARITHMETIC),
        ("Widen", "Floor", "Floor, not Concat of the nibbles of bytes", ARITHMETIC),
        ("WidenPoints", "Floor", "Floor, not a constant of zero points", ARITHMETIC),
        ("UnsqueezeScales", "Squeeze", "Squeeze on axes 2 of shape [6, 3]", ARITHMETIC),
        ("UnsqueezePoints", "Squeeze", "Squeeze on axes 2 of shape [6, 3]", ARITHMETIC),
        ("Concat", "Max", "Max, not Concat of the nibbles of bytes", ARITHMETIC),
        ("Cut", "Pad", "Pad, not", ARITHMETIC),
    )
]


def vendor(name: str, sentence: str, *edits: Edit, **spelling: Any) -> Mutant:
    """A wrong edit of a MatMulNBits: K 48, N 5, blocks of 16, packed zero points."""
    return Mutant(f"MatMulNBits: {name}", sentence, edits, make=lambda: SimpleNamespace(model=nbits(**spelling)[0]))


def fact(**values: Any) -> Edit:
    """Give the node other attributes; None takes one away."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, "nbits")
        kept = [entry for entry in node.attribute if entry.name not in values]
        del node.attribute[:]
        new = (helper.make_attribute(name, value) for name, value in values.items() if value is not None)
        node.attribute.extend([*kept, *new])

    return edit


def given(index: int, name: str) -> Edit:
    """Give the node another input."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, "nbits")
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = name

    return edit


def own_function(model: onnx.ModelProto) -> None:
    """Let the model define MatMulNBits itself."""
    body = [helper.make_node("Add", ["a", "b"], ["c"])]
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("com.microsoft", "MatMulNBits", ["a", "b"], ["c"], body, imports))


def hidden_bytes(model: onnx.ModelProto) -> None:
    """Put the node into a branch that defines a B of its own, and read the outer one through an Identity."""
    node = copy.deepcopy(find_node(model, "nbits"))
    node.input[1] = "same"
    model.graph.node[0].CopyFrom(helper.make_node("Identity", ["B"], ["same"]))
    branch = helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("y", 1, None)], [scalar("B")])
    model.graph.node.append(helper.make_node("If", ["cond"], ["y_if"], "if", then_branch=branch, else_branch=branch))
    model.graph.input.append(helper.make_tensor_value_info("cond", TensorProto.BOOL, []))
    model.graph.output[0].name = "y_if"


def scalar(name: str) -> TensorProto:
    """An initializer of one number."""
    return helper.make_tensor(name, TensorProto.FLOAT, [], [1.0])


VENDOR = [
    vendor("opset", "opset 12, not one of 13 to 28", imports(12)),
    vendor("own function", "MatMulNBits is a function of this model, not an operator", own_function),
    vendor("no opset", "opset none, not one of 13 to 28", lambda m: m.opset_import.pop(0)),
    vendor("seven inputs", "MatMulNBits with 7 inputs, not 3 to 6", given(6, "scales")),
    vendor("two outputs", "MatMulNBits with 2 outputs, not one", lambda m: find_node(m, "nbits").output.append("z")),
    vendor("no A", "MatMulNBits without A", given(0, "")),
    vendor("no B", "MatMulNBits without B", given(1, "")),
    vendor("no scales", "MatMulNBits without scales", given(2, "")),
    vendor("g_idx", "MatMulNBits with g_idx", given(4, "scales")),
    vendor("undefined A", "value 'nothing' is not defined", given(0, "nothing")),
    vendor("undefined bias", "value 'nothing' is not defined", given(5, "nothing")),
    vendor("unknown attribute", "MatMulNBits with unknown attribute 'mode'", fact(mode=1)),
    vendor("attribute of another type", "MatMulNBits with K that is not a written INT", fact(K=48.0)),
    vendor(
        "attribute reference",
        "MatMulNBits with K that is not a written INT",
        lambda m: find_node(m, "nbits").attribute.append(reference(onnx.AttributeProto.INT, "K", "K")),
    ),
    vendor("no K", "MatMulNBits without K", fact(K=None)),
    vendor("8 bits", "MatMulNBits of 8 bits, not 4", fact(bits=8)),
    vendor("prepacked", "MatMulNBits with weight_prepacked 1, not 0", fact(weight_prepacked=1)),
    vendor("K 0", "MatMulNBits with K 0 and N 5, not both positive", fact(K=0)),
    vendor("N -1", "MatMulNBits with K 48 and N -1, not both positive", fact(N=-1)),
    vendor("block 24", "MatMulNBits with block_size 24, not a power of two from 16 on", fact(block_size=24)),
    vendor("block 8", "MatMulNBits with block_size 8, not a power of two from 16 on", fact(block_size=8)),
    vendor("block 0", "MatMulNBits with block_size 0, not a power of two", fact(block_size=0)),
    vendor("accuracy level", "MatMulNBits with accuracy_level 5, not 0 to 4", fact(accuracy_level=5)),
    vendor("B int8", "B 'B', INT8 [5, 3, 8], is not UINT8", recast("B", "INT8")),
    vendor("B turned", "B 'B', UINT8 [3, 5, 8], is not [5, 3, 8], nor that with", recast("B", "UINT8", [3, 5, 8])),
    vendor("B of rank 2, turned", "UINT8 [15, 8], is not [5, 3, 8]", recast("B", "UINT8", [15, 8])),
    vendor("B short", "UINT8 [119], is not [5, 3, 8]", recast("B", "UINT8", [119])),
    vendor("scales int", "scales 'scales', INT32 [5, 3], is not FLOAT, FLOAT16", recast("scales", "INT32")),
    vendor(
        "points of half a row", "zero_points 'zeros', UINT8 [5, 1], is not [5, 2]", recast("zeros", "UINT8", [5, 1])
    ),
    vendor("points int32", "zero_points 'zeros', INT32 [5, 2], is not FLOAT", recast("zeros", "INT32")),
    vendor(
        "typed points of another shape", "zero_points 'zeros', FLOAT [5, 2], is not [5, 3]", recast("zeros", "FLOAT")
    ),
    vendor(
        "computed B",
        "'B' is computed by Abs",
        lambda m: m.graph.initializer.remove(named(m, "B")),
        lambda m: m.graph.node.insert(0, helper.make_node("Abs", ["scales"], ["B"], "abs")),
    ),
    vendor("overridable scales", "initializer 'scales' is also a graph input", listed("scales")),
    vendor("B hidden", "value 'B' is defined more than once", hidden_bytes),
]

AFFINE = [*DEQUANTIZE, *BYTES, *STEPS, *VENDOR]
