"""Chains that look codes up in a table of 16 entries: they become Lookup4MatMul (DESIGN section 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME, LOOKUP4_MATMUL, lookup4_attributes
from lut4tool.recognize import packing
from lut4tool.recognize.clauses import Leaves, Step, rounded, shaped, steps_before, turned
from lut4tool.recognize.layout import Laid
from lut4tool.recognize.nibbles import BYTES, names_of, pairs
from lut4tool.recognize.placing import Codes, Lookup, Scales, flat_block, place
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.view import Shape
from lut4tool.recognize.walk import LOOKUPS, Constant, Place, Value, Walk, type_name

#: What Gather takes.
_INDEX = frozenset({TensorProto.INT32, TensorProto.INT64})
#: Types of codes that lie one in an element.
_CODES = BYTES | {TensorProto.INT8, TensorProto.INT4, TensorProto.UINT4}
#: Those that INT32 holds.
_SHORT = _CODES - {TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64}
_OPERANDS = {"Gather": "a Gather of entries and scales", "Mul": "a Mul by scales and an offset"}
#: Nodes that are passed at most to see which operand is looked up.
_DEEP = 64


def prove(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Codes, two a byte or one an element, looked up among 16 entries, and scaled in blocks or not. Raises Refuse.

    After the lookup: [Cast] [Reshape]; Mul by scales, one a block of the flat weight or a row, or along the columns;
    then any Reshape, Slice of flat elements, Cast that rounds at most once, and Transpose of [rows, cols].
    """
    trail = Trail(walk)
    leaves = Leaves(trail)
    after, value, at = steps_before(trail, weight, site, "Cast", "Transpose", "Reshape", "Slice")
    after, perm = turned(after)
    found = _scaled(trail, leaves, value, at)
    weight_dtype, dtype = rounded(found.dtype, after)
    targets: dict[str, Shape] = {}
    matrix = shaped(found.shape, after, targets)
    found.at.require(len(matrix) == 2, f"the weight is of shape {list(matrix)}, not [rows, cols]")

    placed = place(found, matrix, weight.name, targets)
    for held in placed.roles.values():
        leaves.require_fixed(() if isinstance(held, str) else held.sources)
    rows, cols = matrix[::-1] if placed.transposed else matrix
    perm = perm[::-1] if flipped != placed.transposed else perm
    return Proof(
        site=site.site,
        op=LOOKUP4_MATMUL,
        chain_name=placed.name,
        rows=rows,
        cols=cols,
        block_size=placed.block,
        weight_dtype=weight_dtype,
        dtype=dtype,
        product=Product(site.node.input[0]),
        attributes=lookup4_attributes(rows, cols, placed.block, perm, placed.high_first, weight_dtype, dtype),
        roles=placed.roles,
        sources={name: constant.tensors[0] for name, (constant, _, _) in leaves.held.items()},
        literals=trail.literals,
        weight=weight.name,
        chain=trail.nodes(),
        cut=placed.cut if leaves.once else None,
        opset=site.scope.opset,
        flipped=flipped,
    )


