"""Chains that scale codes less a zero point: by DequantizeLinear or in arithmetic. They become QMM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME
from lut4tool.recognize import qmm
from lut4tool.recognize.clauses import MOVES, Leaves, Seen, Step, steps_before, viewed
from lut4tool.recognize.grid import Part, Weight, found
from lut4tool.recognize.nibbles import BYTES, pairs
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.qmm import Types
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.view import Shape, View, view_of
from lut4tool.recognize.walk import FOUR_BITS, LOOKUPS, Place, Value, Walk, attribute, type_name

Chain = Callable[[Walk, Place, Value, bool], Proof]

#: The first opset with 4-bit types.
_FIRST_OPSET = 21
_FLOATS = frozenset(DTYPE_NAME)
#: Integers in which codes less zero points of 0 to 127 do not wrap; in all but the first of 0 to 255.
_SIGNED = frozenset({TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64})
#: What codes from 0 to 15 may be cast to.
_HOLDING = _FLOATS | _SIGNED | {
    TensorProto.UINT4, TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip
#: Integers that zero points may be, where all are found to be 0 to 255 (0 to 127 of INT8).
_POINTS = _SIGNED | {TensorProto.UINT8}
_FLOAT_NAMES = "FLOAT, FLOAT16 or BFLOAT16"
#: Nodes that are passed at most to see where a product's operand comes from.
_DEEP = 64


def chain_of(walk: Walk, weight: Value) -> Chain | None:
    """The function that proves what a weight is, by the operator that makes its values; None: none of this file."""
    maker = _maker(walk, weight)
    if maker is None:
        return None
    if maker.node.op_type == "DequantizeLinear":
        return dequantized
    if maker.node.op_type == "Mul" and any(_of_codes(walk, maker, index) for index in (0, 1)):
        return arithmetic
    return offset if maker.node.op_type == "Add" and any(_scaled(walk, maker, index) for index in (0, 1)) else None


def _maker(walk: Walk, value: Value | None) -> Place | None:
    """The first node before a value that neither moves nor casts it."""
    for _ in range(_DEEP):
        node = value.definition if value is not None else None
        if value is None or not isinstance(node, NodeProto):
            return None
        if node.op_type not in (*MOVES, "Cast", "Identity") or not node.input:
            return Place(value.scope, node)
        value = walk.lookup(value.scope, node.input[0])
    return None


def _operand(walk: Walk, product: Place, index: int) -> Value | None:
    return walk.lookup(product.scope, "".join(product.node.input[index : index + 1]))


def _scaled(walk: Walk, add: Place, index: int) -> bool:
    """Whether an operand is codes times scales."""
    maker = _maker(walk, _operand(walk, add, index))
    return maker is not None and maker.node.op_type == "Mul" and any(_of_codes(walk, maker, at) for at in (0, 1))


def _of_codes(walk: Walk, product: Place, index: int) -> bool:
    """Whether an operand is codes, less a zero point or as they are."""
    value = _operand(walk, product, index)
    maker = _maker(walk, value)
    if maker is not None and maker.node.op_type == "Sub":
        first = _operand(walk, maker, 0)
        return first is not None and walk.origin(first).integers
    if maker is not None:
        return maker.node.op_type in ("Concat", "ScatterND")
    for _ in range(_DEEP):
        if value is None or not isinstance(value.definition, NodeProto) or not value.definition.input:
            break
        value = walk.lookup(value.scope, value.definition.input[0])
    return value is not None and isinstance(value.definition, TensorProto) and value.definition.data_type in FOUR_BITS


# -- Codes


def _codes(trail: Trail, leaves: Leaves, value: Value, at: Place) -> tuple[Part, int]:
    """Elements of a 4-bit type, or the nibbles of bytes, moved and cast: (the codes, their type)."""
    steps, value, at = steps_before(trail, value, at, *MOVES, "Cast")
    if trail.op_type(value) in ("Concat", "ScatterND"):
        both = pairs(trail, leaves, value, at)
        at.require(not both.padded, "Pad of the bytes of an affine weight, which are whole")
        codes, kind = Part(both.leaf, both.view, both.seen, per=2), both.kind
    else:
        if trail.op_type(value) not in ("initializer", "input", "Constant"):
            trail.refuse(value, at, "Concat of the nibbles of bytes, or a constant of 4-bit codes")
        leaf = leaves.read(value, at, "codes", FOUR_BITS, "INT4 or UINT4, nor the nibbles of bytes")
        opset = at.scope.opset
        at.require(opset >= _FIRST_OPSET, f"opset {opset}, not {_FIRST_OPSET} or later, which have 4-bit types")
        (kind,) = leaf.types
        codes = Part(leaf, view_of(leaf.shape), {}, per=1, least=-8 if kind == TensorProto.INT4 else 0)
    for step in steps:
        if step.op == "Cast":
            kind = step.said
            holding = kind in (_SIGNED | _FLOATS if codes.least else _HOLDING)
            step.place.require(holding, f"Cast of the codes to {type_name(kind)}, which does not hold them all")
    return replace(codes, view=viewed(codes.view, steps, codes.seen)), kind


def _cast(steps: Sequence[Step]) -> str:
    """The type that a weight is cast to, or ""."""
    casts = [step for step in steps if step.op == "Cast"]
    for step in casts:
        step.place.require(step.said in _FLOATS, f"Cast of the weight to {type_name(step.said)}, not {_FLOAT_NAMES}")
        step.place.require(len(casts) == 1, f"{len(casts)} Casts of the weight, which would round it twice")
    return DTYPE_NAME[casts[0].said] if casts else ""


# -- DequantizeLinear


def dequantized(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """DequantizeLinear of INT4 or UINT4 codes, then what moves elements, and a Cast. Raises Refuse.

    Codes and zero points are 4-bit tensors, or the nibbles of bytes, cast to UINT4. Scales are one a block, one for
    each entry along an axis, or one for all.
    """
    trail = Trail(walk)
    leaves = Leaves(trail)
    after, value, at = steps_before(trail, weight, site, *MOVES, "Cast")
    node = trail.node(value, "DequantizeLinear", at, "axis", "block_size")
    codes, kind = _codes(trail, leaves, trail.input(node, 0), node)
    node.require(kind in FOUR_BITS, f"DequantizeLinear of codes cast to {type_name(kind)}, not to UINT4")
    leaf = leaves.floats(trail.input(node, 1), node, "scales")
    points = None
    if len(node.node.input) > 2 and node.node.input[2]:
        points, of = _codes(trail, leaves, trail.input(node, 2), node)
        node.require(of == kind, f"zero points {points.leaf} is not of the codes' type")
        node.require(points.view.shape == leaf.shape, f"zero points {points.leaf} is not of the scales' shape")
        points = replace(points, view=_spread(node, points.view, codes.view.shape))
    (dtype,) = leaf.types
    scales = Part(leaf, _spread(node, view_of(leaf.shape), codes.view.shape), {})
    types = Types(DTYPE_NAME[dtype], _cast(after) or DTYPE_NAME[dtype])
    whole = Weight("dequantized", codes, scales, points, codes.view.shape, after, types)
    return _proof(site, trail, weight, flipped, found(node, leaves, whole, flipped))


def _spread(node: Place, view: View, shape: Shape) -> View:
    """Scales or zero points, repeated over codes of this shape as DequantizeLinear does. Raises Refuse."""
    block, along = attribute(node, "block_size", 0), attribute(node, "axis", 1)
    given = list(view.shape)
    if not block and view.shape in ((), (1,)):
        return view._replace(shape=(), dims=()).expanded(shape) or view
    node.require(-len(shape) <= along < len(shape), f"DequantizeLinear with axis {along} of {list(shape)}")
    node.require(block >= 0, f"DequantizeLinear with block_size {block}, not positive")
    axis = along % len(shape)
    blocks = tuple(-(-size // block) if block and at == axis else size for at, size in enumerate(shape))
    wanted = blocks if block else (shape[axis],)
    node.require(view.shape == wanted, f"scales {given}, not {list(wanted)}, along axis {along} of {list(shape)}")
    if block:
        return view.stretched(axis, block, shape[axis])
    single = View((shape[axis], *(1,) * (len(shape) - 1 - axis)), (*view.dims, *((),) * (len(shape) - 1 - axis)))
    return single._replace(start=view.start).expanded(shape) or view


# -- Arithmetic


def arithmetic(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Codes less zero points or as they are, times scales, then what moves elements, and a Cast. Raises Refuse.

    Zero points are taken off in integers, in FLOAT or in the scales' type. qmm.spell writes such a chain.
    """
    trail = Trail(walk)
    leaves = Leaves(trail)
    after, value, at = steps_before(trail, weight, site, *MOVES, "Cast")
    product = trail.node(value, "Mul", at)
    index = 0 if _of_codes(walk, product, 0) else 1
    scales, dtype = _floats(trail, leaves, trail.input(product, 1 - index), product, "scales")
    codes, points, kind = _steps(trail, leaves, trail.input(product, index), product, dtype)
    fit = f"Mul of {type_name(kind)} steps by {type_name(dtype)} scales, not of one type"
    product.require(kind == dtype, fit)
    types = Types(DTYPE_NAME[dtype], _cast(after) or DTYPE_NAME[dtype])
    whole = Weight("arithmetic", codes, scales, points, codes.view.shape, after, types)
    return _proof(site, trail, weight, flipped, found(product, leaves, whole, flipped))


