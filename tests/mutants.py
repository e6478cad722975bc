"""One wrong model for each fact that a proof rests on, with the sentence it must be refused with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from build import Built, Chain, build, build_calls, find_node, make_tensor, spell, value_of

Edit = Callable[[onnx.ModelProto], None]
IN_FUNCTION = {"place": ["function"], "hold": "packed", "literals": "constant"}
IN_FUNCTION |= {"leaves": "initializer initializer constant"}


APART = "Concat of nibbles apart from each other, not of both of each byte"
MOVED = "Concat of nibbles that are moved in two ways, not in one"
TAKEN = "Div, BitShift, Mod or BitwiseAnd of a constant of packed bytes"


@dataclass(frozen=True, eq=False)
class Mutant:
    """A model that must be refused; `later`: another chain will prove it one day."""

    name: str
    sentence: str  # a part of the reason
    edits: tuple[Edit, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    later: bool = False
    make: Callable[[], Built] | None = None

    def model(self) -> onnx.ModelProto:
        """The wrong model."""
        model = (self.make() if self.make else build(check=False, **self.base)).model
        for edit in self.edits:
            edit(model)
        return model


def literal(role: str, index: int, values: Any, dtype: Any = np.int64) -> Edit:
    """Give a node another literal."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, f"dec/{role}")
        while len(node.input) <= index:
            node.input.append("")
        node.input[index] = f"other/{role}/{index}"
        model.graph.initializer.append(make_tensor(node.input[index], np.array(values, dtype)))

    return edit


def literal_at(name: str, values: Any) -> Edit:
    """Append a literal to a node that an edit before this one put in."""

    def edit(model: onnx.ModelProto) -> None:
        find_node(model, name).input.append(f"{name}/said")
        model.graph.initializer.append(make_tensor(f"{name}/said", np.array(values, np.int64)))

    return edit


def attribute(role: str, **values: Any) -> Edit:
    """Give a node other attributes."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, f"dec/{role}")
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept + [helper.make_attribute(name, value) for name, value in values.items()])

    return edit


def operator(role: str, op_type: str, domain: str | None = None) -> Edit:
    """Make a node another operator."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, f"dec/{role}")
        node.op_type = op_type
        node.domain = node.domain if domain is None else domain

    return edit


def inputs(role: str, *names: str) -> Edit:
    """Give a node other inputs: roles of the chain, or full names."""

    def edit(model: onnx.ModelProto) -> None:
        made = {name for node in model.graph.node for name in node.output}
        node = find_node(model, f"dec/{role}")
        node.input[:] = [f"dec/{name}_out" if f"dec/{name}_out" in made else name for name in names]

    return edit


def before(role: str, index: int, op_type: str, **attributes: Any) -> Edit:
    """Put a one-input node before a node's input."""

    def edit(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        position = next(i for i, node in enumerate(nodes) if node.name == f"dec/{role}")
        new = helper.make_node(op_type, [nodes[position].input[index]], [f"new/{role}"], f"new/{role}", **attributes)
        nodes[position].input[index] = f"new/{role}"
        nodes.insert(position, new)

    return edit


def tensor(name: str, array: np.ndarray, rename: str | None = None) -> Edit:
    """Replace an initializer of the chain, or add one."""

    def edit(model: onnx.ModelProto) -> None:
        kept = [t for t in model.graph.initializer if t.name != f"dec/{name}"]
        del model.graph.initializer[:]
        model.graph.initializer.extend([*kept, make_tensor(f"dec/{name}", array)])

    return edit


def listed(name: str) -> Edit:
    """List an initializer as a graph input, which makes it overridable."""

    def edit(model: onnx.ModelProto) -> None:
        found = next(t for t in model.graph.initializer if t.name == name)
        model.graph.input.append(value_of(name, numpy_helper.to_array(found)))

    return edit


def sparse(name: str) -> Edit:
    """Store an initializer as a sparse one."""

    def edit(model: onnx.ModelProto) -> None:
        graph = model.graph
        found = next(t for t in graph.initializer if t.name == name)
        values = numpy_helper.to_array(found).reshape(-1)
        stored = helper.make_sparse_tensor(
            make_tensor(name, values), make_tensor(f"{name}/where", np.arange(values.size)), list(found.dims)
        )
        kept = [t for t in graph.initializer if t.name != name]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        graph.sparse_initializer.append(stored)

    return edit


def external(name: str) -> Edit:
    """Move an initializer's data to a file."""

    def edit(model: onnx.ModelProto) -> None:
        found = next(t for t in model.graph.initializer if t.name == name)
        found.ClearField("raw_data")
        found.data_location = TensorProto.EXTERNAL
        found.external_data.add(key="location", value="weights.data")

    return edit


def written(role: str, attribute: onnx.AttributeProto) -> Edit:
    """Add an attribute as it is to a node."""
    return lambda model: find_node(model, f"dec/{role}").attribute.append(attribute)


def opset(version: int) -> Edit:
    """Declare another opset."""

    def edit(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return edit


def fused(model: onnx.ModelProto) -> None:
    """Make the product onnxruntime's."""
    node = find_node(model, "dec/MatMul")
    node.op_type, node.domain = "FusedMatMul", "com.microsoft"


def own_function(op_type: str, domain: str = "") -> Edit:
    """Let the model define a standard operator itself."""

    def edit(model: onnx.ModelProto) -> None:
        body = [helper.make_node("Add", ["a", "b"], ["c"])]
        model.functions.append(
            helper.make_function(domain, op_type, ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)])
        )

    return edit


