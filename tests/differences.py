"""Compares a rewritten model with its original: every difference but the permitted ones of DESIGN section 3.

It shares no code with the rewriter. Elements of repeated fields are compared by their deterministic bytes, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

DOMAIN = "ai.lut4tool"
BODIES = ("Lookup4MatMul", "QMM")
ATTRIBUTES = {
    "Lookup4MatMul": ["rows", "cols", "block_size", "perm", "high_nibble_first", "weight_dtype", "dtype"],
    "QMM": ["K", "N", "bits", "block_size", "weight_dtype", "dtype"],
}
REPLACED = ("MatMul", "Gemm", "FusedMatMul", "MatMulBnb4", "MatMulNBits")
#: What may stand around a new node, for what a Gemm does besides the product.
AROUND = ("Constant", "Transpose", "Cast", "Mul", "Add")


@dataclass
class Comparison:
    """`wrong`: every difference that is not permitted, in words; counts of what was replaced and removed."""

    wrong: list[str] = field(default_factory=list)
    replaced: int = 0
    nodes_removed: int = 0
    initializers_removed: int = 0
    tensors_added: int = 0
    functions_added: int = 0
    input_names_dropped: int = 0


def compare(before: onnx.ModelProto, after: onnx.ModelProto) -> Comparison:
    """Compare a model with its rewritten form; a model equal to its original has no difference at all."""
    result = Comparison()
    if raw(before) == raw(after):
        return result
    same_fields(before, after, ("ir_version", "opset_import", "functions", "graph", "training_info"), "model", result)
    result.wrong += [f"ir_version {after.ir_version}"] * (after.ir_version != max(before.ir_version, 8))
    added = len(after.functions) - len(before.functions)
    bodies = [(entry.domain, entry.name) for entry in list(after.functions)[: max(added, 0)]]
    known = {(entry.domain, entry.name) for entry in before.functions}
    result.functions_added = len(bodies)
    if added < 0 or len(set(bodies)) < len(bodies) or not set(bodies) <= {(DOMAIN, name) for name in BODIES} - known:
        result.wrong.append(f"functions {bodies} were added")
    _compare_graph(before.graph, after.graph, "graph", before, result)
    for one, other in zip(before.functions, list(after.functions)[len(bodies) :], strict=False):
        _compare_function(one, other, result)
    _imports(before, after, True, "model", result)
    if list(map(raw, before.training_info)) != list(map(raw, after.training_info)):
        result.wrong.append("training_info")
    result.wrong += [] if result.replaced else ["the model changed and no node was replaced"]
    return result


def raw(message: Any) -> bytes:
    return message.SerializeToString(deterministic=True)


def same_fields(before: Any, after: Any, skipped: Iterable[str], where: str, result: Comparison) -> None:
    """Note every field that differs, but for the skipped ones; unknown fields count through the whole's bytes."""
    one, other = type(before)(), type(after)()
    one.CopyFrom(before)
    other.CopyFrom(after)
    for name in skipped:
        one.ClearField(name)
        other.ClearField(name)
    if raw(one) != raw(other):
        fields = [
            entry.name for entry in one.DESCRIPTOR.fields if getattr(one, entry.name) != getattr(other, entry.name)
        ]
        result.wrong.append(f"{where}: {', '.join(fields) or 'bytes'} differ")


def _imports(before: Any, after: Any, calls: bool, where: str, result: Comparison) -> None:
    expected = [raw(entry) for entry in before.opset_import]
    if calls and all(entry.domain != DOMAIN for entry in before.opset_import):
        expected.append(raw(onnx.helper.make_opsetid(DOMAIN, 1)))
    if expected != [raw(entry) for entry in after.opset_import]:
        result.wrong.append(f"{where}: opset_import")


def _compare_function(before: onnx.FunctionProto, after: onnx.FunctionProto, result: Comparison) -> None:
    where = f"function {before.name}"
    same_fields(before, after, ("node", "opset_import", "value_info"), where, result)
    replaced = result.replaced
    removed = _compare_nodes(before, after, where, None, result)
    _compare_entries(before, after, "value_info", removed, where, result)
    _imports(before, after, result.replaced > replaced, where, result)


