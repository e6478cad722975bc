"""What a QMM weight is to the recognizer: its grid, proof and standard spelling, and how its constants are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from onnx import NodeProto, TensorProto

from lut4tool.formats import DTYPE_NAME, ONNX_DTYPE, QMM
from lut4tool.recognize.layout import Axis, Cut, Laid
from lut4tool.recognize.proof import Product, Proof
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


def scales(constant: Constant, grid: Grid, weight_dtype: str) -> Laid:
    """Scales [N, blocks] from DequantizeLinear's in any other shape: as the codes lie, one for each of N, or one."""
    (shape,) = constant.shapes
    kind, columns = ONNX_DTYPE[weight_dtype], grid.columns
    if shape in (grid.scales, (columns,)):
        return Laid(lay_rows, (constant.name,), (grid.axis,), kind, (columns, grid.blocks))
    return Laid(fill_rows, (constant.name,), (columns,), kind, (columns, 1))


def pack(array: np.ndarray, block: int, axis: int, depth: int, *how: Any) -> np.ndarray:
    """uint8 [N, blocks, block / 2], low nibble first, of codes [K, N] (axis 0) or [N, K] (axis 1)."""
    codes = levels(array, *how)
    rows = codes.T if axis == 0 else codes
    padded = np.zeros((len(rows), -(-depth // block), block), np.uint8)
    padded.reshape(len(rows), -1)[:, :depth] = rows
    return padded[..., 0::2] | padded[..., 1::2] << 4


def lay_points(array: np.ndarray, axis: int, *how: Any) -> np.ndarray:
    """uint8 [N, blocks] or [1, 1] of zero points in any of DequantizeLinear's shapes."""
    return lay_rows(levels(array, *how), axis)


def lay_rows(array: np.ndarray, axis: int) -> np.ndarray:
    """[N, blocks] of what is one a block as the codes lie, or one for each of N."""
    if array.ndim < 2:
        return array.reshape(-1, 1)
    return np.ascontiguousarray(array.T if axis == 0 else array)


def lay_flat(array: np.ndarray, *shape: int) -> np.ndarray:
    """[N, *shape] of what runs its last axes together."""
    return array.reshape(-1, *shape)


def fill_rows(array: np.ndarray, columns: int) -> np.ndarray:
    """[N, 1] of what is one for all."""
    return np.full((columns, 1), array.reshape(-1)[0], array.dtype)


def levels(array: np.ndarray, row: int = 0, width: int = 0, low_first: bool = True) -> np.ndarray:
    """Codes 0 to 15, uint8: int4 moved up by 8, uint4 as they are; of bytes the first `width` of each `row` nibbles."""
    if array.dtype.name == "int4":
        return (array.astype(np.int8) + 8).astype(np.uint8)
    if array.dtype != np.uint8:
        return array.astype(np.uint8)
    low, high = array & 15, array >> 4
    pairs = np.stack((low, high) if low_first else (high, low), axis=-1)
    return pairs.reshape(-1, row)[:, :width]
