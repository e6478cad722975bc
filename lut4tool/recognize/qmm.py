"""What a QMM weight is to the recognizer: its grid, proof and standard spelling, and how its constants are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME, ONNX_DTYPE, QMM, FormatError
from lut4tool.recognize.layout import Axis, Cut, Laid
from lut4tool.recognize.packing import cast_in_turn
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.view import View
from lut4tool.recognize.walk import Constant, Place


class Grid(NamedTuple):
    """How the codes of a weight lie: W is [K, N], cut along K into blocks."""

    depth: int  # K
    columns: int  # N
    block: int
    axis: int  # which axis of the codes K is: 0 in codes [K, N], 1 in [N, K]

    @property
    def blocks(self) -> int:
        """Blocks of a column, the last one possibly cut."""
        return -(-self.depth // self.block)

    @property
    def scales(self) -> tuple[int, int]:
        """Shape of what holds one value a block and lies as the codes do."""
        return (self.blocks, self.columns) if self.axis == 0 else (self.columns, self.blocks)


class Types(NamedTuple):
    """What a weight is rounded to, and the type that the product reads."""

    weight_dtype: str
    dtype: str


class Found(NamedTuple):
    """What a chain of this file says of a weight, besides where it stands."""

    name: str
    grid: Grid
    types: Types
    roles: Mapping[str, str | Laid]
    constants: Sequence[Constant]
    axes: Mapping[str, Axis | None]  # by constant; one None: the chain is run whole
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def proof(
    site: Place,
    product: Product,
    weight: str,
    flipped: bool,
    nodes: tuple[NodeProto, ...],
    literals: Mapping[str, TensorProto],
    found: Found,
) -> Proof:
    """The proof of a QMM, whose units are the N."""
    grid, types = found.grid, found.types
    axes = {name: axis for name, axis in found.axes.items() if axis is not None}
    whole = len(axes) < len(found.axes)
    return Proof(
        site=site.site,
        op=QMM,
        chain_name=found.name,
        rows=grid.columns,
        cols=grid.depth,
        block_size=grid.block,
        weight_dtype=types.weight_dtype,
        dtype=types.dtype,
        product=product,
        attributes={
            "K": grid.depth,
            "N": grid.columns,
            "bits": 4,
            "block_size": grid.block,
            "weight_dtype": ONNX_DTYPE[types.weight_dtype],
            "dtype": ONNX_DTYPE[types.dtype],
        },
        roles=found.roles,
        sources={constant.name: constant.tensors[0] for constant in found.constants},
        literals=literals,
        weight=weight,
        chain=nodes,
        cut=None if whole else Cut(grid.columns, grid.depth, weight, types.dtype, axes, found.shapes, rows=True),
        opset=site.scope.opset,
        flipped=flipped,
    )


# -- Facts of constants


def require_one(node: Place, constant: Constant) -> None:
    """Refuse what is laid out anew where a function's calls give several tensors."""
    one = len(constant.tensors) == 1
    node.require(one, f"{constant} is another tensor at each call; one is expected where bytes are laid out anew")


def float_type(node: Place, scales: Constant) -> str:
    """The type of the scales, which the weight is rounded to."""
    is_float = len(scales.types) == 1 and scales.types <= DTYPE_NAME.keys()
    node.require(is_float, f"scales {scales} is not FLOAT, FLOAT16 or BFLOAT16")
    return DTYPE_NAME[next(iter(scales.types))]


# -- The standard spelling