def _compare_graph(
    before: onnx.GraphProto, after: onnx.GraphProto, where: str, model: onnx.ModelProto, result: Comparison
) -> None:
    changed = ("node", "initializer", "value_info", "quantization_annotation", "input")
    same_fields(before, after, changed, where, result)
    removed = _compare_nodes(before, after, where, model, result)
    used = uses(after)
    was_used = uses(before)
    orphaned = {tensor.name for tensor in before.initializer if tensor.name in was_used and tensor.name not in used}
    laid = _laid_out(after) - {tensor.name for tensor in before.initializer} - _made(before)
    new = [tensor for tensor in after.initializer if tensor.name in laid]
    result.tensors_added += len(new)
    if [raw(tensor) for tensor in new] != [raw(tensor) for tensor in list(after.initializer)[-len(new) :]] and new:
        result.wrong.append(f"{where}: new initializers are not last")
    rest = list(after.initializer)[: len(after.initializer) - len(new)]
    kept = subsequence(before.initializer, rest, f"{where}: initializer", result)
    gone = {tensor.name for tensor, keep in zip(before.initializer, kept, strict=True) if not keep}
    result.initializers_removed += len(gone)
    result.wrong += [f"{where}: initializer '{name}' was removed and not orphaned" for name in sorted(gone - orphaned)]
    result.wrong += [f"{where}: orphaned initializer '{name}' was kept" for name in sorted(orphaned - gone)]
    removed |= gone
    for name in ("value_info", "quantization_annotation"):
        _compare_entries(before, after, name, removed, where, result)
    names = {tensor.name for tensor in before.initializer} if model.ir_version < 4 else set()
    expected = [raw(entry) for entry in before.input if entry.name not in names]
    result.input_names_dropped += len(before.input) - len(expected)
    if expected != [raw(entry) for entry in after.input]:
        result.wrong.append(f"{where}: input")


def _compare_nodes(before: Any, after: Any, where: str, model: onnx.ModelProto | None, result: Comparison) -> set[str]:
    """Walk both node lists in step; return the values whose nodes were removed."""
    rest, removed = list(after.node), set()
    if isinstance(after, onnx.FunctionProto):  # its new tensors are Constant nodes, which stand first
        new = [
            node for node in rest if node.op_type == "Constant" and node.output[0] in _laid_out(after) - _made(before)
        ]
        if rest[: len(new)] != new:
            result.wrong.append(f"{where}: new Constant nodes are not first")
        result.tensors_added += len(new)
        rest = rest[len(new) :]
    live_before, live_after = uses(before), uses(after)
    position = 0
    for index, node in enumerate(before.node):
        if span := _span(node, rest, position):
            result.replaced += 1
            product = rest[position + span.index(DOMAIN)]
            same_fields(node, product, ("op_type", "domain", "input", "output", "attribute"), where, result)
            if [attribute.name for attribute in product.attribute] != ATTRIBUTES[product.op_type]:
                result.wrong.append(f"{where}: attributes {[attribute.name for attribute in product.attribute]}")
            made = {name for one in rest[position : position + len(span)] for name in one.output} - set(node.output)
            if made & (live_before | _made(before)):
                result.wrong.append(f"{where}: values {made} were there before")
            position += len(span)
            continue
        there = rest[position] if position < len(rest) else None
        if there is not None and _same_node(node, there, f"{where}/{node.name or index}", model, result):
            position += 1
            continue
        result.nodes_removed += 1
        outputs = {name for name in node.output if name}
        removed |= outputs
        if not outputs & live_before:
            result.wrong.append(f"{where}: node '{node.name}' was dead before and was removed")
        if outputs & live_after:
            result.wrong.append(f"{where}: node '{node.name}' was removed and is used")
    result.wrong += [f"{where}: node '{node.name}' is new, changed or out of order" for node in rest[position:]]
    for node in rest:
        outputs = {name for name in node.output if name}
        if not outputs & live_after and outputs & live_before:
            result.wrong.append(f"{where}: node '{node.name}' became unused and was kept")
    return removed