def offset(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """Codes times scales plus an offset: always refused, since QMM rounds otherwise. Raises Refuse."""
    trail = Trail(walk)
    _, value, at = steps_before(trail, weight, site, *MOVES, "Cast")
    trail.refuse(value, at, "a zero point that Sub takes off codes before they are scaled, as in QMM")


def _proof(site: Place, trail: Trail, weight: Value, flipped: bool, held: qmm.Found) -> Proof:
    return qmm.proof(site, Product(site.node.input[0]), weight.name, flipped, trail.nodes(), trail.literals, held)


def _floats(trail: Trail, leaves: Leaves, value: Value, at: Place, what: str) -> tuple[Part, int]:
    """A constant of floats, moved, repeated and cast among them: (it, its type)."""
    steps, value, at = steps_before(trail, value, at, *MOVES, "Cast")
    picked = trail.op_type(value) in LOOKUPS
    at.require(not picked, "{} that an index picks, as GPTQ's g_idx does, not in the order of their blocks", what)
    leaf = leaves.floats(value, at, what)
    (kind,) = leaf.types
    types = tuple(step.said for step in steps if step.op == "Cast")
    for step in steps:
        if step.op == "Cast":
            kind = step.said
            step.place.require(kind in _FLOATS, f"Cast of the {what} to {type_name(kind)}, not {_FLOAT_NAMES}")
    seen: dict[str, Seen] = {}
    return Part(leaf, viewed(view_of(leaf.shape), steps, seen), seen, types=types), kind


def _steps(trail: Trail, leaves: Leaves, value: Value, at: Place, dtype: int) -> tuple[Part, Part | None, int]:
    """What scales of a type multiply: (the codes, the zero points or none, the type)."""
    after, made, reader = steps_before(trail, value, at, *MOVES, "Cast")
    if trail.op_type(made) != "Sub":
        codes, kind = _codes(trail, leaves, value, at)
        return codes, None, kind
    sub = trail.node(made, "Sub", reader)
    codes, kind = _codes(trail, leaves, trail.input(sub, 0), sub)
    apart = kind in _SIGNED or kind in (TensorProto.FLOAT, dtype)
    sub.require(apart, f"Sub in {type_name(kind)}, not in signed integers, FLOAT or the scales' {type_name(dtype)}")
    wraps = kind == TensorProto.INT8 and codes.least < 0
    sub.require(not wraps, "Sub in INT8 of INT4 codes, which may wrap; a wider type is expected")
    points = _points(trail, leaves, trail.input(sub, 1), sub, kind, dtype)
    shape = codes.view.shape
    spread = points.view.expanded(shape)
    if spread is None:
        sub.refuse(f"Sub of {list(points.view.shape)} from {list(shape)}, which do not fit")
    for step in after:
        if step.op == "Cast":
            exact = kind not in _FLOATS or kind == TensorProto.FLOAT
            exact = exact and step.said in (TensorProto.FLOAT, dtype)
            step.place.require(exact, f"Cast of the steps to {type_name(step.said)}, not the scales' type")
            kind = step.said
    return (
        replace(codes, view=viewed(codes.view, after, codes.seen)),
        replace(points, view=viewed(spread, after)),
        kind,
    )


def _points(trail: Trail, leaves: Leaves, value: Value, at: Place, kind: int, dtype: int) -> Part:
    """Zero points that are taken off in one type, as QMM can hold them: codes, bytes, or the scales' type."""
    steps, made, reader = steps_before(trail, value, at, *MOVES, "Cast")
    if trail.op_type(made) in ("Concat", "ScatterND"):
        points, of = _codes(trail, leaves, value, at)
        at.require(of == kind, f"Sub of {type_name(of)} zero points from {type_name(kind)} codes, not of one type")
        return points
    leaf = leaves.read(made, reader, "zero points", _FLOATS | _POINTS, "of floats, or of integers from 0 to 255")
    (of,) = leaf.types
    whole, seen = of in _POINTS, dict[str, Seen]()
    casts = [step for step in steps if step.op == "Cast"]
    for step in casts:
        of = step.said
        holding = of in (_FLOATS | BYTES if whole else _FLOATS)
        step.place.require(holding, f"Cast of the zero points to {type_name(of)}, which may not hold them")
    at.require(of == kind, f"Sub of {type_name(of)} zero points from {type_name(kind)} codes, not of one type")
    types = () if whole else tuple(step.said for step in casts)
    if not whole and kind != dtype:  # taken off in FLOAT: the scales' type must hold them as they are
        at.require(leaf.types == {dtype}, f"zero points {leaf} is not UINT8, nor of the scales' type")
        at.require(set(types) <= {TensorProto.FLOAT}, "zero points that are rounded by a Cast and taken off in FLOAT")
        types = ()
    return Part(leaf, viewed(view_of(leaf.shape), steps, seen), seen, types=types)