class Writer(Protocol):
    """What makes nodes, one at a time."""

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a standard operator on these values."""

    def ints(self, values: list[int]) -> str:
        """An INT64 literal of rank 1."""


def spell(writer: Writer, grid: Grid, types: Types, packed: str, scales: str, points: str) -> str:
    """Write the chain that `arithmetic` proves; its last value, [K, N].

    packed: uint8 [N, blocks, block / 2], low nibble first; scales: [N, blocks] of the weight's type; points: FLOAT,
    [N, blocks] or [1, 1].
    """
    low, high = spell_nibbles(writer, packed, 3)
    pairs = writer.node("Concat", low, high, axis=3)
    codes = writer.node("Reshape", pairs, writer.ints([grid.columns, grid.blocks, grid.block]))
    steps = writer.node("Cast", codes, to=TensorProto.FLOAT)
    steps = writer.node("Sub", steps, writer.node("Unsqueeze", points, writer.ints([2])))
    if types.weight_dtype != "float32":
        steps = writer.node("Cast", steps, to=ONNX_DTYPE[types.weight_dtype])
    product = writer.node("Mul", steps, writer.node("Unsqueeze", scales, writer.ints([2])))
    matrix = writer.node("Reshape", product, writer.ints([grid.columns, grid.blocks * grid.block]))
    if grid.blocks * grid.block != grid.depth:
        matrix = writer.node("Slice", matrix, writer.ints([0]), writer.ints([grid.depth]), writer.ints([1]))
    if types.dtype != types.weight_dtype:
        matrix = writer.node("Cast", matrix, to=ONNX_DTYPE[types.dtype])
    return writer.node("Transpose", matrix, perm=[1, 0])


def spell_nibbles(writer: Writer, packed: str, axis: int) -> tuple[str, str]:
    """The low and the high nibble of each byte, INT64, with an axis of 1 put in at `axis`."""
    whole = writer.node("Cast", packed, to=TensorProto.INT64)
    low, high = writer.node("Mod", whole, writer.ints([16])), writer.node("Div", whole, writer.ints([16]))
    return writer.node("Unsqueeze", low, writer.ints([axis])), writer.node("Unsqueeze", high, writer.ints([axis]))


# -- Layout: pure functions of arrays, whole or cut to some of N


def packed_shape(grid: Grid) -> tuple[int, int, int]:
    """Shape of QMM's packed."""
    return (grid.columns, grid.blocks, grid.block // 2)


def one_point(value: int) -> Laid:
    """One zero point for all."""
    return Laid(_one_point, (), (value,), TensorProto.UINT8, (1, 1))


def _one_point(value: int) -> np.ndarray:
    return np.full((1, 1), value, np.uint8)


def lay_codes(array: np.ndarray, view: View, count: int, block: int) -> np.ndarray:
    """uint8 [N, blocks, block / 2], low nibble first, of codes that lie as a view [N, K] shows.

    count: codes in the whole constant, of which the array may be some of N.
    """
    rows = _some(levels(array), view, count)
    padded = np.zeros((len(rows), -(-rows.shape[1] // block), block), np.uint8)
    padded.reshape(len(rows), -1)[:, : rows.shape[1]] = rows
    return padded[..., 0::2] | padded[..., 1::2] << 4


def lay_numbers(array: np.ndarray, view: View, count: int, *types: int) -> np.ndarray:
    """Numbers that lie as a view [N, blocks] or [1, 1] shows, cast."""
    return np.ascontiguousarray(_some(cast_in_turn(array, *types), view, count))


def lay_points(array: np.ndarray, view: View, count: int, per: int, shift: int) -> np.ndarray:
    """uint8 zero points: 4-bit codes or integers, moved by `shift`. Raises FormatError for one that is no byte."""
    numbers = levels(array).astype(np.int64) if per else array.reshape(-1).astype(np.int64)
    points = _some(numbers + shift, view, count)
    if points.min() < 0 or points.max() > 255:
        worst = points.min() if points.min() < 0 else points.max()
        raise FormatError(f"zero point {worst} of codes from 0 to 15 is not 0 to 255")
    return np.ascontiguousarray(points.astype(np.uint8))


def lay_flat(array: np.ndarray, *shape: int) -> np.ndarray:
    """[N, *shape] of what runs its last axes together."""
    return array.reshape(-1, *shape)


def levels(array: np.ndarray) -> np.ndarray:
    """Codes 0 to 15, uint8, flat: int4 moved up by 8, uint4 as they are; of bytes both nibbles, the low one first."""
    if array.dtype.name == "int4":
        return (array.reshape(-1).astype(np.int8) + 8).astype(np.uint8)
    if array.dtype != np.uint8:
        return array.reshape(-1).astype(np.uint8)
    return np.stack((array & 15, array >> 4), axis=-1).reshape(-1)


def _some(flat: np.ndarray, view: View, count: int) -> np.ndarray:
    """What a view shows of a whole constant, or of one that holds some of N."""
    return (view if flat.size == count else view.of_units(0, view.shape[0] * flat.size // count)).taken(flat)
