"""The forms of a lookup chain beside the canonical one: each written out node by node, its weight in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from build import CODEBOOKS, value_of

NF4 = CODEBOOKS["nf4"]
F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
INT64, INT32 = TensorProto.INT64, TensorProto.INT32


@dataclass(eq=False)
class Writer:
    """Nodes and constants of one chain, and the weight [K, N] that it must give.

    Node names are "dec/" + role; a role is the operator's name and, from the second on, its number.
    """

    rows: int
    cols: int
    block: int
    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    weight: np.ndarray = field(default_factory=lambda: np.empty(0))

    def node(self, op: str, *inputs: Any, domain: str = "", **attributes: Any) -> str:
        """Add a node; arrays and numbers among its inputs become constants."""
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        count = sum(node.op_type == op for node in self.nodes)
        role = f"dec/{op}{count + 1 if count else ''}"
        self.nodes.append(helper.make_node(op, names, [f"{role}_out"], role, domain=domain, **attributes))
        return f"{role}_out"

    def constant(self, value: Any, name: str = "") -> str:
        """Add an initializer, INT64 unless it is an array."""
        array = value if isinstance(value, np.ndarray | np.generic) else np.array(value, np.int64)
        name = name or f"dec/literal{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def codes(self, *shape: int) -> np.ndarray:
        """Codes 0 to 15, drawn."""
        return self.rng.integers(0, 16, shape, dtype=np.uint8)

    def floats(self, *shape: int, dtype: np.dtype = F32) -> np.ndarray:
        """Scales, drawn."""
        return self.rng.uniform(0.01, 2, shape).astype(dtype)

    def pairs(self, packed: str, axis: int = 1, low_first: bool = False) -> str:
        """Both nibbles of each byte, by Div and Mod of INT64."""
        codes = self.node("Cast", packed, to=INT64)
        high = self.node("Unsqueeze", self.node("Div", codes, [16]), [axis])
        low = self.node("Unsqueeze", self.node("Mod", codes, [16]), [axis])
        return self.node("Concat", *((low, high) if low_first else (high, low)), axis=axis)

    def blocks(self, entries: str, scales: np.ndarray) -> str:
        """Entries [-1, block] times scales, flat, cut to the matrix."""
        column = self.node("Unsqueeze", self.constant(scales, "dec/scales"), [1])
        flat = self.node("Reshape", self.node("Mul", entries, column), [-1])
        flat = self.node("Slice", flat, [0], [self.rows * self.cols], [0])
        return self.node("Reshape", flat, [self.rows, self.cols])

    def flat(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The weight [rows, cols] of flat codes in blocks, in the scales' type."""
        entries = NF4.astype(scales.dtype)[codes.reshape(-1)]
        values = entries * np.repeat(scales, self.block)[: codes.size]
        return values[: self.rows * self.cols].reshape(self.rows, self.cols)


def packed(codes: np.ndarray, low_first: bool = False) -> np.ndarray:
    """Two codes a byte, flat, a last odd one beside a 0."""
    flat = np.append(codes.reshape(-1), np.zeros(codes.size % 2, np.uint8))
    return flat[1::2] << 4 | flat[0::2] if low_first else flat[0::2] << 4 | flat[1::2]


Form = Callable[[Writer], str]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    """Enter a form under its function's name."""
    FORMS[function.__name__.replace("_", " ")] = function
    return function


