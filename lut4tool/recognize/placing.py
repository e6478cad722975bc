"""Where the codes and scales of a lookup lie in its weight, and so in the node that will hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onnx import TensorProto

from lut4tool.formats import ONNX_DTYPE
from lut4tool.recognize import packing
from lut4tool.recognize.layout import Axis, Cut, Folded, Laid, flattened
from lut4tool.recognize.view import Shape
from lut4tool.recognize.walk import Constant, Place

#: A longer unit is run in pieces of at most so many elements, all with its scale.
_LONG, _PIECE = 1 << 18, 1 << 12


class Codes(NamedTuple):
    """The codes of a lookup, `per` of them in an element of the leaf (2: high_first says which is the first).

    types: Casts that may change an integer that is no code, such as UINT32 to INT32.
    targets: what each Reshape of them makes, by its output; sliced: cut, or padded where a last block lacks bytes.
    """

    leaf: Constant
    per: int
    high_first: bool
    shape: Shape
    targets: Mapping[str, Shape]
    sliced: bool
    types: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """How many the leaf holds."""
        return math.prod(self.leaf.shape) * self.per


class Scales(NamedTuple):
    """What the entries are multiplied by: the value, its shape and type, and where its flat elements come from.

    leaf: their constant, with Casts to `types` where they narrow (None: they are double-quantized, and `nested`).
    moved: by more than what gives a flat leaf an axis of 1.
    """

    value: str
    shape: Shape
    dtype: str
    leaf: Constant | None
    types: tuple[int, ...] = ()
    moved: bool = False
    nested: Laid | None = None


@dataclass(frozen=True, eq=False)
class Lookup:
    """Entries of a codebook, scaled or not: what is known of a weight before its elements get their places in it.

    codebook: what the new node holds as such; dtype, shape, value: of the last value that is elementwise, made at `at`.
    targets: what each Reshape up to there makes; sliced: elements are cut off up to there.
    """

    codes: Codes
    codebook: str | Laid
    scales: Scales | None
    dtype: str
    shape: Shape
    at: Place
    targets: Mapping[str, Shape]
    sliced: bool

    @property
    def value(self) -> str:
        """Name of the last elementwise value."""
        return self.at.node.output[0]


@dataclass(frozen=True, eq=False)
class Placed:
    """The tensors of the new node, its block size and nibble order; transposed: it holds the chain's matrix so."""

    name: str
    roles: Mapping[str, str | Laid]
    block: int
    high_first: bool
    transposed: bool
    cut: Cut | None


def place(found: Lookup, matrix: Shape, weight: str, after: Mapping[str, Shape]) -> Placed:
    """Place a lookup's elements in the chain's matrix [rows, cols]. Raises Refuse.

    weight: the chain's last value; after: what each Reshape behind `found` makes.
    """
    grid = _Grid(1, math.prod(found.shape), 1)
    if found.scales is not None:
        grid = _grid(found.at, found.shape, found.scales.shape)
    return _in_columns(found, grid, matrix, weight, after) if grid.columns > 1 else _in_order(found, grid, matrix)


class _Grid(NamedTuple):
    """Scales [blocks, 1, columns] of elements [blocks, block, columns]; columns 1: blocks of the flat elements."""

    blocks: int
    block: int
    columns: int


def _grid(at: Place, shape: Shape, scales: Shape) -> _Grid:
    """How scales stretch over entries: over blocks of them in order, or along columns. Raises Refuse."""
    given = (1,) * (len(shape) - len(scales)) + scales
    fits = len(given) == len(shape) and all(scale in (1, size) for scale, size in zip(given, shape, strict=True))
    at.require(fits, f"Mul of entries {list(shape)} by scales {list(scales)}, whose dimensions are not theirs or 1")
    sizes, part = [1, 1, 1], 0  # of what has a scale each, then of what shares one, then again of what has one each
    for own, size in ((scale == size, size) for scale, size in zip(given, shape, strict=True) if size > 1):
        part += (part == 0 and not own) or (part == 1 and own)
        at.require(part < 2 or own, f"Mul of entries {list(shape)} by scales {list(scales)}, not by blocks or columns")
        sizes[part] *= size
    return _Grid(*sizes)


def flat_block(at: Place, shape: Shape, scales: Shape) -> int:
    """How many entries of this shape, in order, share one of these scales. Raises Refuse."""
    grid = _grid(at, shape, scales)
    at.require(grid.columns == 1, f"Mul of entries {list(shape)} by scales {list(scales)}, not one a block in order")
    return grid.block


