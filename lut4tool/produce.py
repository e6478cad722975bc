"""Producing: chosen float weights of a model, spelled as the canonical 4-bit decode chain.

The result has standard operators only, so any ONNX runtime runs it; encode.py makes the numbers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper, version_converter

from lut4tool.encode import ProduceError, encode, load_codebook
from lut4tool.formats import DTYPE_NAME, ONNX_DTYPE, Lookup4Weight
from lut4tool.rewrite.save import check_target, data_bytes, save
from lut4tool.storage import (
    PLAIN,
    Tensors,
    abridged,
    external_tensors,
    location,
    nbytes,
    read_model,
    size_text,
    subgraphs,
)

#: The chain needs opset 13: Unsqueeze takes its axes as an input, and MatMul and Cast know bfloat16.
LEAST_OPSET = 13
#: A weight of fewer blocks than this is left: its chain would be longer than what it saves.
LEAST_BLOCKS = 2

Progress = Callable[[str, int, int], None]

_ROUNDINGS = (None, "float16", "bfloat16")


@dataclass(frozen=True)
class Quantized:
    """One weight that is now a chain; errors are of |decoded - weight| over the largest magnitude of its block."""

    weight: str
    nodes: tuple[str, ...]
    rows: int
    cols: int
    weight_dtype: str
    float_bytes: int
    packed_bytes: int
    max_error: float
    rms_error: float


@dataclass(frozen=True)
class Left:
    """One constant weight of a product that stays float, and why."""

    weight: str
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class QuantizeReport:
    """What was quantized, what was left, and the sizes, external data included, where files were read and written."""

    quantized: tuple[Quantized, ...]
    left: tuple[Left, ...]
    block_size: int
    opset: int  # of the model as it was read
    output_opset: int  # as it is now: where a chain needed it, raised to 13
    input_bytes: int = 0
    output_bytes: int = 0
    notes: tuple[str, ...] = ()  # what a user should know of how it was saved

    def to_json(self) -> dict[str, Any]:
        """The report as plain lists, numbers and strings."""
        return {
            "quantized": [vars(row) | {"nodes": list(row.nodes)} for row in self.quantized],
            "left": [vars(row) | {"nodes": list(row.nodes)} for row in self.left],
            "block_size": self.block_size,
            "opset": self.opset,
            "output_opset": self.output_opset,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "notes": list(self.notes),
        }


# ---- finding the weights


@dataclass(eq=False)
class _Scope:
    """A graph or function while it is edited; `holder` is the index of the parent's node that carries it."""

    owner: onnx.GraphProto | onnx.FunctionProto
    where: str
    opset: int
    inline: bool  # constants must be nodes: in a function, and where an initializer would have to be an input
    parent: _Scope | None = None
    holder: int = 0
    values: dict[str, tuple[_Weight, bool] | None] = field(default_factory=dict)
    literals: dict[str, str] = field(default_factory=dict)
    first: list[onnx.NodeProto] = field(default_factory=list)
    before: dict[int, list[onnx.NodeProto]] = field(default_factory=dict)
    instead: dict[int, list[onnx.NodeProto]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # values that the edit removes

    def find(self, name: str) -> tuple[_Weight, bool] | None:
        """The constant that a name stands for here, and whether transposed."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        return None


@dataclass(frozen=True, eq=False)
class _Use:
    """A product by a weight: node `index` of `scope`, the weight transposed or not."""

    scope: _Scope
    index: int
    transposed: bool

    @property
    def node(self) -> onnx.NodeProto:
        return self.scope.owner.node[self.index]

    @property
    def name(self) -> str:
        return self.scope.where + (self.node.name or f"{self.node.op_type}:{_output(self.node)}")


@dataclass(eq=False)
class _Weight:
    """A constant tensor, every product by it, and the Constant, Identity and Transpose nodes between."""

    name: str
    scope: _Scope
    tensor: TensorProto
    obstacle: str | None = None
    anchor: int | None = None  # the first node of its own scope that needs it
    uses: list[_Use] = field(default_factory=list)
    between: list[tuple[_Scope, int]] = field(default_factory=list)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Its attributes that are written at the node; a function's caller gives the others."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}


def _use_obstacle(node: onnx.NodeProto, index: int) -> str | None:
    """Why input `index` of this node cannot become a chain; None for a product that can be respelled."""
    what = f"{node.op_type} '{node.name or _output(node)}'"
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        return f"it is also used by {what}, which needs it whole"
    if index != 1:
        return f"it is input {index} of {what}; the chain takes the place of input 1"
    if len(node.output) != 1:
        return f"{what} has {len(node.output)} outputs; one is quantized"
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return f"{what} has attributes that its function's callers give; written ones are quantized"
    if node.op_type == "Gemm":
        given = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0} | _attributes(node)
        odd = [f"{name} {given[name]}" for name in ("alpha", "beta", "transA") if given[name] != (name != "transA")]
        if odd or len(given) > 4:
            found = ", ".join(odd) or "attributes of an old version"
            return f"{what} has {found}; alpha 1, beta 1 and transA 0 are quantized"
    return None


class _Finder:
    """Walks a model and lists its constant weights, in graph order, with every use of each."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.scopes: list[_Scope] = []  # a graph before the graphs in it
        self.weights: list[_Weight] = []
        self.ir_version = model.ir_version
        self._walk(_Scope(model.graph, "", _opset(model), inline=model.ir_version < 4))
        for function in model.functions:
            where = f"function {function.domain}::{function.name}/"
            self._walk(_Scope(function, where, _opset(function), inline=True))

    def _walk(self, scope: _Scope) -> None:
        self.scopes.append(scope)
        if isinstance(scope.owner, onnx.GraphProto):
            inputs = {value.name for value in scope.owner.input}
            scope.values.update(dict.fromkeys(inputs))
            for tensor in scope.owner.initializer:
                weight = self._add(scope, tensor.name, tensor)
                if self.ir_version >= 4 and tensor.name in inputs:
                    weight.obstacle = "it is a graph input too, so a caller can replace it"
        for index, node in enumerate(scope.owner.node):
            self._visit(scope, index, node)
        for output in scope.owner.output:
            found = scope.find(output if isinstance(output, str) else output.name)
            if found:
                found[0].obstacle = found[0].obstacle or "it is an output of the graph"

    def _add(self, scope: _Scope, name: str, tensor: TensorProto) -> _Weight:
        weight = _Weight(name, scope, tensor)
        self.weights.append(weight)
        scope.values[name] = (weight, False)
        return weight

    def _visit(self, scope: _Scope, index: int, node: onnx.NodeProto) -> None:
        scope.values.update(dict.fromkeys(node.output))
        standard = node.domain in ("", "ai.onnx")
        if standard and node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            self._add(scope, _output(node), node.attribute[0].t).between.append((scope, index))
        for position, name in enumerate(node.input):
            found = scope.find(name)
            if found is None:
                continue
            weight, transposed = found
            if standard and (node.op_type == "Identity" or _swaps(node, weight.tensor)):
                scope.values[_output(node)] = (weight, transposed != (node.op_type == "Transpose"))
                weight.between.append((scope, index))
                continue
            obstacle = _use_obstacle(node, position)
            weight.obstacle = weight.obstacle or obstacle
            if node.op_type in ("MatMul", "Gemm") and standard and position < 2:
                swapped = node.op_type == "Gemm" and bool(_attributes(node).get("transB"))
                weight.uses.append(_Use(scope, index, transposed != swapped))
                if weight.anchor is None:
                    weight.anchor = _index_in(weight.scope, scope, index)
        for attribute in node.attribute:
            if attribute.type in PLAIN:
                continue
            for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                where = abridged(f"{scope.where}{node.name or f'{node.op_type}:{_output(node)}'}/{attribute.name}/")
                self._walk(_Scope(graph, where, scope.opset, scope.inline, scope, index))


def _output(node: onnx.NodeProto) -> str:
    """Its first output; a malformed node may have none."""
    return next(iter(node.output), "")


def _swaps(node: onnx.NodeProto, tensor: TensorProto) -> bool:
    """Whether a node is the Transpose of a matrix that swaps its axes."""
    return node.op_type == "Transpose" and len(tensor.dims) == 2 and _attributes(node).get("perm", [1, 0]) == [1, 0]


def _index_in(outer: _Scope, scope: _Scope, index: int) -> int:
    """Index of the node of `outer` that is, or carries in its subgraphs, node `index` of `scope`."""
    while scope is not outer:
        assert scope.parent is not None
        scope, index = scope.parent, scope.holder
    return index


def _opset(holder: onnx.ModelProto | onnx.FunctionProto) -> int:
    return next((entry.version for entry in holder.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _weight_obstacle(weight: _Weight, block_size: int, rounding: str | None) -> str | None:
    """Why a weight stays float, as far as its metadata tells."""
    tensor, elements = weight.tensor, math.prod(weight.tensor.dims)
    if tensor.data_type not in DTYPE_NAME:
        names = {number: name.lower() for name, number in TensorProto.DataType.items()}
        return f"its type is {names.get(tensor.data_type, tensor.data_type)}, not {', '.join(ONNX_DTYPE)}"
    if len(tensor.dims) != 2:
        return f"it has {len(tensor.dims)} dimensions; a matrix has 2"
    if weight.obstacle:
        return weight.obstacle
    if elements < LEAST_BLOCKS * block_size:
        return f"it has {elements} elements, fewer than {LEAST_BLOCKS} blocks of {block_size}"
    kind = DTYPE_NAME[tensor.data_type]
    if rounding not in (None, kind) and kind != "float32":
        return f"it is {kind}, which cannot be rounded to {rounding}"
    if any(0 < use.scope.opset < LEAST_OPSET for use in weight.uses) and isinstance(
        weight.scope.owner, onnx.FunctionProto
    ):
        return f"its function imports opset {weight.scope.opset}; the chain needs {LEAST_OPSET}"
    return None


# ---- spelling the chain


class _Speller:
    """Writes chains into scopes, under names that the model does not have yet."""

    def __init__(self, finder: _Finder) -> None:
        self._taken: set[str] = set()
        for scope in finder.scopes:
            for node in scope.owner.node:
                self._taken.update((node.name, *node.input, *node.output))
            if isinstance(scope.owner, onnx.GraphProto):
                for value in (*scope.owner.input, *scope.owner.initializer, *scope.owner.sparse_initializer):
                    self._taken.add(value.values.name if isinstance(value, onnx.SparseTensorProto) else value.name)

    def name(self, wanted: str) -> str:
        """Return `wanted`, or it with a number where the model has that name."""
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name

    def constant(self, scope: _Scope, wanted: str, array: np.ndarray) -> str:
        """Add a constant to a scope and return its name."""
        tensor = numpy_helper.from_array(array, self.name(wanted))
        if isinstance(scope.owner, onnx.GraphProto) and not scope.inline:
            scope.owner.initializer.append(tensor)
        else:
            name = self.name(f"{tensor.name}/Constant")
            scope.first.append(helper.make_node("Constant", [], [tensor.name], name, value=tensor))
        return tensor.name

    def literal(self, scope: _Scope, wanted: str, array: np.ndarray) -> str:
        """A small constant that the chains of one scope share."""
        if wanted not in scope.literals:
            scope.literals[wanted] = self.constant(scope, f"lut4/{wanted}", array)
        return scope.literals[wanted]

    def spell(self, weight: _Weight, encoded: Lookup4Weight, halves: list[str]) -> None:
        """Put the chain of one weight before its first use, and let every use of it take the chain's value."""
        assert weight.anchor is not None
        scope, nodes = weight.scope, weight.scope.before.setdefault(weight.anchor, [])

        def add(op: str, label: str, *inputs: str, **attributes: Any) -> str:
            name = self.name(f"{weight.name}/lut4/{label}")
            value = self.name(f"{name}_out")
            nodes.append(helper.make_node(op, list(inputs), [value], name, **attributes))
            return value

        def integers(label: str, *numbers: int) -> str:
            return self.literal(scope, label, np.array(numbers, np.int64))

        sixteen = self.literal(scope, "16", np.array(16, np.int64))
        axis_1 = integers("axis_1", 1)
        packed = self.constant(scope, f"{weight.name}/packed", encoded.packed)
        scales = self.constant(scope, f"{weight.name}/scales", encoded.scales)
        codebook = self.literal(scope, "codebook", encoded.codebook)
        size, elements = encoded.block_size, encoded.rows * encoded.cols

        bytes_ = add("Cast", "bytes", packed, to=TensorProto.INT64)
        high = add("Unsqueeze", "high_column", add("Div", "high", bytes_, sixteen), axis_1)
        low = add("Unsqueeze", "low_column", add("Mod", "low", bytes_, sixteen), axis_1)
        pairs = add("Concat", "pairs", high, low, axis=1)
        codes = add("Reshape", "codes", pairs, integers(f"blocks_of_{size}", -1, size))
        entries = add("Gather", "entries", codebook, codes, axis=0)
        values = add("Mul", "values", entries, add("Unsqueeze", "scale_column", scales, axis_1))
        flat = add("Reshape", "flat", values, integers("flat", -1))
        ends = (integers("0", 0), integers(f"elements_{elements}", elements), integers("0", 0))
        matrix = add("Slice", "elements", flat, *ends)
        result = add("Reshape", "matrix", matrix, integers(f"shape_{encoded.rows}_{encoded.cols}", *weight.tensor.dims))
        for half in halves:
            result = add("Cast", half, result, to=ONNX_DTYPE[half])
        swapped = ""
        if any(use.transposed for use in weight.uses):
            swapped = add("Transpose", "transposed", result, perm=[1, 0])
        for use in weight.uses:
            use.scope.instead[use.index] = self._product(use, swapped if use.transposed else result)

    def _product(self, use: _Use, weight: str) -> list[onnx.NodeProto]:
        """The nodes that take a product's place: a MatMul, and for a Gemm with a bias an Add."""
        product = onnx.NodeProto()
        product.CopyFrom(use.node)
        product.input[1] = weight
        if product.op_type == "MatMul":
            return [product]
        bias = product.input[2] if len(product.input) > 2 else ""
        product.op_type = "MatMul"
        del product.attribute[:], product.input[2:]
        if not bias:
            return [product]
        output = product.output[0]
        product.output[0] = self.name(f"{output}/product")
        name = self.name(f"{use.node.name}/Add") if use.node.name else ""
        return [product, helper.make_node("Add", [product.output[0], bias], [output], name)]


def _apply(finder: _Finder) -> None:
    """Put the new nodes in place, innermost graphs first, and remove what only the float weights needed."""
    for scope in reversed(finder.scopes):
        if not (scope.before or scope.instead or scope.gone):
            continue
        nodes = list(scope.first)
        for index, node in enumerate(scope.owner.node):
            nodes += scope.before.get(index, [])
            nodes += scope.instead.get(index, [node])
        del scope.owner.node[:]
        scope.owner.node.extend(nodes)
        if isinstance(scope.owner, onnx.GraphProto):
            for rows in (scope.owner.initializer, scope.owner.value_info, scope.owner.input):
                kept = [row for row in rows if row.name not in scope.gone]
                if len(kept) < len(rows):
                    del rows[:]
                    rows.extend(kept)


# ---- whole models


def quantize(
    model: onnx.ModelProto,
    tensors: Tensors,
    *,
    codebook: str | os.PathLike[str] | np.ndarray = "nf4",
    block_size: int = 64,
    rounding: str | None = None,
    match: str | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Spell the constant weights of MatMul and Gemm nodes as the canonical chain; `model` is edited in place.

    A weight is a float32, float16 or bfloat16 matrix in an initializer or a Constant node, of the graph, a subgraph or
    a function, also behind Identity or Transpose. It is quantized once, however many products share it, and left with
    a reason where something else needs it too. A Gemm becomes MatMul and Add. Same input, same bytes out.

    tensors: reads the weights (storage.Tensors of the model's folder).
    rounding: "float16" or "bfloat16" rounds each decoded float32 weight (the adjoint spelling: Cast to half, Cast to
        float); a half-precision weight is always rounded to its own type.
    match: only weights whose name, or the name of a product that uses them, this regular expression finds.
    A model below opset 13 that has weights to quantize is converted by onnx.version_converter, which drops
    metadata of nodes. Raises ProduceError for a bad option, and where that conversion is not possible.
    """
    check_options(block_size, rounding, match)
    table = load_codebook(codebook)
    if model.training_info:
        raise ProduceError(
            "the model carries training_info, which changes its weights; only inference models are quantized"
        )
    pattern = _compile(match)
    opset = _opset(model)
    finder, chosen, left = _choose(model, pattern, block_size, rounding)
    if chosen and 0 < opset < LEAST_OPSET:
        _convert(model)
        finder, chosen, left = _choose(model, pattern, block_size, rounding)
    speller, done = _Speller(finder), []
    for number, weight in enumerate(chosen):
        if progress:
            progress("quantize", number, len(chosen))
        names = tuple(use.name for use in weight.uses)
        kind = DTYPE_NAME[weight.tensor.data_type]
        halves = [kind] if kind != "float32" else [rounding, "float32"] if rounding else []
        try:
            encoded, largest, rms = encode(tensors.array(weight.tensor), table, block_size, (halves or ["float32"])[0])
        except ProduceError as error:
            left.append(Left(weight.name, names, str(error)))
            continue
        size = nbytes(weight.tensor)
        speller.spell(weight, encoded, halves)
        weight.scope.gone.add(weight.name)
        for scope, index in weight.between:
            scope.instead[index] = []
            scope.gone.update(scope.owner.node[index].output)
        facts = (encoded.rows, encoded.cols, encoded.weight_dtype, size, encoded.packed.nbytes + encoded.scales.nbytes)
        done.append(Quantized(weight.name, names, *facts, largest, rms))
    _apply(finder)
    if progress:
        progress("quantize", len(chosen), len(chosen))
    raised = _opset(model)
    notes = (f"the model was raised from opset {opset} to {raised}, which the chain needs",) if raised != opset else ()
    return QuantizeReport(tuple(done), tuple(left), block_size, opset, raised, notes=notes)


def check_options(block_size: int = 64, rounding: str | None = None, match: str | None = None) -> None:
    """Raise ProduceError for options of `quantize` that suit no model."""
    if block_size < 2 or block_size % 2:
        raise ProduceError(f"block_size must be even and at least 2, not {block_size}")
    if rounding not in _ROUNDINGS:
        raise ProduceError(f"rounding must be float16 or bfloat16, not {rounding!r}")
    _compile(match)


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    codebook: str | os.PathLike[str] | np.ndarray = "nf4",
    block_size: int = 64,
    rounding: str | None = None,
    match: str | None = None,
    force: bool = False,
    allow_external: Iterable[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize an ONNX file to another as `quantize` does; nothing is written where nothing was quantized.

    The file is written whole or not at all. External data is read mapped; what stays external is kept by reference
    in the same folder, and what is used of it copied to another. An existing target, the source too, needs `force`.
    Raises ProduceError, RewriteError and StorageError.
    """
    name, out = os.fspath(source), os.fspath(target)
    tensors = Tensors(str(Path(name).parent), allow_external)
    tensors.note(name)
    model = read_model(name)
    if Path(out).exists() and not force:
        same = Path(out).samefile(name)
        why = "is the model itself, whose float weights would be lost" if same else "exists"
        raise ProduceError(f"{out} {why}; --force replaces it")
    check_target(name, out, force=True)
    data_bytes(model, tensors)  # or what cannot be read is said now
    options = {"codebook": codebook, "block_size": block_size, "rounding": rounding, "match": match}
    before = model.ByteSize() + sum(nbytes(tensor) for tensor in external_tensors(model))
    report = quantize(model, tensors, **options, progress=progress)  # type: ignore[arg-type]
    if not report.quantized:
        none = () if report.left else (_nothing_found(match),)
        return replace(report, input_bytes=before, output_opset=report.opset, notes=none)
    external = list(external_tensors(model))
    kept = sum(map(nbytes, external))
    written, notes = save(model, name, out, tensors, progress, used_only=True)
    if external:
        files = sorted({location(tensor) for tensor in external_tensors(model)})
        whole = size_text(sum(Path(out).parent.joinpath(file).stat().st_size for file in files))
        used = f"{size_text(kept)} of its weights are external data in {', '.join(files)} ({whole} on disk)"
        notes = (*notes, f"{used}, which must stay beside it")
    return replace(report, input_bytes=before, output_bytes=written + kept, notes=(*report.notes, *notes))


def _nothing_found(match: str | None) -> str:
    chosen = "" if match is None else f" whose name, or whose product's, {match!r} finds"
    return f"no MatMul or Gemm has a float weight{chosen} (4-bit chains and packed weights are left as they are)"


def _compile(match: str | None) -> re.Pattern[str] | None:
    try:
        return None if match is None else re.compile(match)
    except re.error as error:
        raise ProduceError(f"match {match!r} is not a regular expression: {error}") from error


def _choose(
    model: onnx.ModelProto, pattern: re.Pattern[str] | None, block_size: int, rounding: str | None
) -> tuple[_Finder, list[_Weight], list[Left]]:
    """Find the weights of products that `pattern` finds: those that can be quantized, and those left."""
    finder = _Finder(model)
    chosen, left = [], []
    for weight in finder.weights:
        names = tuple(use.name for use in weight.uses)
        if not names or (pattern and not any(map(pattern.search, (weight.name, *names)))):
            continue
        obstacle = _weight_obstacle(weight, block_size, rounding)
        if obstacle:
            left.append(Left(weight.name, names, obstacle))
        else:
            chosen.append(weight)
    return finder, chosen, left


def _convert(model: onnx.ModelProto) -> None:
    """Convert a model to the least opset in place, keeping what the converter would lose or add."""
    version = _opset(model)
    if model.functions:
        raise ProduceError(
            f"the model is opset {version} and has functions, which cannot be converted to {LEAST_OPSET}"
        )
    try:
        checker.check_model(model)  # the converter takes much for granted
        graph = version_converter.convert_version(model, LEAST_OPSET).graph
    except (checker.ValidationError, RuntimeError, ValueError, TypeError, LookupError, MemoryError) as error:  # of C++
        reason = " ".join(str(error).split())
        raise ProduceError(
            f"the chain needs opset {LEAST_OPSET}, and onnx cannot convert {version} to it: {reason}"
        ) from error
    known = {value.name for old in _graphs(model.graph) for value in old.value_info}
    for new in _graphs(graph):  # shapes that it inferred by itself
        kept = [value for value in new.value_info if value.name in known]
        del new.value_info[:]
        new.value_info.extend(kept)
    graph.doc_string = model.graph.doc_string
    graph.metadata_props.extend(model.graph.metadata_props)
    model.graph.CopyFrom(graph)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = LEAST_OPSET


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)
