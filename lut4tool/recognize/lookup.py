"""Chains that look codes up in a table of 16 entries: they become Lookup4MatMul (DESIGN section 1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME, LOOKUP4_MATMUL, lookup4_attributes
from lut4tool.recognize import packing
from lut4tool.recognize.clauses import Shape, Step, rounded, shaped, steps_before, turned
from lut4tool.recognize.layout import Laid
from lut4tool.recognize.placing import Codes, Lookup, Scales, flat_block, place
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.walk import Argument, Constant, Place, Value, Walk, attribute, type_name

_UNSIGNED = frozenset({TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64})
#: Types that hold every byte.
_BYTES = _UNSIGNED | {TensorProto.INT16, TensorProto.INT32, TensorProto.INT64}
#: What Gather takes.
_INDEX = frozenset({TensorProto.INT32, TensorProto.INT64})
#: Types of codes that lie one in an element.
_CODES = _BYTES | {TensorProto.INT8, TensorProto.INT4, TensorProto.UINT4}
#: Those that INT32 holds.
_SHORT = _CODES - {TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64}
_OPERANDS = {"Gather": "a Gather of entries and scales", "Mul": "a Mul by scales and an offset"}
#: Nodes that are passed at most to see which operand is looked up.
_DEEP = 64


@dataclass(eq=False)
class Leaves:
    """The constants that a chain reads as data."""

    trail: Trail
    held: dict[str, tuple[Constant, Value, Place]] = field(default_factory=dict)
    reads: int = 0

    def read(self, value: Value, at: Place, what: str, types: frozenset[int], kinds: str) -> Constant:
        """A constant of one of these types, and of one shape without zeros."""
        if self.trail.op_type(value) not in ("initializer", "input", "Constant"):
            self.trail.refuse(value, at, f"a constant of {what}")
        found = self.trail.walk.constant(value, at)
        found_types, shapes = found.types, found.shapes
        at.require(found_types <= types, "{} {} is not {}", what, found, kinds)
        at.require(len(found_types) == 1, "{} {} is not of one type", what, found)
        at.require(len(shapes) == 1, "{} {} is not of one shape", what, found)
        at.require(all(map(all, shapes)), "{} {} is empty", what, found)
        self.held[found.name] = found, value, at
        self.reads += 1
        return found

    def floats(self, value: Value, at: Place, what: str) -> Constant:
        """A constant of a float type that a weight can have."""
        return self.read(value, at, what, frozenset(DTYPE_NAME), "FLOAT, FLOAT16 or BFLOAT16")

    def require_fixed(self, held: str | Laid) -> None:
        """Refuse to lay out what a function's callers give, since each may give something else."""
        for name in () if isinstance(held, str) else held.sources:
            found, value, at = self.held[name]
            formal = isinstance(self.trail.walk.source(value, at).definition, Argument)
            at.require(
                not formal, "{} is an input of a function and not as {} wants it; a Constant is", found, LOOKUP4_MATMUL
            )


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
        leaves.require_fixed(held)
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
        cut=placed.cut if leaves.reads == len(leaves.held) else None,  # a constant in two parts is never cut
        opset=site.scope.opset,
        flipped=flipped,
    )


