"""One wrong model for each fact that the forms beside the canonical chain rest on, with its sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from forms import INT64, NF4, Model, Writer, assemble, make, matmul, packed
from mutants import (
    APART,
    MOVED,
    SCALES,
    TAKEN,
    TWO_CALLS,
    Edit,
    Mutant,
    add,
    attribute,
    before,
    call,
    inputs,
    literal,
    literal_at,
    operator,
    tensor,
    without,
)

PADDED = "bytes padded to whole blocks"


def of(form: str, sentence: str, *edits: Edit, name: str = "") -> Mutant:
    """A wrong model of a form; check its name against its sentence."""
    return Mutant(f"{form}: {name or sentence[:40]}", sentence, edits, make=lambda: make(form))


def custom(sentence: str, rows: int, cols: int, block: int, write: Any, name: str) -> Mutant:
    """A chain that no form is near enough to."""

    def build() -> Model:
        writer = Writer(rows, cols, block, np.random.default_rng(0))
        value = write(writer)
        x = np.ones((3, rows), np.float32)
        return Model(assemble(writer, [matmul("x", value)], {"x": x}, x.dtype, 21), {"x": x}, writer.weight)

    return Mutant(name, sentence, make=build)


def blocks_cut_off(w: Writer) -> str:
    """Codes of three blocks, of which the index keeps two."""
    index = w.node("Reshape", w.pairs(w.constant(packed(w.codes(3 * w.block)), "dec/packed")), [-1])
    index = w.node("Reshape", w.node("Slice", index, [0], [2 * w.block], [0]), [2, w.block])
    product = w.node(
        "Mul", w.node("Gather", NF4, index), w.node("Unsqueeze", w.constant(w.floats(2), "dec/scales"), [1])
    )
    return w.node("Reshape", product, [w.rows, w.cols])


def columns_of(w: Writer, index: str, scales: str) -> str:
    """[K / b, b, N] times scales."""
    entries = w.node("Reshape", w.node("Gather", NF4, index), [w.rows // w.block, w.block, w.cols])
    return w.node("Reshape", w.node("Mul", entries, scales), [w.rows, w.cols])


def odd_columns(w: Writer) -> str:
    index = w.node("Cast", w.constant(w.codes(w.rows, w.cols), "dec/packed"), to=INT64)
    return columns_of(w, index, w.constant(w.floats(w.rows // w.block, 1, w.cols), "dec/scales"))


def columns_cut_off(w: Writer) -> str:
    codes = w.constant(w.codes(w.rows * w.cols + 2), "dec/packed")
    index = w.node("Slice", w.node("Cast", codes, to=INT64), [0], [w.rows * w.cols], [0])
    return columns_of(w, index, w.constant(w.floats(w.rows // w.block, 1, w.cols), "dec/scales"))


def double_quantized_columns(w: Writer) -> str:
    index = w.node("Cast", w.constant(w.codes(w.rows, w.cols), "dec/packed"), to=INT64)
    blocks = w.rows // w.block
    codes8 = w.constant(w.rng.integers(0, 256, (blocks, w.cols), dtype=np.uint8), "dec/codes8")
    entries = w.node("Gather", w.constant(w.floats(256), "dec/table"), w.node("Cast", codes8, to=INT64))
    scales = w.node("Mul", entries, w.constant(w.floats(blocks, 1), "dec/scales2"))
    return columns_of(w, index, w.node("Unsqueeze", scales, [1]))


def scales_in_a_grid(w: Writer) -> str:
    """Scales [2, 1, 4, 1] of entries [2, b, 4, 6]: neither blocks nor columns."""
    index = w.node("Cast", w.constant(w.codes(w.rows, w.cols), "dec/packed"), to=INT64)
    entries = w.node("Reshape", w.node("Gather", NF4, index), [2, w.block, 4, 6])
    product = w.node("Mul", entries, w.constant(w.floats(2, 1, 4, 1), "dec/scales"))
    return w.node("Reshape", product, [w.rows, w.cols])


def of_other_type(model: onnx.ModelProto) -> None:
    """Give the second call of a function scales of another type."""
    add("halves", SCALES.astype(np.float16))(model)
    call(1, "halves")(model)


DOUBLE = "double quantized"
MUTANTS_OF_FORMS = [
    of(PADDED, "Pad by [0, 2, 0, 0], not by [0, bytes]", literal("Pad", 1, [0, 2, 0, 0])),
    of(PADDED, "Pad by [1, 2], not by [0, bytes]", literal("Pad", 1, [1, 2])),
    of(PADDED, "Pad by [0, -2], not by [0, bytes], some of them", literal("Pad", 1, [0, -2])),
    of(PADDED, "Pad with a value or axes of its own", add("dec/one", np.uint8(1)), literal("Pad", 2, 1, np.uint8)),
    of(PADDED, "Pad with mode edge, not constant", attribute("Pad", mode="edge")),
    of(PADDED, "not of flat bytes", tensor("packed", np.zeros((5, 6), np.uint8))),
    of(PADDED, "56 codes and padding for 60", tensor("packed", np.zeros(28, np.uint8)), literal("Pad", 1, [0, 4])),
    of(PADDED, f"Expand, not {TAKEN}", operator("Pad", "Expand")),
    of("bit shift of bytes", "Gather by UINT8 codes, not INT64, INT32", attribute("Cast", to=2)),
    of("bit shift of bytes", "BitShift with direction LEFT, not RIGHT", attribute("BitShift", direction="LEFT")),
    of("bit shift of bytes", "BitShift with direction none, not RIGHT", without("BitShift", "direction")),
    of("bit shift of bytes", "BitShift by 3, not 4", literal("BitShift", 1, 3, np.uint8)),
    of("bit shift of bytes", "BitwiseAnd by 7, not 15", literal("BitwiseAnd", 1, [7], np.uint8)),
    of("bit shift of bytes", "Cast of codes to INT8, not", attribute("Cast", to=3)),
    of("bit shift of bytes", "BitwiseOr, not Div, BitShift, Mod or BitwiseAnd", operator("BitwiseAnd", "BitwiseOr")),
    of("bit shift of wider integers", "BitShift of INT64, not", attribute("Cast", to=7),
       literal("BitShift", 1, [4]), literal("BitwiseAnd", 1, [15]), literal("BitwiseAnd2", 1, [15])),
    of("bit shift of wider integers", "BitwiseAnd by 14, not 15", literal("BitwiseAnd", 1, [14], np.uint32)),
    of("table read by lists of one", "Unsqueeze on axes 0 of what GatherND reads, not -1",
       literal("Unsqueeze3", 1, [0])),
    of("table read by lists of one", "Squeeze, not Unsqueeze", operator("Unsqueeze3", "Squeeze")),
    of("table read by lists of one", "GatherND with batch_dims 1, not 0", attribute("GatherND", batch_dims=1)),
    of("columns of bytes without unsqueeze", APART, attribute("Concat", axis=0), name="halves apart"),
    of("low nibble first", "Slice on axes [0, 0], not on one", literal("Slice", 3, [0, 0])),
    of("low nibble first", MOVED,
       before("Concat", 0, "Unsqueeze"), literal_at("new/Concat", [1])),
    of("unpacked uint8", "Cast of codes to UINT8, not INT64, INT32", attribute("Cast", to=2)),
    of("unpacked uint8", "codes 'dec/packed', FLOAT [16, 24], is not of integers",
       tensor("packed", np.ones((16, 24), np.float32))),
    of("scales cast to float16", "Cast of floats to DOUBLE, not FLOAT", attribute("Cast2", to=11)),
    of(DOUBLE, "table of scales 'dec/table', FLOAT [255], is not [256]", tensor("table", np.ones(255, np.float32))),
    of(DOUBLE, "table of scales 'dec/table', FLOAT16 [256], is not FLOAT", tensor("table", np.ones(256, np.float16))),
    of(DOUBLE, "scales of scales 'dec/scales2', FLOAT16 [2], is not", tensor("scales2", np.ones(2, np.float16))),
    of(DOUBLE, "codes of scales 'dec/codes8', INT8 [8], is not UINT8", tensor("codes8", np.ones(8, np.int8))),
    of(DOUBLE, "Cast of codes to UINT8, not INT64, INT32", attribute("Cast", to=2)),
    of(DOUBLE, "Gather by UINT8 codes, not INT64, INT32", inputs("Reshape", "dec/codes8", "dec/literal1")),
    of(DOUBLE, "offset 'dec/offset', FLOAT [1, 1], is not one number", tensor("offset", np.ones((1, 1), np.float32))),
    of(DOUBLE, "offset 'dec/offset', DOUBLE [1], is not FLOAT", tensor("offset", np.ones(1, np.float64))),
    of(DOUBLE, "Sub, not a constant of scales", operator("Add", "Sub")),
    of(DOUBLE, "Add of Neg and initializer, not of a Mul by scales and an offset", before("Add", 0, "Neg")),
    of(DOUBLE, "Mul of Neg and Unsqueeze, not of a Gather of entries and scales", before("Mul", 0, "Neg")),
    of(DOUBLE, "Cast, not Gather", before("Mul", 0, "Cast", to=1)),
    of(DOUBLE, "Cast of double-quantized scales, which stay FLOAT", before("Unsqueeze4", 0, "Cast", to=1)),
    of(DOUBLE, "scales [4], not one a block in order", tensor("scales2", np.ones(4, np.float32)),
       inputs("Mul", "Gather", "dec/scales2")),
    custom("24 codes, not at most 2 blocks of 8", 2, 8, 8, blocks_cut_off, "blocks cut off before the lookup"),
    custom("a block of 5 elements of a column, which is odd", 15, 24, 5, odd_columns, "odd columns"),
    custom("386 codes for 16 x 24 elements", 16, 24, 8, columns_cut_off, "codes cut off before columns"),
    custom("scales that are double-quantized along columns", 16, 24, 8, double_quantized_columns, "nested columns"),
    custom("not by blocks or columns", 16, 24, 8, scales_in_a_grid, "scales in a grid"),
    Mutant("calls with two types", "FLOAT [8] or FLOAT16 [8], is not of one type", (of_other_type,), **TWO_CALLS),
]  # fmt: skip
