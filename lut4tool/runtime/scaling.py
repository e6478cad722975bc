"""Scaled products of integers on a CPU, in one step each.

MatMulInteger, the Cast of its result to float32 and the Mul after it: fused where nothing else sees the values between
them; the step stands where the Mul stood. MatMul of a value that DequantizeLinear makes of bytes with a weight that one
made of bytes: the product is that of the bytes, exact, times both scales.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from lut4tool.runtime import int8, panels
from lut4tool.runtime.binding import Frame, bind_host
from lut4tool.runtime.graph import Step
from lut4tool.runtime.scope import Block, Planned, Value


def fuse_scaling(block: Block, frame: Frame, outputs: Sequence[int]) -> None:
    """Fuse in a block whose graph returns the slots `outputs`."""
    _fuse_casts(block, frame, outputs)
    _fuse_dequantized(block, frame, outputs)


def _fuse_casts(block: Block, frame: Frame, outputs: Sequence[int]) -> None:
    readers: dict[int, list[int]] = defaultdict(list)
    for index, reads in enumerate(block.reads):
        for slot in reads:
            readers[slot].append(index)
    returned = Counter(outputs)

    def only(index: int, name: str) -> int | None:
        """The step of that operator that alone reads a step's one result."""
        slots = block.steps[index].outputs
        users = readers[slots[0]] if len(slots) == 1 and not returned[slots[0]] else []
        if len(users) != 1 or block.planned[users[0]] is None:
            return None
        step = block.steps[users[0]]
        fits = step.operator.domain == "" and step.operator.name == name and step.inputs.count(slots[0]) == 1
        return users[0] if fits else None

    gone = set()
    for index, planned in enumerate(block.planned):
        if planned is None or not isinstance(planned.run, int8.Product):
            continue
        cast = only(index, "Cast")
        scale = None if cast is None else only(cast, "Mul")
        if cast is None or scale is None or not _to_float32(block.planned[cast]):
            continue
        step, last = block.steps[index], block.steps[scale]
        (factor,) = (slot for slot in last.inputs if slot != block.steps[cast].outputs[0])
        block.steps[scale] = _fused(step, planned.run, factor, frame, (block.steps[cast], last))
        block.reads[scale] = set(block.steps[scale].inputs)
        block.planned[scale] = None
        gone |= {index, cast}
    _drop(block, gone)


def _to_float32(planned: Planned | None) -> bool:
    return planned is not None and planned.attributes.get("to") == TensorProto.FLOAT


def _fused(step: Step, product: int8.Product, factor: int, frame: Frame, parts: tuple[Step, Step]) -> Step:
    slots = (factor, *step.inputs)
    call = bind_host(product.times, frame, slots)
    return replace(step, call=call, inputs=slots, outputs=parts[1].outputs, fused=parts)


def _drop(block: Block, gone: set[int]) -> None:
    kept: list[Any] = [block.steps, block.reads, block.planned]
    for part in kept:
        part[:] = [value for index, value in enumerate(part) if index not in gone]


# -- DequantizeLinear


class Dequantized:
    """x [..., K], bytes less a zero point, times a weight of bytes and both scales, plus a bias [N] if there is one."""

    def __init__(
        self, product: int8.Product, zero: np.ndarray | None, factors: np.ndarray, bias: np.ndarray | None
    ) -> None:
        self.product, self.zero, self.factors, self.bias = product, zero, factors, bias

    def __call__(self, x: np.ndarray) -> Any:
        """Return the product [..., N] in float32."""
        y = self.product.times(self.factors, x, None, self.zero)
        return y if self.bias is None else y + self.bias


def _fuse_dequantized(block: Block, frame: Frame, outputs: Sequence[int]) -> None:
    readers: dict[int, list[int]] = defaultdict(list)
    for index, reads in enumerate(block.reads):
        for slot in reads:
            readers[slot].append(index)
    packed: dict[int, int8.Product | None] = {}
    gone: set[int] = set()
    for index, step in enumerate(block.steps):
        scale = _scale(step, block.planned[index])
        if scale is None:
            continue
        (slot,) = step.outputs
        taken = [user for user in readers[slot] if _multiply(block, index, user, scale, packed, frame)]
        if len(taken) == len(readers[slot]) and taken and slot not in outputs:
            gone.add(index)
            block.steps[taken[0]] = replace(block.steps[taken[0]], fused=(step,))
    _drop(block, gone)


def _scale(step: Step, planned: Planned | None) -> tuple[np.ndarray, np.ndarray | None] | None:
    """The scale and the zero point of a step that dequantizes bytes by one of each."""
    if planned is None or (step.operator.domain, step.operator.name) != ("", "DequantizeLinear"):
        return None
    x, scale, zero = (*planned.inputs, Value())[:3]
    if x.type not in ("tensor(int8)", "tensor(uint8)") or x.constant is not None or scale.constant is None:
        return None
    factor, point = scale.constant.value, None if zero.constant is None else zero.constant.value
    known = zero.absent or (point is not None and point.size == 1)
    return (factor, point) if known and factor.size == 1 and factor.dtype == np.float32 else None


def _multiply(
    block: Block, index: int, user: int, scale: tuple[np.ndarray, np.ndarray | None],
    packed: dict[int, int8.Product | None], frame: Frame,
) -> bool:  # fmt: skip
    """Let the step `user` multiply the bytes that step `index` would dequantize, where its weight was bytes too."""
    planned, before = block.planned[user], block.planned[index]
    product = None if planned is None else planned.run
    if planned is None or before is None or not isinstance(product, panels.Product) or product.quantized is None:
        return False
    matrix, columns = product.quantized.matrix, product.quantized.columns()
    if columns is None:
        return False
    factor, zero = columns
    if id(matrix) not in packed:
        bytes_ = int8.pack(matrix, zero)
        packed[id(matrix)] = None if bytes_ is None else int8.Product(bytes_, _nothing(*matrix.shape))
    whole = packed[id(matrix)]
    if whole is None:
        return False
    factors = np.broadcast_to(scale[0].reshape(()) * factor.reshape(-1), product.width)
    bias = None if product.bias is None else product.bias[: product.width]
    run = Dequantized(whole, scale[1], np.ascontiguousarray(factors, np.float32), bias)
    slots = block.steps[index].inputs[:1]
    block.steps[user] = replace(block.steps[user], call=bind_host(run, frame, slots), inputs=slots)
    block.reads[user] = set(slots)
    block.planned[user] = replace(planned, run=run, inputs=before.inputs[:1])
    return True


def _nothing(depth: int, width: int) -> Callable[..., Any]:
    """The product of operands of no elements with a matrix of that size."""

    def run(a: np.ndarray, *_: Any) -> np.ndarray:
        if a.shape[-1] != depth:
            raise ValueError(f"x of shape {list(a.shape)} and a weight of shape {[depth, width]} have no product")
        return np.zeros((*a.shape[:-1], width), np.int32)

    return run
