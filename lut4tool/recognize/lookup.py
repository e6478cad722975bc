"""Chains that look codes up in a table of 16 entries: they become Lookup4MatMul."""

from __future__ import annotations

import math

from onnx import TensorProto

from lut4tool.formats import DTYPE_NAME, LOOKUP4_MATMUL, lookup4_attributes
from lut4tool.recognize.layout import Axis, Cut
from lut4tool.recognize.proof import Product, Proof
from lut4tool.recognize.walk import Place, Trail, Value, Walk, attribute, type_name

#: A longer block is run in pieces of at most so many elements, all with its scale.
_LONG_BLOCK, _PIECE = 1 << 18, 1 << 12


def canonical(walk: Walk, site: Place, weight: Value, flipped: bool) -> Proof:
    """High nibble first, blocks over the flattened weight, one scale a block (DESIGN section 1).

    Cast INT64; Div 16 and Mod 16; Unsqueeze; Concat; Reshape [-1, block]; Gather(codebook); Mul(Unsqueeze(scales));
    Reshape [-1]; Slice [0 : rows * cols]; Reshape [rows, cols]; a rounding or none; a Transpose or none. Raises Refuse.
    """
    trail = Trail(walk)
    perm, value, at = _transposed(trail, weight, site)
    weight_dtype, dtype, value, at = _rounded(trail, value, at)
    rows, cols, value, at = _cut_to_matrix(trail, value, at)

    product = trail.node(value, "Mul", at)
    entries, column = trail.input(product, 0), trail.input(product, 1)
    if trail.op_type(entries) == "Unsqueeze":
        entries, column = column, entries
    lookup = trail.node(entries, "Gather", product)
    block, blocked, source, cast = _paired_nibbles(trail, trail.input(lookup, 1), lookup)
    scaled = trail.node(column, "Unsqueeze", product)
    axes = trail.literal(scaled, 1)
    scaled.require(axes.is_one(1, -1), f"Unsqueeze of scales on axes {axes.one}, not 1")

    blocks = -(-rows * cols // block)
    packed = walk.constant(source, cast)
    cast.require(packed.types == {TensorProto.UINT8}, f"packed {packed} is not UINT8")
    cast.require(packed.shapes == {(blocks * block // 2,)}, f"packed {packed} is not [{blocks * block // 2}]")
    scales = walk.constant(trail.input(scaled, 0), scaled)
    scaled.require(scales.types == {TensorProto.FLOAT}, f"scales {scales} is not FLOAT")
    scaled.require(scales.shapes == {(blocks,)}, f"scales {scales} is not [{blocks}], one a block")
    table = trail.input(lookup, 0)
    lookup.require(trail.op_type(table) != "input", f"codebook '{table.name}' is an input, not a Constant")
    codebook = walk.constant(table, lookup)
    lookup.require(codebook.types == {TensorProto.FLOAT}, f"codebook {codebook} is not FLOAT")
    lookup.require(codebook.shapes == {(16,)}, f"codebook {codebook} is not [16]")

    sources = {held.name: held.tensors[0] for held in (packed, scales, codebook)}
    return Proof(
        site=site.site,
        op=LOOKUP4_MATMUL,
        chain_name="canonical",
        rows=rows,
        cols=cols,
        block_size=block,
        weight_dtype=weight_dtype,
        dtype=dtype,
        product=Product(site.node.input[0]),
        attributes=lookup4_attributes(rows, cols, block, perm[::-1] if flipped else perm, True, weight_dtype, dtype),
        roles={"packed": packed.name, "scales": scales.name, "codebook": codebook.name},
        sources=sources,
        literals=trail.literals,
        weight=weight.name,
        chain=trail.nodes(),
        cut=_in_blocks(rows * cols, block, packed.name, scales.name, blocked, product) if len(sources) == 3 else None,
        opset=site.scope.opset,
        flipped=flipped,
    )


def _in_blocks(elements: int, block: int, packed: str, scales: str, blocked: Place, product: Place) -> Cut:
    """A unit is a block, which the product by the scales ends, or where blocks are long a piece of one."""
    size, shapes = block, {}
    if block > _LONG_BLOCK:
        size = math.gcd(block, _PIECE)
        shapes = {blocked.node.output[0]: (-1, size)}
    axes = {packed: Axis(0, 2), scales: Axis(0, block)}
    return Cut(-(-elements // size), size, product.node.output[0], "float32", axes, shapes)


def _transposed(trail: Trail, value: Value, at: Place) -> tuple[tuple[int, int], Value, Place]:
    """Nothing, or a Transpose of the two axes: (perm, the value before, the node reached)."""
    if trail.op_type(value) != "Transpose":
        return (0, 1), value, at
    transpose = trail.node(value, "Transpose", at, "perm")
    perm = attribute(transpose, "perm", [1, 0])
    transpose.require(perm == [1, 0], f"Transpose with perm {perm}, not [1, 0]")
    return (1, 0), trail.input(transpose, 0), transpose


def _rounded(trail: Trail, value: Value, at: Place) -> tuple[str, str, Value, Place]:
    """Nothing, a Cast to a half type, or one and a Cast to FLOAT: (weight_dtype, dtype, value before, node reached)."""
    if trail.op_type(value) != "Cast":
        return "float32", "float32", value, at
    cast = trail.node(value, "Cast", at, "to")
    to = attribute(cast, "to")
    cast.require(to in DTYPE_NAME, f"Cast of the weight to {type_name(to)}, not FLOAT16, BFLOAT16 or FLOAT over one")
    dtype, value = DTYPE_NAME[to], trail.input(cast, 0)
    if dtype != "float32":
        return dtype, dtype, value, cast
    cast.require(trail.op_type(value) == "Cast", "Cast of the weight to FLOAT over no Cast to FLOAT16 or BFLOAT16")
    half = trail.node(value, "Cast", cast, "to")
    to = attribute(half, "to")
    is_half = to in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    half.require(is_half, f"Cast of the weight to {type_name(to)}, not FLOAT16 or BFLOAT16, under a Cast to FLOAT")
    return DTYPE_NAME[to], "float32", trail.input(half, 0), half


def _cut_to_matrix(trail: Trail, value: Value, at: Place) -> tuple[int, int, Value, Place]:
    """Reshape [-1], Slice [0 : rows * cols], Reshape [rows, cols]: (rows, cols, the value before, the node reached)."""
    # allowzero, which PyTorch's exporter writes, speaks of zeros: no shape that passes here has one.
    matrix = trail.node(value, "Reshape", at, "allowzero")
    shape = trail.literal(matrix, 1)
    matrix.require(shape.dims == (2,), f"Reshape to {shape}, not to [rows, cols]")
    matrix.require(min(shape.values) > 0, f"Reshape to {shape}, not to rows and cols that are both positive")
    rows, cols = shape.values

    cut = trail.node(trail.input(matrix, 0), "Slice", matrix)
    start, end = trail.literal(cut, 1), trail.literal(cut, 2)
    axes, steps = trail.literal(cut, 3, absent=(0,)), trail.literal(cut, 4, absent=(1,))
    cut.require(start.is_list(0), f"Slice from {start}, not from [0]")
    cut.require(end.is_list(rows * cols), f"Slice to {end}, not to [{rows * cols}], rows * cols")
    cut.require(axes.is_list(0), f"Slice on axes {axes}, not [0]")
    cut.require(steps.is_list(1), f"Slice with steps {steps}, not [1]")

    flat = trail.node(trail.input(cut, 0), "Reshape", cut, "allowzero")
    target = trail.literal(flat, 1)
    flat.require(target.is_list(-1), f"Reshape to {target}, not to [-1]")
    return rows, cols, trail.input(flat, 0), flat


def _paired_nibbles(trail: Trail, value: Value, at: Place) -> tuple[int, Place, Value, Place]:
    """Both nibbles of each byte, the high one first, in blocks: (block, its Reshape, the bytes, their Cast)."""
    blocked = trail.node(value, "Reshape", at, "allowzero")
    target = trail.literal(blocked, 1)
    blocked.require(target.dims == (2,), f"Reshape to {target}, not to [-1, block]")
    blocked.require(target.values[0] == -1, f"Reshape to {target}, not to [-1, block]")
    block = target.values[1]
    blocked.require(block > 0 and block % 2 == 0, f"Reshape to {target}, whose block is not positive and even")

    pairs = trail.node(trail.input(blocked, 0), "Concat", blocked, "axis")
    pairs.require(len(pairs.node.input) == 2, f"Concat of {len(pairs.node.input)} values, not of the two nibbles")
    axis = attribute(pairs, "axis")
    pairs.require(axis in (1, -1), f"Concat with axis {axis}, not 1")

    first = trail.node(trail.input(pairs, 0), "Unsqueeze", pairs)
    second = trail.node(trail.input(pairs, 1), "Unsqueeze", pairs)
    high, low = trail.input(first, 0), trail.input(second, 0)
    swapped = (trail.op_type(high), trail.op_type(low)) == ("Mod", "Div")
    pairs.require(not swapped, "Concat of the low nibble first, not of the high nibble first")
    for unsqueeze in (first, second):
        axes = trail.literal(unsqueeze, 1)
        unsqueeze.require(axes.is_one(1, -1), f"Unsqueeze on axes {axes.one}, not 1")

    div, mod = trail.node(high, "Div", first), trail.node(low, "Mod", second)
    divisor, modulus = trail.literal(div, 1), trail.literal(mod, 1)
    div.require(divisor.is_one(16), f"Div by {divisor.one}, not 16")
    mod.require(modulus.is_one(16), f"Mod by {modulus.one}, not 16")

    high_cast = trail.node(trail.input(div, 0), "Cast", div, "to")
    low_cast = trail.node(trail.input(mod, 0), "Cast", mod, "to")
    for cast in (high_cast, low_cast):
        to = attribute(cast, "to")
        cast.require(to == TensorProto.INT64, f"Cast of the bytes to {type_name(to)}, not INT64")
    source = trail.input(high_cast, 0)
    pairs.require(trail.input(low_cast, 0) == source, "Concat of nibbles of two values, not of one packed value")
    return block, blocked, source, high_cast