def reference(kind: int, name: str, to: str) -> onnx.AttributeProto:
    """An attribute that refers to one of the function it stands in."""
    return onnx.AttributeProto(name=name, type=kind, ref_attr_name=to)


def constant(output: str, *attributes: onnx.AttributeProto) -> Edit:
    """Replace the Constant node of a value by one with these attributes, in the graph or the first function."""

    def edit(model: onnx.ModelProto) -> None:
        bodies = [model.graph, *model.functions]
        node = next(n for body in bodies for n in body.node if output in n.output)
        del node.attribute[:]
        node.attribute.extend(attributes)

    return edit


def twice(name: str) -> Edit:
    """Define a name a second time, by a node."""
    return lambda model: model.graph.node.insert(0, helper.make_node("Abs", ["x"], [name], "again"))


def hidden(model: onnx.ModelProto) -> None:
    """Let the body that holds the product define `dec/packed` too."""
    find_node(model, "dec/Loop").attribute[0].g.initializer.append(make_tensor("dec/packed", np.zeros(32, np.uint8)))


def on_the_left(model: onnx.ModelProto) -> None:
    """Swap the product's operands."""
    node = find_node(model, "dec/MatMul")
    node.input[:] = [node.input[1], node.input[0]]


def call(position: int, name: str | None) -> Edit:
    """Bind another value to a formal input at the function's second call; None leaves it out."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, "Call1")
        index = next(i for i, bound in enumerate(node.input) if bound.endswith(("packed", "scales")[position]))
        node.input[index] = name or ""

    return edit


def without(role: str, name: str) -> Edit:
    """Remove an attribute of a node."""

    def edit(model: onnx.ModelProto) -> None:
        node = find_node(model, f"dec/{role}")
        node.attribute.remove(next(a for a in node.attribute if a.name == name))

    return edit


def computed(name: str, source: str) -> Edit:
    """Compute an initializer's value by a node."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.remove(named(model, name))
        model.graph.node.insert(0, helper.make_node("Abs", [source], [name], "abs"))

    return edit


def more_inputs(model: onnx.ModelProto) -> None:
    """Give the Mul a third input."""
    find_node(model, "dec/Mul").input.append("dec/scales")


def more_outputs(model: onnx.ModelProto) -> None:
    """Give the Mul a second output."""
    find_node(model, "dec/Mul").output.append("extra")


def cut_call(model: onnx.ModelProto) -> None:
    """Leave out all but the first input of the second call."""
    del find_node(model, "Call1").input[1:]


def add(name: str, array: np.ndarray) -> Edit:
    """Add an initializer."""
    return lambda model: model.graph.initializer.append(make_tensor(name, array))


