"""com.microsoft's products and lookups with weights in blocks of 2, 4 or 8 bits that stay packed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from lut4tool.formats import FP4, NF4, Lookup4Weight, QmmWeight, dtype_name
from lut4tool.kernels import Choice
from lut4tool.runtime import backend
from lut4tool.runtime.dtypes import to_device
from lut4tool.runtime.ops.compute import finish, numpy_type, working
from lut4tool.runtime.ops.lut4tool import planned_product
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op

MICROSOFT = "com.microsoft"

#: What serves a weight that no kernel takes, in the plan.
DECODED = "decoded, a panel at a time"
#: Elements of a weight that are decoded at a time where no kernel takes it packed: 4 MB of float32.
_PANEL = 1 << 20
_BNB4_CODEBOOKS = {0: FP4, 1: NF4}


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The uint8 codes of packed [..., bytes] -> [..., bytes * 8 / bits], low bits first."""
    if bits == 8:
        return packed
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def power_of_two(block_size: int) -> bool:
    """Whether it is a block size that com.microsoft allows: a power of two from 16 on."""
    return block_size >= 16 and block_size & (block_size - 1) == 0


def _attributes(node: Node, required: tuple[str, ...], **defaults: int) -> dict[str, Any]:
    """The attributes of a planned operator, checked as the plan does for the others."""
    if missing := [name for name in required if name not in node.attributes]:
        raise Unsupported(f"it needs the attributes {', '.join(missing)}")
    if unknown := sorted(node.attributes.keys() - {*required, *defaults}):
        raise Unsupported(f"it has no attributes {', '.join(unknown)} that are supported")
    values = {**defaults, **node.attributes}
    if wrong := [name for name, value in values.items() if not isinstance(value, int)]:
        raise Unsupported(f"{', '.join(wrong)} must be an integer")
    if not power_of_two(values["block_size"]):
        raise Unsupported(f"block_size must be a power of two from 16 on, not {values['block_size']}")
    return values


def _inputs(node: Node, needed: int, most: int) -> None:
    if len(node.given) > most or not all(node.given[:needed]) or len(node.given) < needed:
        raise Unsupported(f"it takes {needed} to {most} inputs, the first {needed} always, not {len(node.given)}")


# -- MatMulNBits


@op("MatMulNBits", domain=MICROSOFT, host=(1, 2, 3, 4), planned=True)
def matmul_nbits(node: Node) -> Callable[..., Any]:
    """A [..., K] @ W.T with W [N, K] in blocks along K, low bits first, less a zero point of 2^(bits - 1) by default.

    accuracy_level only allows rounding that we never do. Without B's bytes (a size of 0) the product is 0.
    """
    a = _attributes(node, ("K", "N", "block_size"), bits=4, accuracy_level=0, weight_prepacked=0)
    _inputs(node, 3, 6)
    if a["bits"] not in (2, 4, 8):
        raise Unsupported(f"bits must be 2, 4 or 8, not {a['bits']}")
    if a["weight_prepacked"]:
        raise Unsupported("weight_prepacked must be 0: other layouts are those of a CUDA kernel")
    depth, columns, size, bits = a["K"], a["N"], a["block_size"], a["bits"]

    def weight(packed: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None = None) -> QmmWeight:
        return QmmWeight(*_blocks(packed, scales, zero_points, depth, columns, size, bits), depth, columns, size)

    def decoded(x: Any, packed: np.ndarray, scales: np.ndarray, zeros: Any = None, group: Any = None) -> Any:
        blocks = _blocks(packed, scales, zeros, depth, columns, size, bits)
        return decoded_product(x, *blocks, depth, bits, group)

    given = (*node.given, *[False] * 6)[:6]
    has_group, has_bias = given[4], given[5]
    empty = node.constants[1] is not None and node.constants[1].size == 0
    product = planned_product(node, weight) if bits == 4 and not has_group and not empty else decoded
    if product is decoded and not empty:
        why = "it has g_idx" if has_group else f"it has {bits} bits"
        device = backend.kind(node.device)
        node.note(Choice(DECODED, None, None, {device: f"{why}; the kernels take 4 bits without g_idx"}))

    def run(x: Any, packed: np.ndarray, *rest: Any) -> Any:
        if packed.size == 0:
            y = to_device(np.zeros((*x.shape[:-1], columns), numpy_type(x)))
        else:
            y = product(x, packed, *rest[: 2 if product is not decoded else 3])
        return y + rest[3].astype(y.dtype) if has_bias else y

    return run