def _span(node: onnx.NodeProto, rest: Sequence[onnx.NodeProto], start: int) -> list[str]:
    """Domains of the nodes that took a product's place, one of them ours; [] where it is not so, or one node did."""
    if node.op_type not in REPLACED:
        return []
    domains: list[str] = []
    for there in itertools.islice(rest, start, None):
        if there.domain != DOMAIN and there.op_type not in AROUND:
            return []
        domains.append(there.domain)
        if there.output == node.output:
            return domains if domains.count(DOMAIN) == 1 and len(domains) > 1 else []
    return []


def _laid_out(body: Any) -> set[str]:
    """What our nodes read beside X, subgraphs included."""
    names = set()
    for node in body.node:
        names |= set(node.input[1:]) if node.domain == DOMAIN else set()
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                names |= _laid_out(graph)
    return names


def _made(body: Any) -> set[str]:
    """Values that the nodes of a body make."""
    return {name for node in body.node for name in node.output}


def _same_node(
    before: onnx.NodeProto, after: onnx.NodeProto, where: str, model: onnx.ModelProto | None, result: Comparison
) -> bool:
    """Whether these are one node: equal, replaced as permitted, or with subgraphs to compare in turn."""
    if raw(before) == raw(after):
        return True
    if after.output != before.output:
        return False
    if after.domain == DOMAIN and after.op_type in BODIES and before.op_type in REPLACED:
        result.replaced += 1
        same_fields(before, after, ("op_type", "domain", "input", "attribute"), where, result)
        if [attribute.name for attribute in after.attribute] != ATTRIBUTES[after.op_type]:
            result.wrong.append(f"{where}: attributes {[attribute.name for attribute in after.attribute]}")
        return True
    one, other = list(before.attribute), list(after.attribute)
    if not any(attribute.HasField("g") for attribute in one) or len(one) != len(other):
        return False
    same_fields(before, after, ("attribute",), where, result)
    for left, right in zip(one, other, strict=True):
        same_fields(left, right, ("g",), f"{where}/{left.name}", result)
        if left.HasField("g"):
            _compare_graph(left.g, right.g, f"{where}/{left.name}", model or onnx.ModelProto(ir_version=8), result)
    return True


def _compare_entries(before: Any, after: Any, name: str, removed: set[str], where: str, result: Comparison) -> None:
    """value_info or quantization_annotation: exactly the entries of removed values are gone."""
    key: Callable[[Any], str] = lambda entry: entry.tensor_name if name == "quantization_annotation" else entry.name  # noqa: E731
    expected = [raw(entry) for entry in getattr(before, name) if key(entry) not in removed]
    if expected != [raw(entry) for entry in getattr(after, name)]:
        result.wrong.append(f"{where}: {name}")


def subsequence(before: Sequence[Any], after: Sequence[Any], where: str, result: Comparison) -> list[bool]:
    """Which elements of `before` are in `after`, which must hold nothing else and in the same order."""
    rest, kept = [raw(entry) for entry in after], []
    position = 0
    for entry in before:
        kept.append(position < len(rest) and rest[position] == raw(entry))
        position += kept[-1]
    result.wrong += [f"{where}: an element is new, changed or out of order"] * (position < len(rest))
    return kept


def uses(body: Any) -> set[str]:
    """Names that a graph or function reads: by nodes, subgraphs, outputs and quantization annotations."""
    names = set(body.output if isinstance(body, onnx.FunctionProto) else (entry.name for entry in body.output))
    for annotation in getattr(body, "quantization_annotation", ()):
        names.update(entry.value for entry in annotation.quant_parameter_tensor_names)
    for node in body.node:
        names.update(node.input)
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                names |= uses(graph)
    return names