def argument(name: str, array: np.ndarray) -> Edit:
    """Add a graph input."""
    return lambda model: model.graph.input.append(value_of(name, array))


def uncalled(model: onnx.ModelProto) -> None:
    """Remove every call of the model's functions."""
    kept = [node for node in model.graph.node if not node.domain]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def formal(name: str, array: np.ndarray) -> Edit:
    """Make a Constant of the function a formal input, bound to an initializer."""

    def edit(model: onnx.ModelProto) -> None:
        function = model.functions[0]
        position = next(i for i, node in enumerate(function.node) if name in node.output)
        del function.node[position]
        function.input.append(name)
        find_node(model, "dec/Layer0").input.append("bound")
        model.graph.initializer.append(make_tensor("bound", array))

    return edit


INT = onnx.AttributeProto.INT
PACKED, SCALES = spell(Chain()).packed, spell(Chain()).scales  # 32 bytes, 8 scales
CODEBOOK = spell(Chain()).codebook
HALF = {"rounding": "float16"}
TRANSPOSED = {"perm": "written"}
CAPTURED = {"place": ["Loop"], "hold": "packed"}
LAST = {"opset": 26}
TWO_CALLS: dict[str, Any] = {"make": build_calls}
CONSTANTS = {"literals": "constant", "leaves": "constant"}

