"""Models with 4-bit decode chains for all tests: every spelling is an option, every weight has a NumPy oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FUNCTION_DOMAIN = "test.layers"
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ONNX_TYPE = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

# Written out here, not taken from lut4tool: the oracle shares no code with what it judges.
_NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
_FP4 = """0 0.005208333 0.6666667 1 0.3333333 0.5 0.1666667 0.25
-0.0 -0.005208333 -0.6666667 -1 -0.3333333 -0.5 -0.1666667 -0.25"""
CODEBOOKS = {name: np.array(text.split(), np.float32) for name, text in (("nf4", _NF4), ("fp4", _FP4))}


_INTEGER_ROLES = {"Cast", "CastLow", "Div", "Mod", "UnsqueezeHigh", "UnsqueezeLow", "Concat", "ToBlocks"}
_FLAT_ROLES = {"Cast", "CastLow", "Div", "Mod", "Flatten", "Slice"}
_FLOAT_ROLES = {"Gather", "UnsqueezeScales", "Mul", "Flatten", "Slice", "ToMatrix"}


@dataclass(frozen=True, eq=False)
class Chain:
    """What a chain means (the first fields) and how it is spelled (the others)."""

    rows: int = 6
    cols: int = 10
    block: int = 8
    rounding: str = "none"  # none, float16, bfloat16
    adjoint: bool = False  # the rounded weight is cast back to float32
    perm: str = "none"  # none, written, absent: a Transpose with and without its attribute
    codebook: str | np.ndarray = "nf4"
    seed: int = 0
    packed: np.ndarray | None = None  # drawn from the seed where not given
    scales: np.ndarray | None = None

    prefix: str = "dec/"  # of every node and value name
    leaf_prefix: str | None = None  # of packed, scales and codebook, where another chain shares them
    named: bool = True
    domain: str = ""  # or ai.onnx, which the model then imports; onnx.reference does not run it
    opset: int = 17
    literals: str = "initializer"  # initializer, typed, constant, attribute, mixed
    leaves: str = "initializer"  # initializer, typed, constant, or one of them each: "constant initializer typed"
    scalar: bool = False  # literals of Div, Mod and Unsqueeze of shape [] for [1]
    axis: int = 1  # or -1
    step: bool = True
    defaults: bool = False  # attributes at their default are written
    swap: bool = False  # Mul(scales, values)
    casts: int = 1  # 2: each nibble has a Cast of its own
    identities: tuple[str, ...] = ()  # roles whose inputs all pass an Identity; "*" is every role

    @property
    def blocks(self) -> int:
        """Blocks over the flattened weight."""
        return -(-self.rows * self.cols // self.block)

    @property
    def shape(self) -> tuple[int, int]:
        """[K, N] of the product's weight."""
        return (self.rows, self.cols) if self.perm == "none" else (self.cols, self.rows)

    @property
    def weight_dtype(self) -> str:
        """What the weight is rounded to."""
        return "float32" if self.rounding == "none" else self.rounding

    @property
    def dtype(self) -> str:
        """The product's type."""
        return "float32" if self.adjoint else self.weight_dtype


@dataclass(eq=False)
class Parts:
    """A chain as nodes, in order, and tensors; `packed`, `scales`, `codebook` and `oracle` are its values."""

    chain: Chain
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    weight: str = ""
    packed: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    scales: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    codebook: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def oracle(self) -> np.ndarray:
        """The matrix [K, N] that the product multiplies by, in its type."""
        return decode(self.chain, self.packed, self.scales, self.codebook)