def _blocks(
    packed: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None,
    depth: int,
    columns: int,
    size: int,
    bits: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """B as [N, blocks, bytes], scales as [N, blocks], zero points one a block or [1, 1]; each may come flat."""
    blocks = -(-depth // size)
    packed = _shaped("B", packed, columns, blocks, size * bits // 8)
    scales = _shaped("scales", scales, columns, blocks)
    if zero_points is None:
        return packed, scales, np.full((1, 1), 2 ** (bits - 1), np.uint8)
    if zero_points.dtype == np.uint8:
        zeros = unpacked(_shaped("zero_points", zero_points, columns, -(-blocks * bits // 8)), bits)
        return packed, scales, np.ascontiguousarray(zeros[:, :blocks])
    return packed, scales, _shaped("zero_points", zero_points, columns, blocks)


def _shaped(name: str, value: np.ndarray, *shape: int) -> np.ndarray:
    """A value of this shape, or of one that runs its last axes together; never one of other axes with as many bytes."""
    if value.size != prod(shape) or (value.ndim > 1 and value.shape != shape[: value.ndim - 1] + value.shape[-1:]):
        raise Unsupported(f"{name} must be of shape {list(shape)}, or flat, not {list(value.shape)}")
    return value.reshape(shape)


def decoded_product(
    x: Any,
    packed: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    depth: int,
    bits: int,
    group: np.ndarray | None = None,
) -> Any:
    """Multiply x [..., K] by W.T where no kernel takes W packed: a panel of its rows is decoded at a time.

    group: the block of each of the K inputs, where they do not lie in order.
    """
    if x.shape[-1] != depth:
        raise ValueError(f"A of shape {list(x.shape)} does not end in K = {depth}")
    if group is not None:
        group = group[:depth]
        if group.size < depth or (group < 0).any() or (group >= scales.shape[1]).any():
            raise ValueError(f"g_idx must name one of {scales.shape[1]} blocks for each of {depth} inputs")
    xp, data = working(x)
    zeros = np.broadcast_to(zeros, scales.shape)
    rows = max(1, _PANEL // max(1, depth))
    panels = []
    for start in range(0, len(scales), rows):
        some = slice(start, start + rows)
        panel = decoded_blocks(packed[some], scales[some], zeros[some], depth, bits, group)
        panels.append(xp.matmul(data, xp.array(panel.astype(np.float32)).T))
    return finish(xp.concatenate(panels, axis=-1), x)


def decoded_blocks(
    packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray, depth: int, bits: int, group: np.ndarray | None = None
) -> np.ndarray:
    """W [..., K] of packed [..., blocks, bytes], scales and zeros [..., blocks]; products in the scales' type."""
    codes = unpacked(packed, bits)
    if group is None:
        steps = codes.astype(np.float32) - zeros.astype(np.float32)[..., None]
        values = (steps * scales.astype(np.float32)[..., None]).reshape(*codes.shape[:-2], -1)[..., :depth]
    else:
        steps = codes.reshape(*codes.shape[:-2], -1)[..., :depth].astype(np.float32)
        values = (steps - zeros.astype(np.float32)[..., group]) * scales.astype(np.float32)[..., group]
    return values.astype(scales.dtype, copy=False)


# -- MatMulBnb4


@op("MatMulBnb4", domain=MICROSOFT, host=(1, 2), planned=True)
def matmul_bnb4(node: Node) -> Callable[..., Any]:
    """A @ W.T (transB 0: A @ W), W [N, K] flattened, then cut in blocks: bitsandbytes' NF4 (1) or FP4 (0).

    training_mode changes nothing in a product.
    """
    a = _attributes(node, ("K", "N", "block_size", "quant_type"), transB=1, training_mode=0)
    _inputs(node, 3, 3)
    if a["quant_type"] not in _BNB4_CODEBOOKS:
        raise Unsupported(f"quant_type must be 0 (FP4) or 1 (NF4), not {a['quant_type']}")
    codebook, perm = _BNB4_CODEBOOKS[a["quant_type"]], (1, 0) if a["transB"] else (0, 1)

    def weight(packed: np.ndarray, absmax: np.ndarray) -> Lookup4Weight:
        scales, kind = absmax.reshape(-1), dtype_name(absmax.dtype)
        return Lookup4Weight(
            packed.reshape(-1), scales, codebook, a["N"], a["K"], a["block_size"], perm, weight_dtype=kind
        )

    return planned_product(node, weight)


# -- GatherBlockQuantized


def _gather_check(node: Node) -> None:
    """Refuse bits other than 2, 4 and 8, and uint8 data gathered along another axis than the first."""
    size, bits = node.attributes.get("block_size", 128), node.attributes.get("bits", 4)
    if size and not power_of_two(size):
        raise Unsupported(f"block_size must be 0 or a power of two from 16 on, not {size}")
    if bits not in (2, 4, 8):
        raise Unsupported(f"bits must be 2, 4 or 8, not {bits}")
    data = node.constants[0]
    if data is not None and data.dtype == np.uint8 and node.attributes.get("gather_axis", 0) % data.ndim:
        raise Unsupported("gather_axis must be 0 where data is uint8")


@op("GatherBlockQuantized", domain=MICROSOFT, host=(0, 1, 2, 3), check=_gather_check)
def gather_block_quantized(
    data: Any, indices: Any, scales: Any, zero_points: Any = None, *, bits: int = 4, block_size: int = 128,
    gather_axis: int = 0, quantize_axis: int = 1,
) -> Any:  # fmt: skip
    """Rows are gathered, then decoded; uint8 data is packed along its last axis; an index out of range gives zeros.

    The zero point is 0 by default, for uint8 data 2^(bits - 1). block_size 0: a block is the whole axis.
    """
    packed, axis = data.dtype == np.uint8, gather_axis % data.ndim
    quantized = quantize_axis % data.ndim
    width = 8 // bits if packed else 1
    length = data.shape[axis]
    size = block_size or data.shape[quantized] * (width if quantized == data.ndim - 1 else 1)
    inside = (indices >= -length) & (indices < length)
    places = np.where(inside, np.where(indices < 0, indices + length, indices), 0)

    def pick(values: np.ndarray) -> np.ndarray:
        """The blocks of the gathered elements: one a row where both axes differ, else the block of each index."""
        at = places // size if axis == quantized else places
        return np.take(values, at if values.shape[axis] > 1 else 0 * at, axis=axis)

    def widen(values: np.ndarray) -> np.ndarray:
        if axis == quantized:
            return values
        along = quantized + (places.ndim - 1 if quantized > axis else 0)
        return np.take(values, np.arange(codes.shape[along]) // size, axis=along)

    codes = np.take(data, places, axis=axis)
    if packed:
        codes = unpacked(codes, bits)
        if zero_points is not None:
            zero_points = unpacked(zero_points, bits)[..., : scales.shape[-1]]
    steps = codes.astype(np.float32)
    if zero_points is not None:
        steps -= widen(pick(zero_points)).astype(np.float32)
    elif packed:
        steps -= np.float32(2 ** (bits - 1))
    values = steps * widen(pick(scales)).astype(np.float32)
    shape = [places.shape[i - axis] if axis <= i < axis + places.ndim else 1 for i in range(values.ndim)]
    return to_device(np.where(inside.reshape(shape), values, np.float32(0)).astype(scales.dtype))
