"""How codes, scales and zero points lie in an affine weight, and so in the QMM that will hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from onnx import TensorProto

from lut4tool.formats import ONNX_DTYPE
from lut4tool.recognize import qmm
from lut4tool.recognize.clauses import Leaves, Seen, Step, viewed
from lut4tool.recognize.layout import Axis, Laid
from lut4tool.recognize.qmm import Grid, Types
from lut4tool.recognize.view import Shape, View, view_of
from lut4tool.recognize.walk import Constant, Place


@dataclass(frozen=True, eq=False)
class Part:
    """Codes, scales or zero points: a constant, and where the elements of the weight find theirs in it.

    per: codes in an element of the constant (2: the nibbles of a byte, the low one first; 0: it holds numbers).
    least: the least code (INT4: -8). types: Casts of numbers that may change them. seen: the view that each step with
    a target makes, by its output.
    """

    leaf: Constant
    view: View
    seen: dict[str, Seen]
    per: int = 0
    least: int = 0
    types: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Codes or numbers in the constant."""
        return math.prod(self.leaf.shape) * max(self.per, 1)

    def as_matrix(self, at: Place, shape: Shape, after: Sequence[Step], turned: bool) -> Part:
        """This part of the matrix that steps make of elements of this shape, turned or not. Raises Refuse."""
        view = self.view.expanded(shape)
        if view is None:
            at.refuse(f"{at.node.op_type} of {list(shape)} and {list(self.view.shape)}, which do not fit")
        view = viewed(view, after, self.seen if self.per and self.view.shape == shape else None)
        at.require(len(view.shape) == 2, "the weight is of shape {}, not a matrix", list(view.shape))
        return replace(self, view=view.transposed((1, 0)) if turned else view)

    def unit(self, depth: int) -> Axis | None:
        """Where one of N lies in the constant; None where that is not so many whole entries of an axis."""
        if len(self.view.dims[0]) != 1 or self.view.dims[0][0].size != self.view.shape[0]:
            return None
        count, stride = self.view.dims[0][0]
        step = max(self.per, 1)
        for axis in reversed(range(len(self.leaf.shape))):
            size = self.leaf.shape[axis]
            if stride and stride % step == 0 and count * stride == size * step and depth % (stride // step) == 0:
                return Axis(axis, depth // (stride // step))
            step *= size
        return None

    def targets(self) -> dict[str, Shape] | None:
        """What steps are told of their shapes where some of N are taken; None where N has no dimension in one."""
        ((count, stride),) = self.view.dims[0]
        found = {}
        for output, (op, view) in self.seen.items():
            own = [
                bool(factors)
                and factors[0].size * factors[0].stride == count * stride
                and stride % factors[0].stride == 0
                for factors in view.dims
            ]
            if own.count(True) != 1:
                return None
            if op != "Tile":  # which repeats others than N
                as_it_is = -1 if op == "Reshape" else 1
                found[output] = tuple(as_it_is if here else size for here, size in zip(own, view.shape, strict=True))
        return found


class Weight(NamedTuple):
    """An affine weight as a chain decodes it: elements of `shape`, then steps to a matrix."""

    name: str
    codes: Part
    scales: Part
    points: Part | None
    shape: Shape
    after: Sequence[Step]
    types: Types


def found(at: Place, leaves: Leaves, weight: Weight, flipped: bool) -> qmm.Found:
    """What the new node holds of a weight [K, N], or where it is `flipped` [N, K]. Raises Refuse."""
    codes, scales = (part.as_matrix(at, weight.shape, weight.after, not flipped) for part in weight[1:3])
    points = weight.points and weight.points.as_matrix(at, weight.shape, weight.after, not flipped)
    columns, depth = codes.view.shape
    grid = Grid(depth, columns, _block(at, codes, [scales, points] if points else [scales]), 1)
    roles: dict[str, str | Laid] = {
        "packed": _packed(codes, grid),
        "scales": _laid(scales, grid, ONNX_DTYPE[weight.types.weight_dtype], (columns, grid.blocks)),
        "zero_points": _points(points, codes.least, grid, weight.types),
    }
    for held in roles.values():
        leaves.require_fixed(() if isinstance(held, str) else held.sources)
    given = [codes, scales, points] if points else [codes, scales]
    axes, shapes = _units(given, depth)
    constants = [part.leaf for part in given]
    return qmm.Found(weight.name, grid, weight.types, roles, constants, axes if leaves.once else {"": None}, shapes)


def _block(at: Place, codes: Part, parts: Sequence[Part]) -> int:
    """How many along K share their scale and their zero point.

    Where all do it is K, one more where that is odd, or what a row of the codes' bytes holds. A part whose blocks are
    longer is repeated in those of the other.
    """
    columns, depth = codes.view.shape
    runs = [(part.leaf, part.view.run(1)) for part in parts if not part.view.repeats(1)]
    row = codes.count // columns
    rows = row % 2 == 0 and row >= depth and codes.view == _rows(columns, row, depth)
    block = min((run for _, run in runs), default=row if rows else depth + depth % 2)
    for leaf, run in runs:
        at.require(run > 1, f"{leaf} changes with each element along K, not with each block of them as in QMM")
        at.require(run % block == 0, f"{leaf} in blocks of {run} along K, which is not several of {block}")
    at.require(block % 2 == 0, f"a block of {block} elements along K, which is odd; an even one is expected")
    return block


def _rows(columns: int, row: int, depth: int) -> View:
    """How codes lie in rows of so many, of which the first are the weight's."""
    return view_of((columns, row)).cut(1, depth)


def _packed(codes: Part, grid: Grid) -> str | Laid:
    """The bytes themselves where they lie as QMM wants them, or codes laid out anew."""
    shape, row = qmm.packed_shape(grid), grid.blocks * grid.block
    same = codes.view == _rows(grid.columns, row, grid.depth) and codes.count == grid.columns * row and codes.least == 0
    if same and codes.leaf.shape == shape:
        return codes.leaf.name
    settings = (codes.view, codes.count, grid.block)
    return Laid(qmm.lay_codes, (codes.leaf.name,), settings, TensorProto.UINT8, shape, view=same)


def _laid(part: Part, grid: Grid, kind: int, shape: Shape) -> str | Laid:
    """Numbers, one a block or one for all: the constant itself where it is that."""
    view = part.view.first_of_runs(1, grid.block)
    view = view if view.shape == shape else View((1, 1), ((), ()), view.start)
    same = view == view_of(shape) and part.count == math.prod(shape) and {*part.leaf.types, *part.types} == {kind}
    if same and part.leaf.shape == shape:
        return part.leaf.name
    settings = (view, part.count, *part.types)
    return Laid(qmm.lay_numbers, (part.leaf.name,), settings, kind, shape, view=same)


def _points(points: Part | None, least: int, grid: Grid, types: Types) -> str | Laid:
    """Zero points of codes from 0 on: bytes, or numbers of the scales' type."""
    if points is None:
        return qmm.one_point(-least)
    one = points.view.repeats(0) and points.view.repeats(1)
    shape = (1, 1) if one else (grid.columns, grid.blocks)
    (kind,) = points.leaf.types
    shift = points.least - least
    if not points.per and (kind in ONNX_DTYPE.values() or (kind == TensorProto.UINT8 and not shift)):
        to = kind if kind == TensorProto.UINT8 else ONNX_DTYPE[types.weight_dtype]
        return _laid(points, grid, to, shape)
    view = points.view.first_of_runs(1, grid.block)
    view = View(shape, ((), ()), view.start) if one else view
    partial = not points.per or shift < 0
    settings = (view, points.count, points.per, shift)
    return Laid(qmm.lay_points, (points.leaf.name,), settings, TensorProto.UINT8, shape, partial=partial)


def _units(parts: Sequence[Part], depth: int) -> tuple[Mapping[str, Axis | None], Mapping[str, Shape]]:
    """Where one of N lies in each constant, and what steps are told of some of N; None: the chain is run whole."""
    axes: dict[str, Axis | None] = {}
    shapes: dict[str, Shape] = {}
    for part in parts:
        if part.view.repeats(0) and not part.seen:
            continue  # one for all of N
        told = part.targets() if part.unit(depth) else None
        axes[part.leaf.name] = part.unit(depth) if told is not None else None
        shapes.update(told or {})
    return axes, shapes
