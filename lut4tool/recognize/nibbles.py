"""How bytes are taken apart into their nibbles, in all the ways that exporters write it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from onnx import TensorProto

from lut4tool.recognize.clauses import Leaves, Seen, Step, steps_before, viewed
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.view import View, beside, view_of
from lut4tool.recognize.walk import Constant, Literal, Place, Value, attribute, type_name

UNSIGNED = frozenset({TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64})
#: Types that hold every byte.
BYTES = UNSIGNED | {TensorProto.INT16, TensorProto.INT32, TensorProto.INT64}
#: The operators that take a byte apart, and by what.
_BY = {"Div": 16, "BitShift": 4, "Mod": 16, "BitwiseAnd": 15}
_HIGH = ("Div", "BitShift")
_FREE = {"Cast": ("to",), "BitShift": ("direction",)}
#: BitwiseAnd of it leaves the high nibble in its place.
_UPPER = 240
#: ScatterND lists the rows of so many at most.
_MOST_ROWS = 1 << 22
#: PyTorch writes one shift in another's sign at most a few deep.
_DEEP = 8


class Pairs(NamedTuple):
    """Both nibbles of each byte of a constant, side by side along an axis.

    view: of the nibbles of the bytes, flat, the low one of each byte first; kind: their type; padded: bytes of zeros
    that come after the constant's own; seen: what each Reshape makes, by its output.
    """

    leaf: Constant
    view: View
    kind: int
    padded: int
    seen: dict[str, Seen]

    @property
    def high_first(self) -> bool | None:
        """Whether the high nibble of each byte comes first; None where they do not lie side by side, in order."""
        count = math.prod(self.view.shape)
        flat = self.view.reshaped((count,))
        low = view_of((count,))
        high = beside(view_of((count // 2, 1), 2)._replace(start=1), view_of((count // 2, 1), 2), 1)
        if flat in (low, high and high.reshaped((count,))):
            return flat != low
        return None


class _Part(NamedTuple):
    """A part of each byte of a source: the "byte" itself, its "upper" half in its place, its "high" or "low" nibble."""

    source: Value
    reader: Place
    kind: int
    holds: str


class _Half(NamedTuple):
    """A nibble of each byte, and what moves and casts it then."""

    part: _Part
    moved: list[Step]
    kind: int


def pairs(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Pairs:
    """Both nibbles of the same bytes, in either order and along any axis: Concat, or ScatterND. Raises Refuse."""
    if trail.op_type(value) == "ScatterND":
        return _scattered(trail, leaves, value, at)
    node = trail.node(value, "Concat", at, "axis")
    node.require(len(node.node.input) == 2, f"Concat of {len(node.node.input)} values, not of the two nibbles")
    halves = [_half(trail, trail.input(node, index), node) for index in (0, 1)]
    axis = attribute(node, "axis")
    node.require(axis is not None, "Concat without an axis")
    return _beside(trail, leaves, node, halves, axis)


def _beside(trail: Trail, leaves: Leaves, node: Place, halves: list[_Half], axis: int) -> Pairs:
    """Two halves along an axis."""
    first, second = (half.part for half in halves)
    op = node.node.op_type
    node.require(
        first.holds != second.holds, f"{op} of the {first.holds} nibble twice, not of the high and the low one"
    )
    node.require(first.source == second.source, f"{op} of nibbles of two values, not of one packed value")
    node.require(halves[0].kind == halves[1].kind, f"{op} of nibbles of two types, not of one")
    source, reader, padded = first.source, first.reader, 0
    if trail.op_type(source) == "Pad":
        source, reader, padded = _padded(trail, source, reader)
    leaf = leaves.read(source, reader, "packed", frozenset({TensorProto.UINT8}), "UINT8")
    reader.require(not padded or len(leaf.shape) == 1, "Pad of {}, not of flat bytes", leaf)
    reader.require(len(leaf.shape) > 0, "packed {} is not of rank 1 or more", leaf)
    whole = view_of((leaf.shape[0] + padded,) if padded else leaf.shape, 2)
    seen: dict[str, Seen] = {}
    views = [viewed(whole._replace(start=int(half.part.holds == "high")), half.moved, seen) for half in halves]
    shape = list(views[0].shape)
    node.require(-len(shape) <= axis < len(shape), f"{op} with axis {axis} of shape {shape}")
    view = beside(views[0], views[1], axis % len(shape))
    if view is None:
        node.refuse(f"{op} of nibbles that are moved in two ways, not in one")
    return Pairs(leaf, view, halves[0].kind, padded, seen)


def _padded(trail: Trail, value: Value, at: Place) -> tuple[Value, Place, int]:
    """Pad of flat bytes by what their last block lacks: (the value before, the node, bytes)."""
    pad = trail.node(value, "Pad", at)
    pads = trail.literal(pad, 1)
    pad.require(pads.dims == (2,), f"Pad by {pads}, not by [0, bytes]")
    pad.require(pads.values[0] == 0, f"Pad by {pads}, not by [0, bytes]")
    pad.require(pads.values[1] > 0, f"Pad by {pads}, not by [0, bytes], some of them")
    pad.require(not any(pad.node.input[2:]), "Pad with a value or axes of its own; zeros after flat bytes are expected")
    return trail.input(pad, 0), pad, pads.values[1]


def _scattered(trail: Trail, leaves: Leaves, value: Value, at: Place) -> Pairs:
    """PyTorch's tmp[:n] = high; tmp[n:] = low, with tmp new: the rows of one nibble, then those of the other."""
    halves: list[_Half] = []
    places: list[Place] = []
    rows: list[Literal] = []
    for _ in range(2):
        node = trail.node(value, "ScatterND", at)
        halves.insert(0, _half(trail, trail.input(node, 2), node))
        rows.insert(0, trail.literal(node, 1, most=_MOST_ROWS))
        places.append(node)
        value, at = trail.input(node, 0), node
    new = trail.node(value, "Expand", at)
    shape = trail.literal(new, 1)
    first = trail.hold(new, 0)
    new.require(set(first) <= {1} and len(first) <= 1, f"Expand of shape {list(first)}, not of one number")
    found = _beside(trail, leaves, places[0], halves, 0)
    new.require(shape.values == found.view.shape, f"Expand to {shape}, not to {list(found.view.shape)}, both nibbles")
    half = found.view.shape[0] // 2
    for node, said, start in zip(places[::-1], rows, (0, half), strict=True):
        fits = said.dims == (half, 1) and said.values == tuple(range(start, start + half))
        node.require(fits, f"ScatterND to other rows than {start} to {start + half - 1} in order")
    return found


