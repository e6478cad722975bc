"""4-bit weights that no product reads: nothing is proved or refused of them, so `inspect` names what does read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto, TensorProto

from lut4tool.formats import DOMAIN
from lut4tool.recognize.clauses import MOVES
from lut4tool.recognize.proof import Refusal, Report
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.walk import (
    FOUR_BITS,
    LITERAL_ELEMENTS,
    VENDOR,
    Argument,
    Place,
    Refuse,
    Scope,
    Value,
    Walk,
    type_name,
)
from lut4tool.storage import subgraphs

#: What takes a code out of an integer: the operator, the number by which it does, and of which types.
_BYTES = frozenset({TensorProto.UINT8, TensorProto.INT8})
_WORDS = _BYTES | {TensorProto.INT32, TensorProto.UINT32, TensorProto.INT64}
_MARKS = {"BitwiseAnd": {15: _WORDS, 240: _BYTES}, "BitShift": {4: _WORDS}, "Mod": {16: _BYTES}}
#: What may stand between a constant and the operator that takes its codes apart.
_PASSED = frozenset({*MOVES, "Cast", "Identity", "Gather", "GatherND", "Where", "BitShift", "BitwiseAnd"})
_DEEP = 64
#: com.microsoft's operators with packed weights that are no plain product, and the attribute that says their bits.
_VENDOR_OPS = {"GatherBlockQuantized": "bits", "QMoE": "expert_weight_bits"}
_TAKEN = "weights of MatMul, Gemm and FusedMatMul are kept packed"


def outside(model: onnx.ModelProto, report: Report) -> tuple[Refusal, ...]:
    """A sentence for each constant of 4-bit codes that is in no proof and behind no refused product.

    Constants of 4-bit types, integers that BitwiseAnd 15 or 240, Mod 16 or BitShift 4 takes apart, and com.microsoft's
    GatherBlockQuantized and QMoE of 4 bits; of over 16 elements. Linear in the size of the graphs.
    """
    if not _worth_a_look(model):
        return ()
    walk = Walk(model)
    bodies = {index for index, function in enumerate(model.functions) if function.domain == DOMAIN}
    scopes = [scope for scope in walk.scopes if scope.function not in bodies]
    found: dict[int, Value] = {}
    for scope in scopes:
        for name, made in scope.names.items():
            if _holds(Value(scope, name), FOUR_BITS):
                found[id(_tensor(Value(scope, name)))] = Value(scope, name)
            for value in _codes_of(walk, scope, made) if isinstance(made, NodeProto) else ():
                found.setdefault(id(_tensor(value)), value)
    covered = {id(tensor) for proof in report.proofs for tensor in proof.sources.values()}
    if found.keys() <= covered:
        return ()
    covered |= _behind_products(walk)
    left = [value for key, value in found.items() if key not in covered]
    readers = _readers(walk, scopes) if left else {}
    return tuple(_said(walk, value, readers) for value in left)


def _worth_a_look(model: onnx.ModelProto) -> bool:
    """Whether a 4-bit tensor or an operator that takes codes apart is anywhere in the model."""
    waiting: list[Any] = [model.graph, *model.functions]
    while waiting:
        body = waiting.pop()
        if any(tensor.data_type in FOUR_BITS for tensor in getattr(body, "initializer", ())):
            return True
        for node in body.node:
            if node.op_type in _MARKS or (node.domain == VENDOR and node.op_type in _VENDOR_OPS):
                return True
            if node.op_type == "Constant" and any(_is_four_bits(entry) for entry in node.attribute):
                return True
            waiting += subgraphs(node)
    return False


def _is_four_bits(written: AttributeProto) -> bool:
    return written.HasField("t") and written.t.data_type in FOUR_BITS


def _codes_of(walk: Walk, scope: Scope, node: NodeProto) -> Iterator[Value]:
    """The constants that a node takes 4-bit codes out of."""
    if node.domain == VENDOR and node.op_type in _VENDOR_OPS:
        bits = next((entry.i for entry in node.attribute if entry.name == _VENDOR_OPS[node.op_type]), 4)
        for name in node.input if bits == 4 else ():
            value = walk.lookup(scope, name)
            if value is not None and _holds(value, FOUR_BITS | {TensorProto.UINT8}):
                yield value
        return
    number = _literal(walk, scope, node) if node.op_type in _MARKS else None
    types = None if number is None else _MARKS[node.op_type].get(number)
    source = _source(walk, walk.lookup(scope, node.input[0])) if types else None
    if source is not None and types and _holds(source, types):
        yield source


def _literal(walk: Walk, scope: Scope, node: NodeProto) -> int | None:
    """The number by which a node takes codes apart; of PyTorch's shifts by 0, 4, ..., 28 it is 4."""
    value = walk.lookup(scope, "".join(node.input[1:2]))
    tensor = None if value is None else _tensor(value)
    if tensor is None or tensor.data_type not in _WORDS:
        return None
    try:
        numbers = set(Trail(walk).literal(Place(scope, node), 1, kind=tensor.data_type).values)
    except Refuse:
        return None
    if node.op_type == "BitShift" and numbers <= set(range(0, 32, 4)):
        return 4 if numbers - {0} else None
    return numbers.pop() if len(numbers) == 1 else None