def canonical_parts(w: Writer) -> tuple[np.ndarray, np.ndarray]:
    """Codes of whole blocks and their scales."""
    blocks = -(-w.rows * w.cols // w.block)
    return w.codes(blocks * w.block), w.floats(blocks)


@form
def cast_int32(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    whole = w.node("Cast", w.constant(packed(codes), "dec/packed"), to=INT32)
    high = w.node("Unsqueeze", w.node("Div", whole, np.array([16], np.int32)), [1])
    low = w.node("Unsqueeze", w.node("Mod", whole, np.array(16, np.int32)), [-1])
    index = w.node("Reshape", w.node("Concat", high, low, axis=-1), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def low_nibble_first(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    pairs = w.pairs(w.constant(packed(codes, low_first=True), "dec/packed"), low_first=True)
    index = w.node("Reshape", pairs, [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def bit_shift_of_bytes(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    name = w.constant(packed(codes), "dec/packed")
    high = w.node("Unsqueeze", w.node("BitShift", name, np.array(4, np.uint8), direction="RIGHT"), [1])
    low = w.node("Unsqueeze", w.node("BitwiseAnd", name, np.array([15], np.uint8)), [1])
    index = w.node("Reshape", w.node("Cast", w.node("Concat", high, low, axis=1), to=INT32), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def bit_shift_of_wider_integers(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    whole = w.node("Cast", w.constant(packed(codes), "dec/packed"), to=TensorProto.UINT32)
    high = w.node("BitShift", whole, np.array([4], np.uint32), direction="RIGHT")
    high = w.node("BitwiseAnd", high, np.array([15], np.uint32))  # a mask that changes nothing
    low = w.node("BitwiseAnd", whole, np.array([15], np.uint32))
    halves = [w.node("Cast", w.node("Unsqueeze", half, [1]), to=INT64) for half in (high, low)]
    index = w.node("Reshape", w.node("Concat", *halves, axis=1), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def bytes_of_rank_two(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    name = w.constant(packed(codes).reshape(-1, w.block // 2), "dec/packed")
    index = w.node("Reshape", w.pairs(name, axis=2), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def scales_by_reshape(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    entries = w.node("Gather", w.constant(NF4, "dec/codebook"), index)
    product = w.node("Mul", w.node("Reshape", w.constant(scales, "dec/scales"), [-1, 1]), entries)
    flat = w.node("Slice", w.node("Reshape", product, [-1]), [0], [w.rows * w.cols], [0])
    return w.node("Reshape", flat, [w.rows, w.cols])


@form
def scales_stored_as_a_column(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    product = w.node("Mul", w.node("Gather", NF4, index), w.constant(scales[:, None], "dec/scales"))
    flat = w.node("Slice", w.node("Reshape", product, [-1]), [0], [w.rows * w.cols], [0])
    return w.node("Reshape", flat, [w.rows, w.cols])


@form
def scales_cut_to_the_blocks(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    longer = w.constant(np.append(scales, w.floats(3)), "dec/scales")
    column = w.node("Unsqueeze", w.node("Slice", longer, [0], [scales.size], [0]), [1])
    flat = w.node("Reshape", w.node("Mul", w.node("Gather", NF4, index), column), [-1])
    return w.node("Reshape", w.node("Slice", flat, [0], [w.rows * w.cols], [0]), [w.rows, w.cols])


@form
def nothing_cut(w: Writer) -> str:
    """Reshape straight to [rows, cols]: rows * cols is a multiple of the block."""
    codes, scales = w.codes(w.rows * w.cols), w.floats(w.rows * w.cols // w.block)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [w.rows * w.cols // w.block, w.block])
    column = w.node("Unsqueeze", w.constant(scales, "dec/scales"), [-1])
    return w.node("Reshape", w.node("Mul", w.node("Gather", NF4, index), column), [w.rows, -1])


@form
def unpadded(w: Writer) -> str:
    """One scale for all, and (n + 1) / 2 bytes."""
    codes, scale = w.codes(w.rows * w.cols), w.floats(1)
    w.weight = NF4[codes].reshape(w.rows, w.cols) * scale
    flat = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1])
    product = w.node("Mul", w.node("Gather", NF4, flat), w.constant(scale, "dec/scales"))
    return w.node("Reshape", w.node("Slice", product, [0], [w.rows * w.cols], [0]), [w.rows, w.cols])


@form
def bytes_padded_to_whole_blocks(w: Writer) -> str:
    """As expand writes a weight of (n + 1) / 2 bytes in blocks."""
    codes, scales = w.codes(w.rows * w.cols), w.floats(-(-w.rows * w.cols // w.block))
    w.weight = w.flat(codes, scales)
    held = packed(codes)
    whole = w.node("Pad", w.constant(held, "dec/packed"), [0, scales.size * w.block // 2 - held.size])
    index = w.node("Reshape", w.pairs(whole), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def no_scales(w: Writer) -> str:
    codes = w.codes(w.rows * w.cols)
    w.weight = NF4[codes].reshape(w.rows, w.cols)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1])
    index = w.node("Slice", index, [0], [w.rows * w.cols], [0])
    return w.node("Gather", w.constant(NF4, "dec/codebook"), w.node("Reshape", index, [w.rows, w.cols]))


@form
def no_scales_in_half(w: Writer) -> str:
    codes = w.codes(w.rows, w.cols)
    w.weight = NF4.astype(F16)[codes]
    index = w.node("Cast", w.constant(codes, "dec/packed"), to=INT64)
    return w.node("Cast", w.node("Gather", w.constant(NF4, "dec/codebook"), index), to=TensorProto.FLOAT16)


@form
def no_scales_of_a_code_an_element(w: Writer) -> str:
    """The product reads what Gather gives, as it is."""
    codes = w.codes(w.rows, w.cols)
    w.weight = NF4[codes]
    return w.node("Gather", w.constant(NF4, "dec/codebook"), w.constant(codes.astype(np.int64), "dec/packed"))


def unpacked(w: Writer, dtype: Any, cast: int | None, shift: int = 0) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows * w.cols // w.block)
    w.weight = w.flat(codes, scales)
    name = w.constant((codes.astype(np.int64) - 16 * shift).astype(dtype), "dec/packed")
    index = w.node("Cast", name, to=cast) if cast else name
    entries = w.node("Reshape", w.node("Gather", NF4, index), [-1, w.block])
    column = w.node("Unsqueeze", w.constant(scales, "dec/scales"), [1])
    return w.node("Reshape", w.node("Mul", entries, column), [w.rows, w.cols])


@form
def unpacked_uint8(w: Writer) -> str:
    return unpacked(w, np.uint8, INT64)


@form
def unpacked_int32(w: Writer) -> str:
    return unpacked(w, np.int32, None)


@form
def unpacked_int64(w: Writer) -> str:
    return unpacked(w, np.int64, None)


@form
def unpacked_counted_from_the_end(w: Writer) -> str:
    """Negative indices, which Gather counts from the end."""
    return unpacked(w, np.int8, INT32, shift=1)


@form
def unpacked_wrapped_by_a_cast(w: Writer) -> str:
    """UINT32 codes from 2^32 - 16 on, which INT32 makes negative indices."""
    return unpacked(w, np.uint32, INT32, shift=1)


@form
def four_bit_type(w: Writer) -> str:
    return unpacked(w, ml_dtypes.uint4, INT32)


@form
def blocks_of_rows(w: Writer) -> str:
    """[N, K / b, b] times [N, K / b, 1], then a Transpose."""
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows, w.cols // w.block)
    w.weight = w.flat(codes, scales.reshape(-1)).T
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [w.rows, w.cols // w.block, w.block])
    column = w.node("Unsqueeze", w.constant(scales, "dec/scales"), [2])
    product = w.node("Mul", w.node("Gather", NF4, index), column)
    return w.node("Transpose", w.node("Reshape", product, [w.rows, w.cols]), perm=[1, 0])


@form
def blocks_of_rows_by_a_zero(w: Writer) -> str:
    """Reshape [0, -1], which keeps the first dimension."""
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows, w.cols // w.block)
    w.weight = w.flat(codes, scales.reshape(-1)).T
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [w.rows, w.cols // w.block, w.block])
    product = w.node("Mul", w.node("Gather", NF4, index), w.constant(scales[..., None], "dec/scales"))
    return w.node("Transpose", w.node("Reshape", product, [0, -1]), perm=[1, 0])


@form
def cut_from_the_end(w: Writer) -> str:
    """A Slice of everything, as exporters write [:], then one to a count from the end; both on axis -1."""
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    product = w.node("Mul", w.node("Gather", NF4, index), w.constant(scales[:, None], "dec/scales"))
    flat = w.node("Slice", w.node("Reshape", product, [-1]), [0], [np.iinfo(np.int64).max], [-1])
    left_out = codes.size - w.rows * w.cols
    return w.node("Reshape", w.node("Slice", flat, [0], [-left_out], [-1]), [w.rows, w.cols])


@form
def table_read_by_lists_of_one(w: Writer) -> str:
    """PyTorch's table[codes]: GatherND."""
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    return w.blocks(w.node("GatherND", w.constant(NF4, "dec/codebook"), w.node("Unsqueeze", index, [-1])), scales)


@form
def columns_of_bytes_without_unsqueeze(w: Writer) -> str:
    """Bytes [n, 1], as bitsandbytes keeps them."""
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    whole = w.node("Cast", w.constant(packed(codes)[:, None], "dec/packed"), to=INT32)
    halves = (w.node("Div", whole, np.int32(16)), w.node("Mod", whole, np.int32(16)))
    index = w.node("Reshape", w.node("Concat", *halves, axis=1), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


@form
def halves_made_columns_by_reshape(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales)
    whole = w.node("Cast", w.constant(packed(codes), "dec/packed"), to=INT64)
    halves = (w.node("Reshape", w.node(op, whole, [16]), [-1, 1]) for op in ("Div", "Mod"))
    index = w.node("Reshape", w.node("Concat", *halves, axis=1), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(NF4, "dec/codebook"), index), scales)


def in_columns(w: Writer, index: str, codes: np.ndarray, scales: np.ndarray) -> str:
    """[K / b, b, N] times [K / b, 1, N]."""
    w.weight = NF4[codes] * np.repeat(scales, w.block, axis=0)
    entries = w.node("Reshape", w.node("Gather", NF4, index), [w.rows // w.block, w.block, w.cols])
    row = w.node("Unsqueeze", w.constant(scales, "dec/scales"), [1])
    return w.node("Reshape", w.node("Mul", entries, row), [w.rows, w.cols])


@form
def blocks_of_columns(w: Writer) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows // w.block, w.cols)
    return in_columns(w, w.node("Cast", w.constant(codes, "dec/packed"), to=INT64), codes, scales)


@form
def packed_blocks_of_columns(w: Writer) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows // w.block, w.cols)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [w.rows, w.cols])
    return in_columns(w, index, codes, scales)


@form
def low_first_blocks_of_columns(w: Writer) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows // w.block, w.cols)
    name = w.constant(packed(codes, low_first=True).reshape(w.rows, -1), "dec/packed")
    index = w.node("Reshape", w.pairs(name, axis=2, low_first=True), [w.rows, w.cols])
    return in_columns(w, index, codes, scales)


@form
def flat_codes_in_blocks_of_columns(w: Writer) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows // w.block, w.cols)
    return in_columns(w, w.node("Cast", w.constant(codes.reshape(-1), "dec/packed"), to=INT32), codes, scales)


@form
def a_scale_a_row(w: Writer) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.rows, 1)
    w.weight = NF4[codes] * scales
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [w.rows, w.cols])
    return w.node("Mul", w.node("Gather", NF4, index), w.constant(scales, "dec/scales"))


@form
def a_scale_a_column(w: Writer) -> str:
    codes, scales = w.codes(w.rows, w.cols), w.floats(w.cols)
    w.weight = NF4[codes] * scales
    index = w.node("Cast", w.constant(codes, "dec/packed"), to=INT64)
    return w.node("Mul", w.node("Gather", NF4, index), w.constant(scales, "dec/scales"))


def in_type(w: Writer, dtype: np.dtype, table: str, adjoint: bool = False) -> str:
    """Entries and scales of a half type, the product rounded in it."""
    codes, _ = canonical_parts(w)
    scales = w.floats(codes.size // w.block, dtype=dtype)
    w.weight = w.flat(codes, scales).astype(F32 if adjoint else dtype)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    value = w.blocks(w.node("Gather", table, index), scales)
    return w.node("Cast", value, to=TensorProto.FLOAT) if adjoint else value


@form
def looked_up_in_float16(w: Writer) -> str:
    return in_type(w, F16, w.constant(NF4.astype(F16), "dec/codebook"))


@form
def looked_up_in_bfloat16(w: Writer) -> str:
    return in_type(w, BF16, w.constant(NF4.astype(BF16), "dec/codebook"))


@form
def looked_up_in_float16_then_float(w: Writer) -> str:
    return in_type(w, F16, w.constant(NF4.astype(F16), "dec/codebook"), adjoint=True)


@form
def codebook_cast_to_float16(w: Writer) -> str:
    return in_type(w, F16, w.node("Cast", w.constant(NF4, "dec/codebook"), to=TensorProto.FLOAT16))


@form
def entries_cast_to_float16(w: Writer) -> str:
    codes, _ = canonical_parts(w)
    scales = w.floats(codes.size // w.block, dtype=F16)
    w.weight = w.flat(codes, scales)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    entries = w.node("Gather", w.constant(NF4, "dec/codebook"), index)
    return w.blocks(w.node("Cast", entries, to=TensorProto.FLOAT16), scales)


@form
def scales_cast_to_float16(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales.astype(F16))
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    entries = w.node("Gather", w.constant(NF4.astype(F16), "dec/codebook"), index)
    column = w.node("Unsqueeze", w.node("Cast", w.constant(scales, "dec/scales"), to=TensorProto.FLOAT16), [1])
    flat = w.node("Reshape", w.node("Mul", entries, column), [-1])
    return w.node("Reshape", w.node("Slice", flat, [0], [w.rows * w.cols], [0]), [w.rows, w.cols])


@form
def halves_widened(w: Writer) -> str:
    """Codebook float16, scales bfloat16, both cast to float32: exact."""
    codes, scales = canonical_parts(w)
    scales, table = scales.astype(BF16), NF4.astype(F16)
    values = table.astype(F32)[codes] * np.repeat(scales.astype(F32), w.block)
    w.weight = values[: w.rows * w.cols].reshape(w.rows, w.cols)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    entries = w.node("Cast", w.node("Gather", w.constant(table, "dec/codebook"), index), to=TensorProto.FLOAT)
    column = w.node("Unsqueeze", w.node("Cast", w.constant(scales, "dec/scales"), to=TensorProto.FLOAT), [1])
    flat = w.node("Reshape", w.node("Mul", entries, column), [-1])
    return w.node("Reshape", w.node("Slice", flat, [0], [w.rows * w.cols], [0]), [w.rows, w.cols])


def doubly_quantized(w: Writer, offset: bool, group: int = 4) -> str:
    """code256[absmax8[i]] * absmax2[i // group] + offset, cut to the blocks."""
    blocks = -(-w.rows * w.cols // w.block)
    groups = -(-blocks // group)
    codes, codes8 = w.codes(blocks * w.block), w.rng.integers(0, 256, groups * group, dtype=np.uint8)
    table, scales2, moved = w.floats(256), w.floats(groups), w.floats(1)
    absmax = table[codes8] * np.repeat(scales2, group)
    absmax = absmax + moved if offset else absmax
    w.weight = w.flat(codes, absmax[:blocks])
    index8 = w.node("Reshape", w.node("Cast", w.constant(codes8, "dec/codes8"), to=INT64), [-1, group])
    entries8 = w.node("Gather", w.constant(table, "dec/table"), index8)
    value = w.node("Mul", entries8, w.node("Unsqueeze", w.constant(scales2, "dec/scales2"), [1]))
    value = w.node("Reshape", value, [-1])
    value = w.node("Add", value, w.constant(moved, "dec/offset")) if offset else value
    value = w.node("Slice", value, [0], [blocks], [0])
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    product = w.node("Mul", w.node("Gather", NF4, index), w.node("Unsqueeze", value, [1]))
    flat = w.node("Slice", w.node("Reshape", product, [-1]), [0], [w.rows * w.cols], [0])
    return w.node("Reshape", flat, [w.rows, w.cols])


@form
def double_quantized(w: Writer) -> str:
    return doubly_quantized(w, offset=True)


@form
def double_quantized_without_offset(w: Writer) -> str:
    return doubly_quantized(w, offset=False)


@form
def cast_after_transpose(w: Writer) -> str:
    codes, scales = canonical_parts(w)
    w.weight = w.flat(codes, scales).T.astype(F16).astype(F32)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    value = w.node("Transpose", w.blocks(w.node("Gather", NF4, index), scales), perm=[1, 0])
    return w.node("Cast", w.node("Cast", value, to=TensorProto.FLOAT16), to=TensorProto.FLOAT)


@form
def affine_codebook(w: Writer) -> str:
    """Entries that are evenly spaced: still a lookup."""
    codes, scales = canonical_parts(w)
    table = np.arange(-8, 8, dtype=np.float32)
    values = table[codes] * np.repeat(scales, w.block)
    w.weight = values[: w.rows * w.cols].reshape(w.rows, w.cols)
    index = w.node("Reshape", w.pairs(w.constant(packed(codes), "dec/packed")), [-1, w.block])
    return w.blocks(w.node("Gather", w.constant(table, "dec/codebook"), index), scales)


#: Forms whose weight has blocks that fill it, in rows or columns: rows and cols are multiples of the block then.
FILLED = ("nothing cut", "unpacked", "four bit", "blocks of")


@dataclass(eq=False)
class Model:
    """A model of one product, feeds for it and its weight [K, N]."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    oracle: np.ndarray


def sizes(name: str, large: bool) -> tuple[int, int, int]:
    """Rows, columns and block for a form: small, or over 2^20 elements; blocks cross rows where they may."""
    filled = any(part in name for part in FILLED)
    if large:
        return (1088, 1024, 64) if filled else (1030, 1030, 64)
    if name in ("unpadded", "no scales", "no scales in half"):
        return (7, 5, 8)
    return (16, 24, 8) if filled else (6, 10, 8)


def make(
    name: str,
    *,
    large: bool = False,
    product: Callable[..., onnx.NodeProto] | None = None,
    opset: int = 21,
    seed: int = 0,
) -> Model:
    """A model of the form: y = x @ weight, or another product that `product(x, weight)` writes."""
    writer = Writer(*sizes(name, large), np.random.default_rng(seed))
    value = FORMS[name](writer)
    dtype = writer.weight.dtype
    x = writer.rng.standard_normal((3, writer.weight.shape[0])).astype(dtype)
    node = (product or matmul)("x", value)
    return Model(assemble(writer, [node], {"x": x}, dtype, opset), {"x": x}, writer.weight)


def matmul(x: str, weight: str) -> onnx.NodeProto:
    """The plain product."""
    return helper.make_node("MatMul", [x, weight], ["y"], "dec/MatMul")


def assemble(
    writer: Writer, products: Sequence[onnx.NodeProto], feeds: dict[str, np.ndarray], dtype: np.dtype, opset: int
) -> onnx.ModelProto:
    """A model of a chain and what reads it."""
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    outputs = [helper.make_tensor_value_info(node.output[0], kind, [None, None]) for node in products]
    inputs = [value_of(name, array) for name, array in feeds.items()]
    graph = helper.make_graph([*writer.nodes, *products], "g", inputs, outputs, writer.tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