def _scaled(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Lookup:
    """Entries times scales, in either order, or entries alone."""
    if trail.op_type(value) == "Gather":
        return _looked_up(trail, leaves, value, at)
    if trail.op_type(value) != "Mul":
        trail.refuse(value, at, "Mul by scales or Gather of a codebook")
    product = trail.node(value, "Mul", at)
    entries, factor = _sorted(trail, product, "Gather")
    found = _looked_up(trail, leaves, entries, product)
    scales = _scales(trail, leaves, factor, product)
    same = scales.dtype == found.dtype
    product.require(same, f"Mul of {found.dtype} entries by {scales.dtype} scales, not of one type")
    return replace(found, scales=scales, at=product)


def _sorted(trail: Trail, node: Place, end: str) -> tuple[Value, Value]:
    """The operand that comes from an operator, through nodes that move or cast it, and the other one."""
    if not (_comes_from(trail, node, 0, end) or _comes_from(trail, node, 1, end)):
        kinds = " and ".join(trail.op_type(trail.input(node, index)) for index in (0, 1))
        node.refuse(f"{node.node.op_type} of {kinds}, not of {_OPERANDS[end]}")
    index = 0 if _comes_from(trail, node, 0, end) else 1
    return trail.input(node, index), trail.input(node, 1 - index)


def _comes_from(trail: Trail, node: Place, index: int, end: str) -> bool:
    """Whether an operand comes from an operator through nodes that move or cast it."""
    value = trail.walk.lookup(node.scope, "".join(node.node.input[index : index + 1]))
    for _ in range(_DEEP):
        made = value.definition if value is not None else None
        if value is None or not isinstance(made, NodeProto) or made.op_type == end:
            return isinstance(made, NodeProto)
        if made.op_type not in ("Cast", "Reshape", "Slice", "Identity") or not made.input:
            return False
        value = trail.walk.lookup(value.scope, made.input[0])
    return False


def _looked_up(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Lookup:
    """Gather of 16 entries by codes; Casts and Reshapes of the entries."""
    moved, value, at = steps_before(trail, value, at, "Cast", "Reshape", "Slice")
    lookup = trail.node(value, "Gather", at)
    early, table, reader = steps_before(trail, trail.input(lookup, 0), lookup, "Cast")
    lookup.require(trail.op_type(table) != "input", f"codebook '{table.name}' is an input, not a Constant")
    codebook = leaves.floats(table, reader, "codebook")
    reader.require(codebook.shape == (16,), "codebook {} is not [16]", codebook)
    dtype, types = _cast(codebook, [*early, *moved])
    held: str | Laid = codebook.name
    if types:
        held = Laid(packing.cast_in_turn, (codebook.name,), types, types[-1], (16,))
    codes = _codes(trail, leaves, trail.input(lookup, 1), lookup)
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
    steps, value, first = steps_before(trail, value, at, "Cast", "Reshape", "Slice")
    if trail.op_type(value) == "Concat":
        leaf, high_first, kind, padded = _pairs(trail, leaves, value, first)
        per, shape, allowed = 2, (leaf.shape[0] + padded, *leaf.shape[1:], 2), _BYTES
    else:
        leaf, padded = leaves.read(value, first, "codes", _CODES, "of integers"), 0
        (kind,), per, high_first, shape, allowed = leaf.types, 1, True, leaf.shape, _INDEX
    _require_index(at, steps, kind, allowed)
    targets: dict[str, Shape] = {}
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
            step.place.require(kind in allowed, f"Cast of codes to {type_name(kind)}, not {_names(allowed)}")
    at.require(kind in _INDEX, f"Gather by {type_name(kind)} codes, not {_names(_INDEX)}")


def _pairs(trail: Trail, leaves: Leaves, value: Value, at: Place) -> tuple[Constant, bool, int, int]:
    """Both nibbles of each byte, side by side: (the bytes, whether the high is first, their type, bytes padded)."""
    pairs = trail.node(value, "Concat", at, "axis")
    pairs.require(len(pairs.node.input) == 2, f"Concat of {len(pairs.node.input)} values, not of the two nibbles")
    first, second = (_nibble(trail, trail.input(pairs, index), pairs) for index in (0, 1))
    twice = "high" if first.high else "low"
    pairs.require(first.high != second.high, f"Concat of the {twice} nibble twice, not of the high and the low one")
    pairs.require(first.source == second.source, "Concat of nibbles of two values, not of one packed value")
    pairs.require(first.kind == second.kind, "Concat of nibbles of two types, not of one")
    source, reader, padded = first.source, first.reader, 0
    if trail.op_type(source) == "Pad":
        source, reader, padded = _padded(trail, source, reader)
    packed = leaves.read(source, reader, "packed", frozenset({TensorProto.UINT8}), "UINT8")
    if padded and len(packed.shape) != 1:
        reader.refuse(f"Pad of packed {packed} is not flat")
    rank, axis = len(packed.shape), attribute(pairs, "axis")
    pairs.require(axis in (rank, -1), f"Concat with axis {axis}, not {rank}")
    for nibble in (first, second):
        axes = nibble.unsqueeze.said
        nibble.unsqueeze.place.require(axes.is_one(rank, -1), f"Unsqueeze on axes {axes.one}, not {rank}")
    return packed, first.high, first.kind, padded


def _padded(trail: Trail, value: Value, at: Place) -> tuple[Value, Place, int]:
    """Pad of flat bytes by what their last block lacks: (the value before, the node, bytes)."""
    pad = trail.node(value, "Pad", at)
    pads = trail.literal(pad, 1)
    pad.require(pads.dims == (2,), f"Pad by {pads}, not by [0, bytes]")
    pad.require(pads.values[0] == 0, f"Pad by {pads}, not by [0, bytes]")
    pad.require(pads.values[1] > 0, f"Pad by {pads}, not by [0, bytes], some of them")
    pad.require(not any(pad.node.input[2:]), "Pad with a value or axes of its own; zeros after flat bytes are expected")
    return trail.input(pad, 0), pad, pads.values[1]


class _Nibble(NamedTuple):
    """One nibble of each byte of a source, of this type, with an axis put in."""

    high: bool
    source: Value
    reader: Place
    unsqueeze: Step
    kind: int


#: The operators that take a byte apart, and by what.
_BY = {"Div": 16, "BitShift": 4, "Mod": 16, "BitwiseAnd": 15}
_HIGH = ("Div", "BitShift")


def _nibble(trail: Trail, value: Value, at: Place) -> _Nibble:
    """Div by 16 or BitShift right by 4, masked or not; or Mod 16 or BitwiseAnd 15; in types that hold bytes."""
    after, value, at = steps_before(trail, value, at, "Cast", "Unsqueeze")
    taken: list[Step] = []
    while trail.op_type(value) in _BY and not (taken and taken[-1].op in _HIGH):
        op = trail.op_type(value)
        at = trail.node(value, op, at, "direction")
        taken.append(Step(op, at, None))
        casts, value, at = steps_before(trail, trail.input(at, 0), at, "Cast")
        taken += casts[::-1]
    if not taken:
        trail.refuse(value, at, "Div, BitShift, Mod or BitwiseAnd, which take a byte apart")
    unsqueezes = [step for step in after if step.op == "Unsqueeze"]
    at.require(len(unsqueezes) == 1, f"{len(unsqueezes)} Unsqueeze nodes over a nibble, not one")
    if trail.op_type(value) not in ("initializer", "input", "Constant", "Pad"):
        trail.refuse(value, at, "Cast of a constant of packed")
    kind = TensorProto.UINT8
    for step in (*taken[::-1], *after):
        if step.op == "Cast":
            kind = step.said
            step.place.require(kind in _BYTES, f"Cast of the bytes to {type_name(kind)}, not {_names(_BYTES)}")
        elif step.op in _BY:
            _taken(trail, step, kind)
    return _Nibble(any(step.op in _HIGH for step in taken), value, at, unsqueezes[0], kind)


def _taken(trail: Trail, step: Step, kind: int) -> None:
    """Refuse another literal than the one that takes a byte apart."""
    if step.op == "BitShift":
        direction = attribute(step.place, "direction", b"none").decode(errors="replace")
        step.place.require(direction == "RIGHT", f"BitShift with direction {direction}, not RIGHT")
        step.place.require(kind in _UNSIGNED, f"BitShift of {type_name(kind)}, not {_names(_UNSIGNED)}")
    by = trail.literal(step.place, 1, kind=kind)
    step.place.require(by.is_one(_BY[step.op]), f"{step.op} by {by.one}, not {_BY[step.op]}")


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
    if step.op == "Cast":
        return True
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


@functools.cache
def _names(types: frozenset[int]) -> str:
    """Types as a list for a sentence."""
    return ", ".join(type_name(kind) for kind in sorted(types, key=lambda kind: (kind not in _INDEX, -kind)))