def _in_order(found: Lookup, grid: _Grid, matrix: Shape) -> Placed:
    """The flat order of the codes is the weight's, and a block of it has a scale."""
    codes, scales, size = found.codes, found.scales, math.prod(matrix)
    count, block = grid.blocks, grid.block
    if count == 1:
        block = codes.total + codes.total % 2
    found.at.require(block % 2 == 0, f"a block of {block} elements, which is odd; an even one is expected")
    blocks = -(-size // block)
    found.at.require(count == blocks, f"{count} scales for {size} elements in blocks of {block}, not {blocks}")
    held = codes.total + codes.total % 2
    found.at.require(held <= blocks * block, f"{codes.total} codes, not at most {blocks} blocks of {block}")
    found.at.require(codes.total >= size, f"{codes.total} codes and padding for {size} elements, not a code for each")
    name, packed = codes.leaf.name, None
    if codes.per == 1 or len(codes.leaf.shape) > 1:
        make = packing.packed_codes if codes.per == 1 else flattened
        one = codes.per == 1
        packed = Laid(make, (name,), codes.types, TensorProto.UINT8, (held // 2,), view=not one, partial=one)
    scale = _flat_scales(scales, found.dtype, count)
    roles = {"packed": packed or name, "scales": scale, "codebook": found.codebook}
    return Placed(
        "lookup" if scales else "lookup without scales",
        roles,
        block,
        codes.high_first,
        False,
        _cut_in_order(found, size, count, block),
    )


def _flat_scales(scales: Scales | None, dtype: str, count: int) -> str | Laid:
    """The scales in order: the constant itself where it is that, or laid out."""
    if scales is None:
        return Laid(packing.one_scale, (), (ONNX_DTYPE[dtype],), ONNX_DTYPE[dtype], (1,))
    if scales.leaf is None:
        assert scales.nested is not None
        return scales.nested
    (kind,), leaf = scales.leaf.types, scales.leaf
    if math.prod(leaf.shape) == count and not scales.types:
        return leaf.name if len(leaf.shape) == 1 else Laid(flattened, (leaf.name,), (), kind, (count,), view=True)
    final = scales.types[-1] if scales.types else kind
    return Laid(packing.first_scales, (leaf.name,), (count, *scales.types), final, (count,))


def _cut_in_order(found: Lookup, size: int, count: int, block: int) -> Cut | None:
    """Units of whole blocks, rows of every Reshape and bytes; or pieces of a long block."""
    codes, scales = found.codes, found.scales
    if found.sliced:
        return None
    leaf = codes.leaf.shape
    widths = [math.prod(leaf[1:]) * (codes.per if len(leaf) > 1 else 1)]
    widths += [math.prod(target[1:]) for target in found.targets.values()]
    unit = math.lcm(*widths, block if count > 1 else 1)
    unit = unit * (1 + unit % 2)
    shapes = {output: (-1, *target[1:]) for output, target in found.targets.items()}
    if all(width == 1 for width in widths) and count == 1:
        unit = _PIECE
    elif unit > _LONG and len(leaf) == 1 and len(found.shape) == 2 and len(shapes) == 1:
        unit = math.gcd(block, _PIECE)
        shapes = dict.fromkeys(shapes, (-1, unit))
    axes = {codes.leaf.name: Axis(0, math.prod(leaf[1:]) * codes.per)}
    folded: dict[str, Folded] = {}
    if scales is not None and count > 1:
        if scales.leaf is not None and not scales.moved:
            axes[scales.leaf.name] = Axis(0, block)
        else:
            folded[scales.value] = Folded("scales")
            axes[scales.value] = Axis(0, math.prod(found.shape[1:]))
    return Cut(-(-size // unit), unit, found.value, found.dtype, axes, shapes, folded)


def _in_columns(found: Lookup, grid: _Grid, matrix: Shape, weight: str, after: Mapping[str, Shape]) -> Placed:
    """Scales along the columns of the weight: the new node holds its transpose, a column in each row."""
    codes, scales, depth = found.codes, found.scales, grid.blocks * grid.block
    assert scales is not None
    found.at.require(
        grid.block % 2 == 0, f"a block of {grid.block} elements of a column, which is odd; an even one is expected"
    )
    found.at.require(
        matrix == (depth, grid.columns), f"a weight {list(matrix)} of scales along {grid.columns} columns of {depth}"
    )
    found.at.require(codes.total == depth * grid.columns, f"{codes.total} codes for {depth} x {grid.columns} elements")
    if scales.leaf is None:
        found.at.refuse("scales that are double-quantized along columns, not in blocks of the flat weight")
    if codes.per == 1:
        settings: tuple[int, ...] = (depth, *codes.types)
        shape = (codes.total // 2,)
        packed = Laid(packing.packed_columns, (codes.leaf.name,), settings, TensorProto.UINT8, shape, partial=True)
    else:
        settings = (depth, codes.high_first)
        packed = Laid(packing.repacked_columns, (codes.leaf.name,), settings, TensorProto.UINT8, (codes.total // 2,))
    (kind,), count = scales.leaf.types, grid.blocks * grid.columns
    final = scales.types[-1] if scales.types else kind
    roles = {
        "packed": packed,
        "scales": Laid(packing.scales_of_columns, (scales.leaf.name,), (grid.blocks, *scales.types), final, (count,)),
        "codebook": found.codebook,
    }
    cut = _cut_in_columns(found, grid, weight, after)
    return Placed("lookup in columns", roles, grid.block, True, True, cut)


def _cut_in_columns(found: Lookup, grid: _Grid, weight: str, after: Mapping[str, Shape]) -> Cut | None:
    """Units of a column, or of the columns in a byte; the chain is run to its end. None where columns are not last."""
    codes, scales = found.codes, found.scales
    assert scales is not None
    depth, columns, leaf = grid.blocks * grid.block, grid.columns, codes.leaf.shape
    targets = {**found.targets, **after}
    stays = all(len(target) == 1 or target[-1] == columns for target in targets.values())
    if found.sliced or not stays or scales.shape[-1] != columns or columns % codes.per:
        return None
    if len(leaf) > 1 and leaf[-1] * codes.per != columns:
        return None
    rows = depth if len(leaf) == 1 else 0
    axes = {
        codes.leaf.name: Axis(len(leaf) - 1, depth * codes.per, rows),
        scales.value: Axis(len(scales.shape) - 1, depth),
    }
    shapes = {output: (*target[:-1], -1) for output, target in targets.items()}
    folded = {scales.value: Folded("scales", grid.blocks)}
    return Cut(columns // codes.per, depth * codes.per, weight, found.dtype, axes, shapes, folded, rows=True)