def _source(walk: Walk, value: Value | None) -> Value | None:
    """The constant that a value is made of by nodes that move, pick, cast, shift or mask it."""
    for _ in range(_DEEP):
        if value is None or _tensor(value) is not None:
            return value
        node = value.definition
        if not isinstance(node, NodeProto) or node.op_type not in _PASSED:
            return None
        value = walk.lookup(value.scope, "".join(node.input[2:3] if node.op_type == "Where" else node.input[:1]))
    return None


def _tensor(value: Value) -> TensorProto | None:
    """The tensor of an initializer or of a Constant node."""
    made = value.definition
    if isinstance(made, NodeProto) and made.op_type == "Constant":
        return next((entry.t for entry in made.attribute if entry.HasField("t")), None)
    return made if isinstance(made, TensorProto) else None


def _holds(value: Value, types: frozenset[int]) -> bool:
    """Whether a constant has one of these types, and more elements than a literal."""
    tensor = _tensor(value)
    return tensor is not None and tensor.data_type in types and math.prod(tensor.dims) > LITERAL_ELEMENTS


def _behind_products(walk: Walk) -> set[int]:
    """The tensors behind each operand that is proved or refused."""
    met: set[Value] = set()
    waiting: list[Value] = []
    for site in walk.products:
        operands = (walk.lookup(site.scope, name) for name in site.node.input[:2])
        waiting += [operand for operand in operands if operand is not None and walk.decoded(operand)]
    while waiting:
        value = waiting.pop()
        if value in met:
            continue
        met.add(value)
        waiting += walk.before(value)
        if isinstance(value.definition, Argument) and value.scope.function is not None and value.scope.parent is None:
            position = list(value.scope.body.input).index(value.name)
            calls = walk.calls[value.scope.function]
            given = (walk.lookup(call.scope, "".join(call.node.input[position : position + 1])) for call in calls)
            waiting += [value for value in given if value is not None]
    return {id(_tensor(value)) for value in met}


def _readers(walk: Walk, scopes: list[Scope]) -> dict[Value, list[Place]]:
    """The nodes that read each value."""
    readers: dict[Value, list[Place]] = {}
    for scope in scopes:
        for node in scope.nodes:
            for name in node.input:
                value = walk.lookup(scope, name)
                if value is not None:
                    readers.setdefault(value, []).append(Place(scope, node))
    return readers


def _said(walk: Walk, value: Value, readers: dict[Value, list[Place]]) -> Refusal:
    """What first reads a constant, or what is made of it, together with something that is not constant."""
    tensor = _tensor(value)
    assert tensor is not None
    what = f"'{value.name}', {type_name(tensor.data_type)} {list(tensor.dims)}, holds 4-bit codes"
    waiting, met = [value], {value}
    for current in waiting:
        for place in readers.get(current, ()):
            made = [Value(place.scope, name) for name in place.node.output if name]
            if not all(walk.origin(output).constant for output in made):
                return Refusal(
                    value.name,
                    f"{what} that {place.node.op_type} reads; {_TAKEN}, at node '{place.title}'",
                    place.title,
                )
            waiting += [output for output in made if output not in met]
            met.update(made)
    return Refusal(value.name, f"{what} that no product reads; {_TAKEN}", value.name)
