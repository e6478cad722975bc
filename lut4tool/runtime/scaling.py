"""Scaled products of integers on a CPU: MatMulInteger, the Cast of its result to float32 and the Mul after it as one.

Fused only where nothing else sees the two values between them. The fused step stands where the Mul stood.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onnx import TensorProto

from lut4tool.runtime import int8
from lut4tool.runtime.binding import Frame, bind_host
from lut4tool.runtime.graph import Step
from lut4tool.runtime.scope import Block, Planned


def fuse_scaling(block: Block, frame: Frame, outputs: Sequence[int]) -> None:
    """Fuse in a block whose graph returns the slots `outputs`."""
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
    kept: list[Any] = [block.steps, block.reads, block.planned]
    for part in kept:
        part[:] = [value for index, value in enumerate(part) if index not in gone]


def _to_float32(planned: Planned | None) -> bool:
    return planned is not None and planned.attributes.get("to") == TensorProto.FLOAT


def _fused(step: Step, product: int8.Product, factor: int, frame: Frame, parts: tuple[Step, Step]) -> Step:
    slots = (factor, *step.inputs)
    call = bind_host(product.times, frame, slots)
    return replace(step, call=call, inputs=slots, outputs=parts[1].outputs, fused=parts)