# chains.py, in the order of its walk.
CHAIN = [
    Mutant("perm", "Transpose with perm [0, 1], not [1, 0]", (attribute("Transpose", perm=[0, 1]),), TRANSPOSED),
    Mutant("cast to double", "Cast of the weight to DOUBLE, not FLOAT16", (attribute("Round", to=11),), HALF),
    Mutant("float over double", "to DOUBLE, not FLOAT16, BFLOAT16 or FLOAT", (attribute("Round", to=11),),
           {"rounding": "float16", "adjoint": True}),
    Mutant("float over no cast", "Floor, not Mul by scales or Gather of a codebook", (operator("Round", "Floor"),),
           {"rounding": "float16", "adjoint": True}),
    Mutant("half over half", "Cast of the weight to BFLOAT16 over float16, which would round it twice",
           (before("MatMul", 1, "Cast", to=16),), HALF),
    Mutant("reshape after transpose", "Reshape after a Transpose, not before it",
           (before("MatMul", 1, "Reshape"), literal_at("new/MatMul", [6, 10])), TRANSPOSED),
    Mutant("matrix of rank 1", "the weight is of shape [60], not [rows, cols]", (literal("ToMatrix", 1, [60]),)),
    Mutant("matrix of rank 3", "of shape [2, 3, 10], not [rows, cols]", (literal("ToMatrix", 1, [2, 3, 10]),)),
    Mutant("matrix shape of rank 2", "of shape [1, 2], not to a list of", (literal("ToMatrix", 1, [[6, 10]]),)),
    Mutant("cols 0", "Reshape of 60 elements to [6, 0], which", (literal("ToMatrix", 1, [6, 0]),)),
    Mutant("cols 0, adjoint", "Reshape of 60 elements to [6, 0], which", (literal("ToMatrix", 1, [6, 0]),),
           {"rounding": "float16", "adjoint": True}),
    Mutant("both negative", "Reshape of 60 elements to [-6, -10], which", (literal("ToMatrix", 1, [-6, -10]),)),
    Mutant("both open", "Reshape of 60 elements to [-1, -1], which", (literal("ToMatrix", 1, [-1, -1]),)),
    Mutant("open beside another", "Reshape of 60 elements to [-1, 7], which", (literal("ToMatrix", 1, [-1, 7]),)),
    Mutant("slice start", "Slice from [1], not from [0]", (literal("Slice", 1, [1]),)),
    Mutant("slice start scalar", "Slice from 0, not from [0]", (literal("Slice", 1, 0),)),
    Mutant("slice end", "Reshape of 59 elements to [6, 10], which", (literal("Slice", 2, [59]),)),
    Mutant("slice end past", "Reshape of 64 elements to [6, 10], which", (literal("Slice", 2, [64]),)),
    Mutant("slice end too far", "Reshape of 64 elements to [6, 10], which", (literal("Slice", 2, [65]),)),
    Mutant("slice end from the end", "Slice to [-64] of 64 elements, not to 1 to 64", (literal("Slice", 2, [-64]),)),
    Mutant("slice to nothing", "Slice to [0] of 64 elements, not to 1 to 64", (literal("Slice", 2, [0]),)),
    Mutant("slice end scalar", "Slice to 60, not to one end", (literal("Slice", 2, 60),)),
    Mutant("slice of a matrix", "Slice of a value of shape [8, 8], not of flat elements",
           (inputs("Slice", "Mul", "dec/start", "dec/end", "dec/cut"),)),
    Mutant("other matrix", "Reshape of 60 elements to [5, 10], which", (literal("ToMatrix", 1, [5, 10]),)),
    Mutant("slice axis", "Slice on axes [1], not [0]", (literal("Slice", 3, [1]),)),
    Mutant("slice step", "Slice with steps [2], not [1]", (literal("Slice", 4, [2]),)),
    Mutant("slice backwards", "Slice with steps [-1], not [1]", (literal("Slice", 4, [-1]),)),
    Mutant("blocks of rank 3", "entries [8, 4, 2] by scales [8, 1], whose dimensions are not theirs or 1",
           (literal("ToBlocks", 1, [-1, 4, 2]),)),
    Mutant("block 7", "Reshape of 64 elements to [-1, 7], which", (literal("ToBlocks", 1, [-1, 7]),)),
    Mutant("odd block", "a block of 1 elements, which is odd",
           (literal("ToBlocks", 1, [-1, 1]), tensor("scales", np.ones(64, np.float32)))),
    Mutant("block 0", "Mul of entries [32, 2] by scales [8, 1], whose", (literal("ToBlocks", 1, [-1, 0]),)),
    Mutant("block of zero", "Reshape of 64 elements to [-1, 0], which",
           (literal("ToBlocks", 1, [-1, 0]), attribute("ToBlocks", allowzero=1))),
    Mutant("zero past the shape", "Reshape of 60 elements to [6, 0], which", (literal("ToMatrix", 1, [6, 0]),)),
    Mutant("negative block", "Reshape of 64 elements to [-1, -8], which", (literal("ToBlocks", 1, [-1, -8]),)),
    Mutant("other block", "entries [16, 4] by scales [8, 1], whose dimensions are not theirs or 1",
           (literal("ToBlocks", 1, [-1, 4]),)),
    Mutant("a block too many", "8 scales for 50 elements in blocks of 8, not 7",
           (literal("Slice", 2, [50]), literal("ToMatrix", 1, [5, 10]))),
    Mutant("three nibbles", "Concat of 3 values", (inputs("Concat", "UnsqueezeHigh", "UnsqueezeLow", "UnsqueezeLow"),)),
    Mutant("one nibble", "Concat of 1 values", (inputs("Concat", "UnsqueezeHigh"),)),
    Mutant("concat axis", APART, (attribute("Concat", axis=0),)),
    Mutant("high twice", "Concat of the high nibble twice", (inputs("Concat", "UnsqueezeHigh", "UnsqueezeHigh"),)),
    Mutant("low twice", "Concat of the low nibble twice", (inputs("Concat", "UnsqueezeLow", "UnsqueezeLow"),)),
    Mutant("high axis", MOVED, (literal("UnsqueezeHigh", 1, [0]),)),
    Mutant("low axis", MOVED, (literal("UnsqueezeLow", 1, [0]),)),
    Mutant("two axes", "Unsqueeze on axes [1, 2] of shape [32]", (literal("UnsqueezeLow", 1, [1, 2]),)),
    Mutant("div", "Div by 15, not 16", (literal("Div", 1, [15]),)),
    Mutant("mod", "Mod by 15, not 16", (literal("Mod", 1, [15]),)),
    Mutant("mod scalar", "Mod by 8, not 16", (literal("Mod", 1, 8),)),
    Mutant("mod of rank 2", "Mod by [16] of shape [1, 1], not 16", (literal("Mod", 1, [[16]]),)),
    Mutant("div list", "Div by [16, 16], not 16", (literal("Div", 1, [16, 16]),)),
    Mutant("cast int32", "literal 'dec/div_by' is INT64, not INT32", (attribute("Cast", to=6),)),
    Mutant("cast int8", "Cast of the bytes to INT8, not", (attribute("Cast", to=3),)),
    Mutant("low cast int8", "Cast of the bytes to INT8, not", (attribute("CastLow", to=3),), {"casts": 2}),
    Mutant("nibbles of two types", "Concat of nibbles of two types",
           (attribute("CastLow", to=6), literal("Mod", 1, [16], np.int32)), {"casts": 2}),
    Mutant("two packed", "Concat of nibbles of two values",
           (add("other", PACKED), inputs("CastLow", "other")), {"casts": 2}),
    Mutant("packed int8", "packed 'dec/packed', INT8 [32], is not UINT8", (tensor("packed", PACKED.astype(np.int8)),)),
    Mutant("packed uint16", "UINT16 [32], is not UINT8", (tensor("packed", PACKED.astype(np.uint16)),)),
    Mutant("packed rank 2", APART, (tensor("packed", PACKED.reshape(4, 8)),)),
    Mutant("packed long", "Reshape of 66 elements to [-1, 8], which", (tensor("packed", np.zeros(33, np.uint8)),)),
    Mutant("packed short", "Reshape of 60 elements to [-1, 8], which", (tensor("packed", PACKED[:30]),)),
    Mutant("packed empty", "packed 'dec/packed', UINT8 [0], is empty", (tensor("packed", PACKED[:0]),)),
    Mutant("scales axis", "a weight [6, 10] of scales along 8 columns of 8", (literal("UnsqueezeScales", 1, [0]),)),
    Mutant("scales two axes", "Unsqueeze on axes [1, 2] of shape [8]", (literal("UnsqueezeScales", 1, [1, 2]),)),
    Mutant("scales half", "Mul of float32 entries by float16 scales", (tensor("scales", SCALES.astype(np.float16)),)),
    Mutant("scales double", "DOUBLE [8], is not FLOAT", (tensor("scales", SCALES.astype(np.float64)),)),
    Mutant("seven scales", "entries [8, 8] by scales [7, 1], whose", (tensor("scales", SCALES[:7]),)),
    Mutant("scales column", "entries [8, 8] by scales [8, 1, 1], whose", (tensor("scales", SCALES[:, None]),)),
    Mutant("codebook half", "Mul of float16 entries by float32", (tensor("codebook", CODEBOOK.astype(np.float16)),)),
    Mutant("codebook double", "DOUBLE [16], is not FLOAT", (tensor("codebook", CODEBOOK.astype(np.float64)),)),
    Mutant("codebook short", "codebook 'dec/codebook', FLOAT [15], is not [16]", (tensor("codebook", CODEBOOK[:15]),)),
    Mutant("codebook long", "FLOAT [17], is not [16]", (tensor("codebook", np.zeros(17, np.float32)),)),
    Mutant("codebook rank 2", "FLOAT [16, 1], is not [16]", (tensor("codebook", CODEBOOK[:, None]),)),
    Mutant("codebook formal", "codebook 'dec/codebook' is an input, not a Constant",
           (formal("dec/codebook", CODEBOOK),), IN_FUNCTION),
]  # fmt: skip