def _scaled(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Lookup:
    """Entries times scales, in either order, or entries alone."""
    if trail.op_type(value) in LOOKUPS:
        return _looked_up(trail, leaves, value, at)
    if trail.op_type(value) != "Mul":
        trail.refuse(value, at, "Mul by scales or Gather of a codebook")
    product = trail.node(value, "Mul", at)
    entries, factor = _sorted(trail, product, *LOOKUPS)
    found = _looked_up(trail, leaves, entries, product)
    scales = _scales(trail, leaves, factor, product)
    same = scales.dtype == found.dtype
    product.require(same, f"Mul of {found.dtype} entries by {scales.dtype} scales, not of one type")
    return replace(found, scales=scales, at=product)


def _sorted(trail: Trail, node: Place, *ends: str) -> tuple[Value, Value]:
    """The operand that comes from an operator, through nodes that move or cast it, and the other one."""
    if not (_comes_from(trail, node, 0, ends) or _comes_from(trail, node, 1, ends)):
        kinds = " and ".join(trail.op_type(trail.input(node, index)) for index in (0, 1))
        node.refuse(f"{node.node.op_type} of {kinds}, not of {_OPERANDS[ends[0]]}")
    index = 0 if _comes_from(trail, node, 0, ends) else 1
    return trail.input(node, index), trail.input(node, 1 - index)


def _comes_from(trail: Trail, node: Place, index: int, ends: Sequence[str]) -> bool:
    """Whether an operand comes from an operator through nodes that move or cast it."""
    value = trail.walk.lookup(node.scope, "".join(node.node.input[index : index + 1]))
    for _ in range(_DEEP):
        made = value.definition if value is not None else None
        if value is None or not isinstance(made, NodeProto) or made.op_type in ends:
            return isinstance(made, NodeProto)
        if made.op_type not in ("Cast", "Reshape", "Slice", "Identity") or not made.input:
            return False
        value = trail.walk.lookup(value.scope, made.input[0])
    return False


def _looked_up(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Lookup:
    """Gather of 16 entries by codes; Casts and Reshapes of the entries."""
    moved, value, at = steps_before(trail, value, at, "Cast", "Reshape", "Slice")
    lookup = trail.node(value, "GatherND" if trail.op_type(value) == "GatherND" else "Gather", at)
    early, table, reader = steps_before(trail, trail.input(lookup, 0), lookup, "Cast")
    lookup.require(trail.op_type(table) != "input", f"codebook '{table.name}' is an input, not a Constant")
    codebook = leaves.floats(table, reader, "codebook")
    reader.require(codebook.shape == (16,), "codebook {} is not [16]", codebook)
    dtype, types = _cast(codebook, [*early, *moved])
    held: str | Laid = codebook.name
    if types:
        held = Laid(packing.cast_in_turn, (codebook.name,), types, types[-1], (16,))
    index, at = trail.input(lookup, 1), lookup
    if lookup.node.op_type == "GatherND":  # each index is a list of one number
        at = trail.node(index, "Unsqueeze", lookup)
        axis = trail.literal(at, 1)
        at.require(axis.is_one(-1), "Unsqueeze on axes {} of what GatherND reads, not -1", axis.one)
        index = trail.input(at, 0)
    codes = _codes(trail, leaves, index, at)
    targets = dict(codes.targets)
    shape = shaped(codes.shape, moved, targets)
    sliced = codes.sliced or any(step.op == "Slice" for step in moved)
    return Lookup(codes, held, None, dtype, shape, moved[-1].place if moved else lookup, targets, sliced)


def _cast(leaf: Constant, steps: Sequence[Step]) -> tuple[str, tuple[int, ...]]:
    """The type of a float constant after Casts, and the types to cast it to in turn: none where they only widen."""
    (kind,) = leaf.types
    types, narrows = [], False
    for step in steps:
        if step.op == "Cast":
            to = step.said
            step.place.require(to in DTYPE_NAME, f"Cast of floats to {type_name(to)}, not FLOAT, FLOAT16 or BFLOAT16")
            narrows |= to not in (kind, TensorProto.FLOAT)
            kind = to
            types.append(to)
    return DTYPE_NAME[kind], tuple(types) if narrows else ()


def _codes(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Codes:
    """The indices of a lookup: both nibbles of bytes, or a code in each element."""
    targets: dict[str, Shape] = {}
    steps, value, first = steps_before(trail, value, at, "Cast", "Reshape", "Slice")
    if trail.op_type(value) == "Concat":
        both = pairs(trail, leaves, value, first)
        leaf, padded, kind, per, shape, allowed = both.leaf, both.padded, both.kind, 2, both.view.shape, BYTES
        high_first = both.high_first is True
        first.require(both.high_first is not None, "Concat of nibbles apart from each other, not of both of each byte")
        targets = {output: made.view.shape for output, made in both.seen.items()}
    else:
        leaf, padded = leaves.read(value, first, "codes", _CODES, "of integers"), 0
        (kind,), per, high_first, shape, allowed = leaf.types, 1, True, leaf.shape, _INDEX
    _require_index(at, steps, kind, allowed)
    shape = shaped(shape, steps, targets)
    types = tuple(step.said for step in steps if step.op == "Cast")
    narrows = per == 1 and not leaf.types <= _SHORT
    sliced = padded > 0 or any(step.op == "Slice" for step in steps)
    return Codes(leaf, per, high_first, shape, targets, sliced, types if narrows else ())


def _require_index(at: Place, steps: Sequence[Step], kind: int, allowed: frozenset[int]) -> None:
    """Refuse codes that Gather does not take, or whose Casts may change them."""
    for step in steps:
        if step.op == "Cast":
            kind = step.said
            step.place.require(kind in allowed, f"Cast of codes to {type_name(kind)}, not {names_of(allowed)}")
    at.require(kind in _INDEX, f"Gather by {type_name(kind)} codes, not {names_of(_INDEX)}")


def _scales(trail: Trail, leaves: Leaves, operand: Value, at: Place) -> Scales:
    """A constant, or a doubly quantized one, given axes of 1, cast and cut."""
    steps, value, at = steps_before(trail, operand, at, "Cast", "Reshape", "Slice", "Unsqueeze")
    if trail.op_type(value) in ("Add", "Mul"):
        return _nested(trail, leaves, value, at, steps, operand)
    leaf = leaves.floats(value, at, "scales")
    dtype, types = _cast(leaf, steps)
    plain = len(leaf.shape) == 1 and all(_keeps_first(step) for step in steps)
    return Scales(operand.name, shaped(leaf.shape, steps), dtype, leaf, types, not plain)


def _keeps_first(step: Step) -> bool:
    """Whether a step of flat scales makes them a column whatever their number, or casts them."""
    if step.op in ("Cast", "Slice"):
        return step.op == "Cast"
    return step.said.is_one(1, -1) if step.op == "Unsqueeze" else step.said.values == (-1, 1)


def _nested(trail: Trail, leaves: Leaves, value: Value, at: Place, steps: Sequence[Step], operand: Value) -> Scales:
    """Scales that are themselves codes of a table of 256 times scales of groups, and an offset or none; all FLOAT."""
    floats = frozenset({TensorProto.FLOAT})
    inner: list[Step] = []
    offset: Constant | None = None
    if trail.op_type(value) == "Add":
        add = trail.node(value, "Add", at)
        value, other = _sorted(trail, add, "Mul")
        offset = leaves.read(other, add, "offset", floats, "FLOAT")
        add.require(offset.shape in ((), (1,)), f"offset {offset} is not one number")
        inner, value, at = steps_before(trail, value, add, "Reshape", "Slice")
    product = trail.node(value, "Mul", at)
    entries, factor = _sorted(trail, product, "Gather")
    moved, entries, at = steps_before(trail, entries, product, "Reshape")
    lookup = trail.node(entries, "Gather", at)
    table = leaves.read(trail.input(lookup, 0), lookup, "table of scales", floats, "FLOAT")
    lookup.require(table.shape == (256,), f"table of scales {table} is not [256]")
    index, leaf, at = steps_before(trail, trail.input(lookup, 1), lookup, "Cast", "Reshape")
    codes = leaves.read(leaf, at, "codes of scales", frozenset({TensorProto.UINT8}), "UINT8")
    _require_index(lookup, index, TensorProto.UINT8, _INDEX)
    given, leaf, at = steps_before(trail, factor, product, "Reshape", "Unsqueeze")
    scales = leaves.read(leaf, at, "scales of scales", floats, "FLOAT")
    shape = shaped(codes.shape, [*index, *moved])
    group = flat_block(product, shape, shaped(scales.shape, given))
    for step in steps:
        step.place.require(step.op != "Cast", "Cast of double-quantized scales, which stay FLOAT")
    shape = shaped(shape, [*inner, *steps])
    count = math.prod(shape)
    names = (codes.name, table.name, scales.name)
    make = packing.double_quantized if offset else packing.doubly_scaled
    sources = (*names, offset.name) if offset else names
    nested = Laid(make, sources, (group, count), TensorProto.FLOAT, (count,))
    return Scales(operand.name, shape, "float32", None, (), True, nested)