def _half(trail: Trail, value: Value, at: Place) -> _Half:
    """A nibble of each byte, given axes and cast."""
    moved, value, at = steps_before(trail, value, at, "Cast", "Unsqueeze", "Reshape")
    part = _part(trail, value, at)
    at.require(part.holds in ("high", "low"), f"the {part.holds} of each byte, not one nibble of it")
    kind = part.kind
    for step in moved:
        if step.op == "Cast":
            kind = step.said
            held = BYTES | {TensorProto.INT8, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
            step.place.require(kind in held, f"Cast of the bytes to {type_name(kind)}, not {names_of(BYTES)}")
    return _Half(part, moved, kind)


def _part(trail: Trail, value: Value, at: Place, deep: int = 0, bare: bool = False) -> _Part:
    """What Casts and the operators that take a byte apart leave of each byte; all is 0 or more in its type.

    bare: it may be the bytes themselves.
    """
    steps: list[Place] = []
    while (op := trail.op_type(value)) in ("Cast", *_BY):
        at = trail.node(value, op, at, *_FREE.get(op, ()))
        steps.append(at)
        value = trail.input(at, 0)
    if op in ("Where", "Sub"):
        at.require(deep < _DEEP, f"{op} over {op}, more than {_DEEP} deep")
        part = (_shifted if op == "Where" else _divided)(trail, value, at, deep + 1)
    else:
        if not (steps or bare) or op not in ("initializer", "input", "Constant", "Pad"):
            trail.refuse(value, at, "Div, BitShift, Mod or BitwiseAnd of a constant of packed bytes")
        part = _Part(value, at, TensorProto.UINT8, "byte")
    for place in steps[::-1]:
        part = _cast(part, place) if place.node.op_type == "Cast" else _taken(trail, part, place)
    return part


def _cast(part: _Part, place: Place) -> _Part:
    to, nibble = attribute(place, "to"), part.holds in ("high", "low")
    held = to in BYTES or (nibble and to == TensorProto.INT8)
    place.require(held, f"Cast of the bytes to {type_name(to)}, not {names_of(BYTES)}")
    return part._replace(kind=to)


def _taken(trail: Trail, part: _Part, place: Place) -> _Part:
    """What one operator leaves: Div, BitShift, Mod, BitwiseAnd by the number that takes a byte apart."""
    op = place.node.op_type
    if op == "BitShift":
        direction = attribute(place, "direction", b"none").decode(errors="replace")
        place.require(direction == "RIGHT", f"BitShift with direction {direction}, not RIGHT")
        place.require(part.kind in UNSIGNED, f"BitShift of {type_name(part.kind)}, not {names_of(UNSIGNED)}")
    by = trail.literal(place, 1, kind=part.kind)
    if op == "BitwiseAnd" and part.holds == "byte" and by.is_one(_UPPER):
        return part._replace(holds="upper")
    place.require(by.is_one(_BY[op]), f"{op} by {by.one}, not {_BY[op]}")
    if op in _HIGH:
        place.require(part.holds in ("byte", "upper"), f"{op} of the {part.holds} nibble, not of the bytes")
        return part._replace(holds="high")
    place.require(part.holds != "upper", f"{op} of the upper half of each byte, which leaves nothing")
    return part._replace(holds="low") if part.holds == "byte" else part


def _shifted(trail: Trail, value: Value, at: Place, deep: int) -> _Part:
    """PyTorch's shift of signed integers: Where(Less(x, 0), ..., shifted); x is a part of a byte, so not less."""
    node = trail.node(value, "Where", at)
    less = _never(trail, trail.input(node, 0), node, deep)
    _, other, reader = steps_before(trail, trail.input(node, 1), node, "Cast")
    mask = trail.node(other, "BitwiseOr", reader)
    masked = _part(trail, trail.input(mask, 0), mask, deep)
    ones = trail.literal(mask, 1, kind=masked.kind)
    mask.require(ones.dims in ((), (1,)), f"BitwiseOr with {ones}, not with one number")
    part = _part(trail, trail.input(node, 2), node, deep)
    node.require(part.source == less.source == masked.source, "Where of several values, not of one packed value")
    return part


def _divided(trail: Trail, value: Value, at: Place, deep: int) -> _Part:
    """PyTorch's floor division: Div less Cast(And(Less(x, 0) == True, ...)), which is 0 as x is a part of a byte."""
    node = trail.node(value, "Sub", at)
    cast = trail.node(trail.input(node, 1), "Cast", node, "to")
    both = trail.node(trail.input(cast, 0), "And", cast)
    same = trail.node(trail.input(both, 0), "Equal", both)
    less = _never(trail, trail.input(same, 0), same, deep)
    true = trail.literal(same, 1, kind=TensorProto.BOOL)
    same.require(true.is_one(1), f"Equal to {true.one}, not to True")
    rest = trail.node(trail.input(both, 1), "Cast", both, "to")
    left = _part(trail, trail.input(rest, 0), rest, deep)
    part = _part(trail, trail.input(node, 0), node, deep)
    node.require(part.source == less.source == left.source, "Sub of several values, not of one packed value")
    return part


def _never(trail: Trail, value: Value, at: Place, deep: int) -> _Part:
    """The part of a byte x in Less(x, 0). Raises Refuse where it is not that."""
    less = trail.node(value, "Less", at)
    part = _part(trail, trail.input(less, 0), less, deep, bare=True)
    zero = trail.literal(less, 1, kind=part.kind)
    less.require(zero.is_one(0), f"Less than {zero.one}, not than 0")
    return part


@functools.cache
def names_of(types: frozenset[int]) -> str:
    """Types as a list for a sentence, those that Gather takes first."""
    index = (TensorProto.INT32, TensorProto.INT64)
    return ", ".join(type_name(kind) for kind in sorted(types, key=lambda kind: (kind not in index, -kind)))