# One other operator for each role of the chain.
OPERATORS = [
    Mutant(f"{role} is {op}", f"{op}", (operator(role, op),), {"opset": 18, **base}, later)
    for role, op, base, later in (
        ("Mul", "Add", {}, False),
        ("Mul", "Div", {}, False),
        ("Gather", "Add", {}, False),
        ("Concat", "Add", {}, False),
        ("UnsqueezeHigh", "Squeeze", {}, False),
        ("UnsqueezeLow", "Squeeze", {}, False),
        ("UnsqueezeScales", "Squeeze", {}, False),
        ("UnsqueezeScales", "Reshape", {}, False),
        ("Slice", "Pad", {}, False),
        ("ToMatrix", "Expand", {}, False),
        ("Flatten", "Expand", {}, False),
        ("ToBlocks", "Expand", {}, False),
        ("Cast", "Floor", {}, False),
        ("CastLow", "Floor", {"casts": 2}, False),
        ("Round", "Floor", HALF, False),
        ("Transpose", "Flatten", {"perm": "absent"}, False),
    )
] + [
    Mutant("scales along columns", "a weight [6, 10] of scales along 8 columns of 8",
           (inputs("Mul", "Gather", "dec/scales"),)),
    Mutant("left", "the weight on its left, and 'x' of a rank that is not known",
           (on_the_left,), {"x_shape": (2, 3, 6)}),
    Mutant("left of a computed value", "the weight on its left, and 'new/MatMul' of a rank that is not known",
           (on_the_left, before("MatMul", 1, "Neg"))),
    Mutant("left of a default Transpose", "the weight on its left, and 'new/MatMul' of a rank that is not known",
           (on_the_left, before("MatMul", 1, "Transpose"))),
    Mutant("left of a Transpose of three", "the weight on its left, and 'new/MatMul' of a rank that is not known",
           (on_the_left, before("MatMul", 1, "Transpose", perm=[0, 2, 1])), {"x_shape": (2, 3, 6)}),
    Mutant("left of an unknown shape", "the weight on its left, and 'x' of a rank that is not known",
           (on_the_left, lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"))),
    Mutant("left of a formal input", "'formal_x' of a rank that is not known",
           (on_the_left,), {**IN_FUNCTION, "rows": 8, "cols": 8}),
    Mutant("left of a Loop's input", "'tick' of a rank that is not known",
           (lambda m: find_node(m, "dec/MatMul").input.__setitem__(slice(None), ["dec/ToMatrix_out", "tick"]),),
           {"place": ["Loop"]}),
    Mutant("fused of three", "FusedMatMul with 3 inputs, not 2", (fused, inputs("MatMul", "x", "ToMatrix", "x"))),
    Mutant("fused to two", "FusedMatMul with 2 outputs, not one",
           (fused, lambda m: find_node(m, "dec/MatMul").output.append("z"))),
    Mutant("fused with beta", "FusedMatMul with attribute 'beta', unknown", (fused, attribute("MatMul", beta=1.0))),
    Mutant("fused with a whole alpha", "FusedMatMul with attribute 'alpha', unknown or not written",
           (fused, attribute("MatMul", alpha=1))),
    Mutant("fused reference", "FusedMatMul with attribute 'transB', unknown or not written",
           (fused, written("MatMul", reference(INT, "transB", "turned"))), IN_FUNCTION),
    Mutant("fused, batches of A", "FusedMatMul with transBatchA 1, not 0", (fused, attribute("MatMul", transBatchA=1))),
    Mutant("fused, batches of B", "FusedMatMul with transBatchB 1, not 0", (fused, attribute("MatMul", transBatchB=1))),
    Mutant("fused, turned A", "FusedMatMul with transA, and 'x' of a rank that is not known",
           (fused, attribute("MatMul", transA=1)), {"x_shape": (2, 3, 6)}),
    Mutant("own FusedMatMul", "FusedMatMul is a function of this model, not an operator",
           (fused, own_function("FusedMatMul", "com.microsoft"))),
    Mutant("undefined bias", "value 'nothing' is not defined",
           (operator("MatMul", "Gemm"), inputs("MatMul", "x", "ToMatrix", "nothing"))),
    Mutant("absolute value", "Abs, not Mul by scales", (before("MatMul", 1, "Abs"),)),
    Mutant("slice cut off", "Reshape of 64 elements to [6, 10], which", (inputs("ToMatrix", "Flatten", "dec/shape"),)),
]  # fmt: skip

# walk.py: attributes, literals, names, functions.
WALK = [
    Mutant("fmod", "Mod with fmod 1, not 0", (attribute("Mod", fmod=1),)),
    Mutant("gather axis", "Gather with axis 1, not 0", (attribute("Gather", axis=1),)),
    Mutant("saturate", "Cast with saturate 0, not 1", (attribute("Cast", saturate=0),), LAST),
    Mutant("round mode", "Cast with round_mode down, not up", (attribute("Round", round_mode="down"),),
           {"rounding": "float16", **LAST}),
    Mutant("unknown attribute", "Mod with unknown attribute 'mode'", (attribute("Mod", mode=1),)),
    Mutant("unknown at this opset", "unknown attribute 'saturate'", (attribute("Cast", saturate=1),)),
    Mutant("attribute of another type", "Mod with fmod of another type than INT", (attribute("Mod", fmod=0.0),)),
    Mutant("perm of another type", "perm of another type than INTS", (attribute("Transpose", perm=1),),
           {"perm": "written"}),
    Mutant("gemm attribute", "Gemm with unknown attribute 'kind'",
           (operator("MatMul", "Gemm"), attribute("MatMul", kind=1))),
    Mutant("two axes written", "Concat with attribute 'axis' written twice",
           (written("Concat", helper.make_attribute("axis", 0)),)),
    Mutant("attribute reference", "Mod with fmod taken from the function's attribute 'fmod'",
           (written("Mod", reference(INT, "fmod", "fmod")),), IN_FUNCTION),
    Mutant("axis reference", "Concat with axis taken from the function's attribute 'axis'",
           (without("Concat", "axis"), written("Concat", reference(INT, "axis", "axis"))), IN_FUNCTION),
    Mutant("identity attribute", "Identity with unknown attribute 'kept'", (before("Mul", 0, "Identity", kept=1),)),
    Mutant("two outputs", "Mul with 2 outputs, not one", (more_outputs,)),
    Mutant("three inputs", "Mul with 3 inputs, not 2 to 2", (more_inputs,)),
    Mutant("matmul of three", "MatMul with 3 inputs", (lambda m: find_node(m, "dec/MatMul").input.append("x"),)),
    Mutant("other domain", "other::Mul, not Mul", (operator("Mul", "Mul", "other"),)),
    Mutant("own Mul", "Mul, not Mul", (own_function("Mul"),)),
    Mutant("own MatMul", "MatMul is a function of this model, not an operator", (own_function("MatMul"),)),
    Mutant("opset 12", "opset 12, not 13 to 28", (opset(12),)),
    Mutant("opset 29", "opset 29, not 13 to 28", (opset(29),)),
    Mutant("no opset", "opset 0, not 13 to 28", (lambda m: m.opset_import.pop(),)),
    Mutant("literal int32", "literal 'other/Mod/1' is INT32, not INT64", (literal("Mod", 1, [16], np.int32),)),
    Mutant("slice literal int32", "is INT32, not INT64", (literal("Slice", 2, [60], np.int32),)),
    Mutant("literal float", "is FLOAT, not INT64", (literal("Div", 1, [16], np.float32),)),
    Mutant("long literal", "has 17 elements, more than 16", (literal("Mod", 1, [16] * 17),)),
    Mutant("cut literal", "holds 7 bytes or values, not 1 values", (lambda m: set_raw(m, "dec/mod_by", bytes(7)),)),
    Mutant("odd bytes", "holds 9 bytes or values, not 1 values", (lambda m: set_raw(m, "dec/mod_by", bytes(9)),)),
    Mutant("short literal", "holds 8 bytes or values, not 2 values", (lambda m: set_raw(m, "dec/shape", bytes(8)),)),
    Mutant("empty bytes", "holds 0 bytes or values, not 1 values", (lambda m: set_raw(m, "dec/mod_by", b""),)),
    Mutant("empty bytes over values", "holds 0 bytes or values, not 1 values",
           (lambda m: set_raw(m, "dec/mod_by", b""),), {"literals": "typed"}),
    Mutant("literal in segments", "literal 'dec/mod_by' is stored in segments",
           (lambda m: setattr(named(m, "dec/mod_by").segment, "end", 1),)),
    Mutant("external literal", "literal 'dec/mod_by' is external data, and no folder is given",
           (external("dec/mod_by"),)),
    Mutant("computed literal", "'dec/mod_by' is computed by Abs",
           (add("sixteen", np.array([16])), computed("dec/mod_by", "sixteen"))),
    Mutant("computed packed", f"BitwiseNot, not {TAKEN}", (before("Cast", 0, "BitwiseNot"),),
           {"opset": 18}),
    Mutant("computed scales", "Abs, not a constant of scales", (before("UnsqueezeScales", 0, "Abs"),)),
    Mutant("computed codebook", "Abs, not a constant of codebook", (before("Gather", 0, "Abs"),)),
    Mutant("overridable packed", "initializer 'dec/packed' is also a graph input", (listed("dec/packed"),)),
    Mutant("overridable scales", "initializer 'dec/scales' is also a graph input", (listed("dec/scales"),)),
    Mutant("overridable codebook", "initializer 'dec/codebook' is also a graph input", (listed("dec/codebook"),)),
    Mutant("overridable literal", "initializer 'dec/mod_by' is also a graph input", (listed("dec/mod_by"),)),
    Mutant("sparse packed", "initializer 'dec/packed' is sparse", (sparse("dec/packed"),)),
    Mutant("sparse scales", "initializer 'dec/scales' is sparse", (sparse("dec/scales"),)),
    Mutant("value defined twice", "value 'dec/Gather_out' is defined more than once", (twice("dec/Gather_out"),)),
    Mutant("initializer and node", "value 'dec/packed' is defined more than once", (twice("dec/packed"),)),
    Mutant("initializer twice", "value 'dec/scales' is defined more than once", (add("dec/scales", SCALES),)),
    Mutant("hidden in the body", "value 'dec/packed' is defined more than once", (hidden,), CAPTURED),
    Mutant("hidden for the product", "value 'dec/packed' is defined more than once", (hidden,),
           {"place": ["Loop"], "hold": "chain"}),
    Mutant("undefined x", "value 'nothing' is not defined", (inputs("MatMul", "nothing", "ToMatrix"),)),
    Mutant("no x", "value '' is not defined", (inputs("MatMul", "", "ToMatrix"),)),
    Mutant("two attributes", "Constant with 2 attributes, not one",
           (constant("dec/mod_by", helper.make_attribute("value_int", 16), helper.make_attribute("value_ints", [16])),),
           CONSTANTS),
    Mutant("string", "Constant with value_string;",
           (constant("dec/mod_by", helper.make_attribute("value_string", "16")),),
           CONSTANTS),
    Mutant("constant reference", "Constant with value_int taken from the function's attribute 'by'",
           (constant("dec/mod_by", reference(INT, "value_int", "by")),), IN_FUNCTION),
    Mutant("literal formal", "literal 'dec/mod_by' is an input; an initializer or a Constant is expected",
           (formal("dec/mod_by", np.array([16])),), IN_FUNCTION),
    Mutant("never called", "is an input of function test.layers::Layer0, which no node calls",
           (uncalled,), IN_FUNCTION),
    Mutant("call without packed", "gives no 'formal_dec/packed'; an initializer is expected",
           (call(0, None),), **TWO_CALLS),
    Mutant("call cut short", "gives no 'formal_dec/scales'; an initializer is expected",
           (cut_call,), **TWO_CALLS),
    Mutant("call with a graph input", "'given' is an input of its graph",
           (argument("given", PACKED), call(0, "given")), **TWO_CALLS),
    Mutant("call with other scales", "FLOAT [7] or FLOAT [8], is not of one shape",
           (add("seven", SCALES[:7]), call(1, "seven")), **TWO_CALLS),
    Mutant("call with other bytes", "INT8 [32] or UINT8 [32], is not UINT8",
           (add("signed", PACKED.astype(np.int8)), call(0, "signed")), **TWO_CALLS),
    Mutant("call with an overridable", "initializer 'main/1/dec/packed' is also a graph input",
           (listed("main/1/dec/packed"),), **TWO_CALLS),
]  # fmt: skip

MUTANTS = [*CHAIN, *OPERATORS, *WALK]


def named(model: onnx.ModelProto, name: str) -> TensorProto:
    """The initializer of this name."""
    return next(t for t in model.graph.initializer if t.name == name)


def set_raw(model: onnx.ModelProto, name: str, data: bytes) -> None:
    """Replace an initializer's bytes, its dims kept."""
    named(model, name).raw_data = data
