"""com.microsoft's MatMulNBits: a QMM in all but how its constants lie."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from onnx import NodeProto, TensorProto, helper

from lut4tool.formats import ONNX_DTYPE
from lut4tool.recognize import qmm, vendor
from lut4tool.recognize.layout import Axis, Laid
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.qmm import Found, Grid, Types
from lut4tool.recognize.view import view_of
from lut4tool.recognize.walk import OPSETS, Constant, Place, Walk

_INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")
#: Attributes and their defaults; those without one are required.
_ATTRIBUTES: Mapping[str, int | None] = {
    "K": None, "N": None, "block_size": None, "bits": 4, "accuracy_level": 0, "weight_prepacked": 0,
}  # fmt: skip
#: The least accuracy that a runtime must compute with: not set, float32, float16, bfloat16, int8. QMM never rounds A,
#: which every level allows.
_LEVELS = range(5)


def matmul_nbits(walk: Walk, site: Place) -> Proof:
    """MatMulNBits of 4 bits (onnxruntime's ContribOperators.md): A @ W.T, plus a bias or none. Raises Refuse.

    zero_points: none (8), two to a byte, or of A's type. B, scales and zero_points may run their last axes together.
    Refused: g_idx and other bits. Every accuracy_level allows the product of A as it is, which QMM makes. The proof's
    chain is this definition in standard nodes.
    """
    given = _given(walk, site)
    facts = vendor.facts(site, _ATTRIBUTES)
    site.require(facts["bits"] == 4, f"MatMulNBits of {facts['bits']} bits, not 4")
    site.require(not facts["weight_prepacked"], f"MatMulNBits with weight_prepacked {facts['weight_prepacked']}, not 0")
    grid = Grid(facts["K"], facts["N"], facts["block_size"], 1)
    constants = {
        name: walk.constant(walk.find(site.scope, given[name], site), site)
        for name in ("B", "scales", "zero_points")
        if name in given
    }
    weight_dtype = qmm.float_type(site, constants["scales"])
    level = facts["accuracy_level"]
    site.require(level in _LEVELS, f"MatMulNBits with accuracy_level {level}, not 0 to 4")

    spelling, kind = _Spelling(), ONNX_DTYPE[weight_dtype]
    packed = _part(site, "B", constants["B"], TensorProto.UINT8, qmm.packed_shape(grid))
    scales = _part(site, "scales", constants["scales"], kind, grid.scales)
    points = _points(site, spelling, grid, constants.get("zero_points"), kind)
    types = Types(weight_dtype, weight_dtype)
    weight = qmm.spell(spelling, grid, types, spelling.shaped(packed), spelling.shaped(scales), points.value)
    parts = [part for part in (packed, scales, points.part) if part]
    found = Found(
        name="matmul_nbits",
        grid=grid,
        types=types,
        roles={"packed": packed.role, "scales": scales.role, "zero_points": points.role},
        constants=list(constants.values()),
        axes={part.constant.name: part.unit(grid) for part in parts},
        shapes=spelling.shapes(grid),
    )
    product = Product(given["A"], bias=given.get("bias", ""))
    return qmm.proof(site, product, weight, False, tuple(spelling.nodes), {}, found)


def _given(walk: Walk, site: Place) -> dict[str, str]:
    """The inputs by name, those that are there. Raises Refuse."""
    node = site.node
    owner = walk.model if site.scope.function is None else walk.model.functions[site.scope.function]
    versions = sorted({entry.version for entry in owner.opset_import if entry.domain in ("", "ai.onnx")})
    imported = " and ".join(map(str, versions)) or "none"
    site.require(site.scope.opset in OPSETS, f"opset {imported}, not one of {OPSETS[0]} to {OPSETS[-1]}")
    site.require(len(node.input) <= len(_INPUTS), f"MatMulNBits with {len(node.input)} inputs, not 3 to 6")
    site.require(len(node.output) == 1, f"MatMulNBits with {len(node.output)} outputs, not one")
    given = {name: value for name, value in zip(_INPUTS, node.input, strict=False) if value}
    for name in _INPUTS[:3]:
        site.require(name in given, f"MatMulNBits without {name}")
    site.require("g_idx" not in given, "MatMulNBits with g_idx; blocks of rows in their order are expected")
    for name in ("A", "bias"):
        if name in given:
            walk.find(site.scope, given[name], site)
    return given


class _Part(NamedTuple):
    """A constant that holds [N, ...], perhaps with its last axes run together, and what the new node holds of it."""

    constant: Constant
    shape: tuple[int, ...]
    role: str | Laid

    @property
    def whole(self) -> bool:
        """Whether it has the shape that it means."""
        return self.constant.shapes == {self.shape}

    def unit(self, grid: Grid) -> Axis | None:
        """Where one of N lies in it; None where its entries do not share K evenly."""
        entries = prod(self.shape[1:]) if len(self.constant.tensors[0].dims) == 1 else 1
        return None if grid.depth % entries else Axis(0, grid.depth // entries)


def _part(site: Place, name: str, constant: Constant, kind: int, shape: tuple[int, ...]) -> _Part:
    """A constant of this type and shape, or of one that runs the last axes together. Raises Refuse."""
    site.require(constant.types == {kind}, f"{name} {constant} is not {TensorProto.DataType.Name(kind)}")
    if constant.shapes == {shape}:
        return _Part(constant, shape, constant.name)
    flat = [(*shape[:rank], prod(shape[rank:])) for rank in range(len(shape))]
    one = len(constant.shapes) == 1 and next(iter(constant.shapes)) in flat
    site.require(one, f"{name} {constant} is not {list(shape)}, nor that with its last axes run together")
    qmm.require_one(site, constant)
    return _Part(constant, shape, Laid(qmm.lay_flat, (constant.name,), shape[1:], kind, shape, view=True))


class _Points(NamedTuple):
    """Zero points: their value in the chain, FLOAT [N, blocks] or [1, 1], their role, and their constant."""

    value: str
    role: str | Laid
    part: _Part | None


def _points(site: Place, spelling: _Spelling, grid: Grid, constant: Constant | None, kind: int) -> _Points:
    """Zero points of each layout. Raises Refuse."""
    if constant is None:
        one = spelling.node("Unsqueeze", spelling.ints([8]), spelling.ints([0]))
        return _Points(spelling.node("Cast", one, to=TensorProto.FLOAT), qmm.one_point(8), None)
    if constant.types != {TensorProto.UINT8}:
        typed = _part(site, "zero_points", constant, kind, grid.scales)
        value = spelling.shaped(typed)
        as_float = value if kind == TensorProto.FLOAT else spelling.node("Cast", value, to=TensorProto.FLOAT)
        return _Points(as_float, typed.role, typed)
    count = -(-grid.blocks // 2)
    part = _part(site, "zero_points", constant, TensorProto.UINT8, (grid.columns, count))
    qmm.require_one(site, constant)
    low, high = qmm.spell_nibbles(spelling, spelling.shaped(part), 2)
    pairs = spelling.node("Concat", low, high, axis=2)
    value = spelling.node("Reshape", pairs, spelling.ints([grid.columns, 2 * count]))
    value = spelling.node("Slice", value, spelling.ints([0]), spelling.ints([grid.blocks]), spelling.ints([1]))
    view = view_of((grid.columns, 2 * count)).cut(1, grid.blocks)
    settings = (view, 2 * count * grid.columns, 2, 0)
    role = Laid(qmm.lay_points, (constant.name,), settings, TensorProto.UINT8, grid.scales)
    return _Points(spelling.node("Cast", value, to=TensorProto.FLOAT), role, part)


class _Spelling:
    """Writes standard nodes (qmm.Writer)."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self._targets: dict[str, list[int]] = {}

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a standard operator."""
        name = f"{len(self.nodes)}: {op}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def ints(self, values: list[int]) -> str:
        """An INT64 literal of rank 1."""
        name = self.node("Constant", value_ints=values)
        self._targets[name] = values
        return name

    def shaped(self, part: _Part) -> str:
        """The value of a part in the shape that it means."""
        name = part.constant.name
        return name if part.whole else self.node("Reshape", name, self.ints(list(part.shape)))

    def shapes(self, grid: Grid) -> dict[str, tuple[int, ...]]:
        """What the Reshapes, which all begin with N, are told where some of N are taken."""
        reshapes = (node for node in self.nodes if node.op_type == "Reshape")
        return {node.output[0]: (-1, *self._targets[node.input[1]][1:]) for node in reshapes}