def decode(chain: Chain, packed: np.ndarray, scales: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """The chain's meaning in plain NumPy."""
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    with np.errstate(all="ignore"):
        flat = codebook.astype(np.float32)[codes] * np.repeat(scales.astype(np.float32), chain.block)
        matrix = flat[: chain.rows * chain.cols].reshape(chain.rows, chain.cols)
        if chain.rounding != "none":
            matrix = matrix.astype(HALVES[chain.rounding])
        if chain.adjoint:
            matrix = matrix.astype(np.float32)
    return matrix if chain.perm == "none" else np.ascontiguousarray(matrix.T)


class _Speller:
    """Writes one chain's nodes and tensors in the spelling it asks for."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.parts = Parts(chain)
        self.literal_count = 0

    def node(self, op: str, role: str, inputs: Sequence[str], **attributes: Any) -> str:
        chain = self.chain
        if "*" in chain.identities or role in chain.identities:
            inputs = [self.identity(name, f"{role}Input{i}") for i, name in enumerate(inputs)]
        output = f"{chain.prefix}{role}_out"
        self._add(op, role, inputs, output, attributes)
        return output

    def identity(self, name: str, role: str) -> str:
        output = f"{self.chain.prefix}{role}_same"
        self._add("Identity", role, [name], output, {})
        return output

    def tensor(self, name: str, array: np.ndarray, spelling: str) -> str:
        """A constant of the chain: an initializer (raw or typed fields), or a Constant node (tensor or attribute)."""
        if spelling in ("initializer", "typed"):
            self.parts.tensors.append(make_tensor(name, array, typed=spelling == "typed"))
            return name
        attribute: dict[str, Any] = {"value": make_tensor("", array, typed=self.literal_count % 2 == 1)}
        if spelling == "attribute" and array.dtype in (np.int64, np.float32):
            kind = "value_int" if array.dtype == np.int64 else "value_float"
            attribute = {kind: array.item()} if array.ndim == 0 else {kind + "s": array.tolist()}
        self._add("Constant", name.removeprefix(self.chain.prefix), [], name, attribute)
        return name

    def literal(self, role: str, values: Any) -> str:
        """An INT64 literal; `mixed` takes the spellings in turn."""
        self.literal_count += 1
        kinds = ("initializer", "typed", "constant", "attribute")
        spelling = kinds[self.literal_count % 4] if self.chain.literals == "mixed" else self.chain.literals
        return self.tensor(f"{self.chain.prefix}{role}", np.array(values, np.int64), spelling)

    def _add(self, op: str, role: str, inputs: Sequence[str], output: str, attributes: Mapping[str, Any]) -> None:
        name = f"{self.chain.prefix}{role}"
        self.parts.nodes.append(helper.make_node(op, inputs, [output], name, domain=self.chain.domain, **attributes))


def spell(chain: Chain) -> Parts:
    """Write the chain of DESIGN section 1. Node names are prefix + role; a node's value is its name + "_out"."""
    writer = _Speller(chain)
    parts = writer.parts
    rng = np.random.default_rng(chain.seed)
    size = chain.blocks * chain.block // 2
    parts.packed = rng.integers(0, 256, size, dtype=np.uint8) if chain.packed is None else chain.packed
    drawn = rng.uniform(0.01, 2, chain.blocks).astype(np.float32)
    parts.scales = drawn if chain.scales is None else chain.scales
    parts.codebook = CODEBOOKS[chain.codebook] if isinstance(chain.codebook, str) else chain.codebook

    spellings = chain.leaves.split() * (1 if " " in chain.leaves else 3)
    leaf = chain.prefix if chain.leaf_prefix is None else chain.leaf_prefix
    packed = writer.tensor(f"{leaf}packed", parts.packed, spellings[0])
    scales = writer.tensor(f"{leaf}scales", parts.scales, spellings[1])
    codebook = writer.tensor(f"{leaf}codebook", parts.codebook, spellings[2])

    one: Callable[[int], Any] = (lambda value: value) if chain.scalar else (lambda value: [value])
    written = chain.defaults
    reshape = {"allowzero": 0} if written and chain.opset >= 14 else {}
    cast: dict[str, Any] = {"saturate": 1} if written and chain.opset >= 19 else {}
    cast |= {"round_mode": "up"} if written and chain.opset >= 24 else {}

    codes = writer.node("Cast", "Cast", [packed], to=TensorProto.INT64, **cast)
    other = codes if chain.casts == 1 else writer.node("Cast", "CastLow", [packed], to=TensorProto.INT64, **cast)
    high = writer.node("Div", "Div", [codes, writer.literal("div_by", one(16))])
    low = writer.node("Mod", "Mod", [other, writer.literal("mod_by", one(16))], **({"fmod": 0} if written else {}))
    high = writer.node("Unsqueeze", "UnsqueezeHigh", [high, writer.literal("high_axis", one(chain.axis))])
    low = writer.node("Unsqueeze", "UnsqueezeLow", [low, writer.literal("low_axis", one(chain.axis))])
    pairs = writer.node("Concat", "Concat", [high, low], axis=chain.axis)
    index = writer.node("Reshape", "ToBlocks", [pairs, writer.literal("block_shape", [-1, chain.block])], **reshape)
    values = writer.node("Gather", "Gather", [codebook, index], **({"axis": 0} if written else {}))
    column = writer.node("Unsqueeze", "UnsqueezeScales", [scales, writer.literal("scales_axis", one(chain.axis))])
    product = writer.node("Mul", "Mul", [column, values] if chain.swap else [values, column])
    flat = writer.node("Reshape", "Flatten", [product, writer.literal("flat_shape", [-1])], **reshape)
    cut = [writer.literal("start", [0]), writer.literal("end", [chain.rows * chain.cols]), writer.literal("cut", [0])]
    cut += [writer.literal("step", [1])] if chain.step else []
    flat = writer.node("Slice", "Slice", [flat, *cut])
    shape = writer.literal("shape", [chain.rows, chain.cols])
    value = writer.node("Reshape", "ToMatrix", [flat, shape], **reshape)
    if chain.rounding != "none":
        value = writer.node("Cast", "Round", [value], to=ONNX_TYPE[chain.rounding], **cast)
    if chain.adjoint:
        value = writer.node("Cast", "Widen", [value], to=TensorProto.FLOAT, **cast)
    if chain.perm != "none":
        value = writer.node("Transpose", "Transpose", [value], **({"perm": [1, 0]} if chain.perm == "written" else {}))
    parts.weight = value
    return parts


@dataclass(eq=False)
class Body:
    """Nodes and tensors of one level; its last node makes `output`."""

    nodes: list[onnx.NodeProto]
    tensors: list[TensorProto]
    output: str
    functions: list[onnx.FunctionProto] = field(default_factory=list)


@dataclass(eq=False)
class Built:
    """A model, feeds for it, and the parts of its chains (the first is the one the model is about)."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    parts: list[Parts]

    @property
    def oracle(self) -> np.ndarray:
        """The first chain's weight [K, N]."""
        return self.parts[0].oracle

    @property
    def expected(self) -> np.ndarray:
        """x @ weight of the first chain in float64."""
        return self.feeds["x"].astype(np.float64) @ self.oracle.astype(np.float64)


def build(
    chain: Chain | None = None,
    *,
    place: Sequence[str] = (),
    hold: str = "inside",
    products: int = 1,
    x_shape: Sequence[int] | None = None,
    ir: int = 10,
    consumers: Iterable[str] = (),
    outputs: Iterable[str] = (),
    check: bool = True,
    **spelling: Any,
) -> Built:
    """A model with one chain and `products` MatMuls by it; `spelling` are fields of Chain.

    place: control flow and functions around it, outermost first: "If" (its else_branch holds a chain of the same node
        names and another seed), "Loop" and "Scan" (two iterations, outputs stacked), "function".
    hold: what is innermost: "inside" everything; "packed" packed and scales stay outside; "leaves" all tensors do;
        "chain" the whole chain does and only the product is innermost.
    consumers: roles whose value is also used by an Identity to a graph output (main graph only).
    outputs: roles whose value is itself a graph output (main graph only).
    """
    chain = replace(chain or Chain(), **spelling)
    parts = [spell(chain)]
    inner, outer = _innermost(parts[0], products, hold)
    feeds = {"x": _features(chain, x_shape)}
    for kind in reversed(place):
        if kind == "If":
            other = spell(replace(chain, seed=chain.seed + 100, packed=None, scales=None))
            alternative, apart = _innermost(other, products, hold)
            if any(tensor.name in {t.name for t in outer.tensors} for tensor in apart.tensors) or apart.nodes:
                alternative = inner  # what is outside is shared, so are the branches
            else:
                parts.append(other)
            inner = _if(inner, alternative, chain)
            feeds["cond"] = np.array(True)
        else:
            inner = {"Loop": _loop, "Scan": _scan, "function": _function}[kind](inner, chain)
    nodes, tensors = outer.nodes + inner.nodes, outer.tensors + inner.tensors
    results = [inner.output, *(node.output[0] for node in inner.nodes if node.op_type == "MatMul")]
    names = list(dict.fromkeys(results))
    for role in consumers:
        nodes.append(helper.make_node("Identity", [f"{chain.prefix}{role}_out"], [f"{role}_seen"], domain=chain.domain))
        names.append(f"{role}_seen")
    names += [f"{chain.prefix}{role}_out" for role in outputs]
    inputs = [value_of(name, array) for name, array in feeds.items()]
    rank = feeds["x"].ndim + sum(kind in ("Loop", "Scan") for kind in place)
    graph = helper.make_graph(nodes, "g", inputs, [result_of(name, chain, rank) for name in names], tensors)
    model = assemble(graph, chain.opset, ir, inner.functions, chain.domain)
    if not chain.named:
        forget_names(model)
    if check:
        onnx.checker.check_model(model)
    return Built(model, feeds, parts)


def inject_chain(model: onnx.ModelProto, chain: Chain | None = None, **spelling: Any) -> Built:
    """Append a chain with its own graph input and output to a copy of any model of opset 13 or more.

    The chain's names begin with "injected/", its input is "injected/x" and its output "injected/y".
    """
    model = copy.deepcopy(model)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if not opset:
        opset = 17
        model.opset_import.append(helper.make_opsetid("", opset))
    chain = replace(chain or Chain(), prefix="injected/", opset=opset, **spelling)
    parts = spell(chain)
    feeds = {"injected/x": _features(chain, None)}
    graph = model.graph
    graph.node.extend(parts.nodes)
    graph.node.append(
        helper.make_node("MatMul", ["injected/x", parts.weight], ["injected/y"], "injected/MatMul", domain=chain.domain)
    )
    graph.initializer.extend(parts.tensors)
    graph.input.append(value_of("injected/x", feeds["injected/x"]))
    if model.ir_version < 4:
        graph.input.extend(value_of(t.name, numpy_helper.to_array(t)) for t in parts.tensors)
    result = helper.make_tensor_value_info("injected/y", ONNX_TYPE[chain.dtype], [3, chain.shape[1]])
    graph.output.append(result)
    return Built(model, feeds, [parts])


def build_many(chains: Sequence[Chain], *, ir: int = 10) -> Built:
    """A model with a product y0, y1, ... for each chain, all of one K; chains that name one leaf share it."""
    parts = [spell(chain) for chain in chains]
    feeds = {"x": _features(chains[0], None)}
    nodes, tensors = [], {}
    for index, part in enumerate(parts):
        tensors |= {tensor.name: tensor for tensor in part.tensors}
        nodes += [*part.nodes, helper.make_node("MatMul", ["x", part.weight], [f"y{index}"], f"MatMul{index}")]
    names = [result_of(f"y{index}", part.chain) for index, part in enumerate(parts)]
    graph = helper.make_graph(nodes, "g", [value_of("x", feeds["x"])], names, list(tensors.values()))
    return Built(assemble(graph, chains[0].opset, ir), feeds, parts)


def build_calls(count: int = 2, *, depth: int = 1, ir: int = 10, **spelling: Any) -> Built:
    """One function with a chain whose packed and scales are formal inputs, called `count` times with other weights.

    depth: how many functions stand one in another; formal inputs are named apart from what is bound to them.
    """
    parts = [spell(replace(Chain(literals="constant", leaves="initializer initializer constant"),
                           seed=seed, **spelling)) for seed in range(count)]  # fmt: skip
    chain = parts[0].chain
    inner, _ = _innermost(parts[0], 1, "packed")
    for _ in range(depth):
        inner = _function(inner, chain)
    nodes, tensors = [], []
    for index, part in enumerate(parts):
        call = copy.deepcopy(inner.nodes[0])
        call.name = f"Call{index}"
        rename([call], {tensor.name: f"main/{index}/{tensor.name}" for tensor in part.tensors} | {"y": f"y{index}"})
        call.output[0] = f"y{index}"
        nodes.append(call)
        for tensor in part.tensors:
            tensor.name = f"main/{index}/{tensor.name}"
        tensors += part.tensors
    feeds = {"x": _features(chain, None)}
    names = [result_of(f"y{index}", chain) for index in range(count)]
    graph = helper.make_graph(nodes, "g", [value_of("x", feeds["x"])], names, tensors)
    return Built(assemble(graph, chain.opset, ir, inner.functions), feeds, parts)


def assemble(
    graph: onnx.GraphProto, opset: int, ir: int, functions: Sequence[onnx.FunctionProto] = (), domain: str = ""
) -> onnx.ModelProto:
    """A model of a graph; in IR 3 its initializers are listed as inputs, as that version wants."""
    if ir < 4:
        graph.input.extend(value_of(t.name, numpy_helper.to_array(t)) for t in graph.initializer)
    imports = [helper.make_opsetid(domain, opset)]
    if functions:
        imports.append(helper.make_opsetid(FUNCTION_DOMAIN, 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=ir, functions=functions, producer_name="build")


def make_tensor(name: str, array: np.ndarray, *, typed: bool = False) -> TensorProto:
    """A tensor in raw data, or in its type's own field."""
    if not typed:
        return numpy_helper.from_array(array, name)
    return helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.reshape(-1))


def value_of(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    """The declaration of an input that has this array's type and shape."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def result_of(name: str, chain: Chain, rank: int = 2) -> onnx.ValueInfoProto:
    """The declaration of a product (of that rank) or of a value of the chain as an output, of any size."""
    role = name.removeprefix(chain.prefix).removesuffix("_seen").removesuffix("_out")
    kind = ONNX_TYPE["float32" if role in _FLOAT_ROLES else chain.weight_dtype if role == "Round" else chain.dtype]
    shape = [None] * (1 if role in _FLAT_ROLES else rank if role == name else 2)
    return helper.make_tensor_value_info(name, TensorProto.INT64 if role in _INTEGER_ROLES else kind, shape)


def find_node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    """The first node of this name, in the graph, its subgraphs or the functions."""
    waiting = [model.graph.node, *(function.node for function in model.functions)]
    for nodes in waiting:
        for node in nodes:
            if node.name == name:
                return node
            waiting += [attribute.g.node for attribute in node.attribute if attribute.HasField("g")]
    raise KeyError(name)


def forget_names(model: onnx.ModelProto) -> None:
    """Leave every node nameless."""
    waiting = [model.graph.node, *(function.node for function in model.functions)]
    for nodes in waiting:
        for node in nodes:
            node.name = ""
            waiting += [attribute.g.node for attribute in node.attribute if attribute.HasField("g")]


def rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename the inputs of nodes and of those in their subgraphs."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            rename(attribute.g.node, names)


def _features(chain: Chain, shape: Sequence[int] | None) -> np.ndarray:
    """x in the product's type, drawn from the chain's seed."""
    rng = np.random.default_rng(chain.seed + 7)
    values = rng.standard_normal(tuple(shape) if shape is not None else (3, chain.shape[0]))
    return values.astype(HALVES.get(chain.dtype, np.float32))


def _innermost(parts: Parts, products: int, hold: str) -> tuple[Body, Body]:
    """Split a chain and its products into what is innermost and what stays outside."""
    chain = parts.chain
    matmuls = [
        helper.make_node("MatMul", ["x", parts.weight], [f"y{index or ''}"], f"{chain.prefix}MatMul{index or ''}",
                         domain=chain.domain)
        for index in range(products)
    ]  # fmt: skip
    if hold == "chain":
        return Body(matmuls, [], "y"), Body(parts.nodes, parts.tensors, parts.weight)
    leaves = [
        f"{chain.prefix if chain.leaf_prefix is None else chain.leaf_prefix}{leaf}" for leaf in ("packed", "scales")
    ]
    away: Callable[[str], bool] = {
        "inside": lambda name: False,
        "packed": lambda name: name in leaves,
        "leaves": lambda name: True,
    }[hold]
    constants = [node for node in parts.nodes if node.op_type == "Constant" and away(node.output[0])]
    inside = [node for node in parts.nodes if not any(node is constant for constant in constants)]
    outer = Body(constants, [tensor for tensor in parts.tensors if away(tensor.name)], "")
    return Body(inside + matmuls, [tensor for tensor in parts.tensors if not away(tensor.name)], "y"), outer


def _graph(name: str, body: Body, inputs: Sequence[onnx.ValueInfoProto], chain: Chain) -> onnx.GraphProto:
    """A subgraph; its output has a type and no shape."""
    output = helper.make_tensor_value_info(body.output, ONNX_TYPE[chain.dtype], None)
    return helper.make_graph(body.nodes, name, inputs, [output], body.tensors)


def _if(body: Body, other: Body, chain: Chain) -> Body:
    branches = {
        "then_branch": _graph("then", body, [], chain),
        "else_branch": _graph("else", other, [], chain),
    }
    node = helper.make_node("If", ["cond"], [f"{body.output}_if"], f"{chain.prefix}If", **branches)
    return Body([node], [], node.output[0], body.functions)


def _loop(body: Body, chain: Chain) -> Body:
    going = value_of("going", np.array(True))
    inputs = [value_of("tick", np.array(0)), going]
    keep = helper.make_node("Identity", ["going"], ["still"])
    inner = Body([*body.nodes, keep], body.tensors, body.output)
    graph = _graph("body", inner, inputs, chain)
    graph.output.insert(0, value_of("still", np.array(True)))
    count = helper.make_node("Constant", [], [f"{body.output}_trips"], value=numpy_helper.from_array(np.array(2)))
    always = helper.make_node("Constant", [], [f"{body.output}_on"], value=numpy_helper.from_array(np.array(True)))
    node = helper.make_node("Loop", [count.output[0], always.output[0]], [f"{body.output}_loop"],
                            f"{chain.prefix}Loop", body=graph)  # fmt: skip
    return Body([count, always, node], [], node.output[0], body.functions)


def _scan(body: Body, chain: Chain) -> Body:
    ticks = numpy_helper.from_array(np.zeros(2, np.float32))
    count = helper.make_node("Constant", [], [f"{body.output}_ticks"], value=ticks)
    inputs = [value_of("tick", np.float32(0))]
    node = helper.make_node("Scan", [count.output[0]], [f"{body.output}_scan"], f"{chain.prefix}Scan",
                            body=_graph("body", body, inputs, chain), num_scan_inputs=1)  # fmt: skip
    return Body([count, node], [], node.output[0], body.functions)


def _function(body: Body, chain: Chain) -> Body:
    """Put a body into a function: what it does not make itself becomes a formal input `formal_...`."""
    if body.tensors:
        raise ValueError(
            f"a function holds no initializer: spell {body.tensors[0].name} as a Constant or hold it outside"
        )
    name = f"Layer{len(body.functions)}"
    free = list(dict.fromkeys(_free(body.nodes, frozenset())))
    nodes = copy.deepcopy(body.nodes)
    rename(nodes, {value: f"formal_{value}" for value in free})
    imports = [helper.make_opsetid("", chain.opset), helper.make_opsetid(FUNCTION_DOMAIN, 1)]
    function = helper.make_function(
        FUNCTION_DOMAIN, name, [f"formal_{value}" for value in free], [body.output], nodes, imports
    )
    call = helper.make_node(name, free, [f"{body.output}_call"], f"{chain.prefix}{name}", domain=FUNCTION_DOMAIN)
    return Body([call], [], call.output[0], [*body.functions, function])


def _free(nodes: Iterable[onnx.NodeProto], known: frozenset[str]) -> list[str]:
    """Names that nodes read and do not make, in order of use."""
    free: list[str] = []
    made = set(known)
    for node in nodes:
        free += [name for name in node.input if name and name not in made]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                own = {value.name for value in attribute.g.input} | {tensor.name for tensor in attribute.g.initializer}
                free += _free(attribute.g.node, frozenset(made | own))
        made.update(node.output)
    return free
