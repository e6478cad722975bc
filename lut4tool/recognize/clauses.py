"""Clauses that the chains share: the steps between a weight's landmarks, their shapes, and what casts mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lut4tool.formats import DTYPE_NAME
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.walk import Literal, Place, Value, attribute, type_name

Shape = tuple[int, ...]


class Step(NamedTuple):
    """One node that moves or casts elements, and what it says.

    said: a Cast's type, a Reshape's target, a Slice's end, a Transpose's perm, an Unsqueeze's axes.
    """

    op: str
    place: Place
    said: Any


def steps_before(trail: Trail, value: Value, at: Place, *ops: str) -> tuple[list[Step], Value, Place]:
    """Walk back over every node of these operators: (the steps in the order they are computed, value before, node)."""
    steps = []
    while (op := trail.op_type(value)) in ops:
        at = trail.node(value, op, at, *_FREE.get(op, ()))
        steps.append(Step(op, at, _SAID[op](trail, at)))
        value = trail.input(at, 0)
    return steps[::-1], value, at


def _slice_end(trail: Trail, cut: Place) -> Literal:
    """The end of a Slice [0 : end] of the only axis."""
    start, end = trail.literal(cut, 1), trail.literal(cut, 2)
    axes, steps = trail.literal(cut, 3, absent=(0,)), trail.literal(cut, 4, absent=(1,))
    cut.require(start.is_list(0), "Slice from {}, not from [0]", start)
    cut.require(end.dims == (1,), "Slice to {}, not to [rows * cols]", end)
    cut.require((axes.values, axes.dims) in (((0,), (1,)), ((-1,), (1,))), "Slice on axes {}, not [0]", axes)
    cut.require(steps.is_list(1), "Slice with steps {}, not [1]", steps)
    return end


# allowzero, which PyTorch's exporter writes, speaks of zeros in a target: affine.py takes none, _reshaped reads it.
_FREE = {"Cast": ("to",), "Reshape": ("allowzero",), "Transpose": ("perm",)}
_SAID = {
    "Cast": lambda trail, at: attribute(at, "to"),
    "Reshape": lambda trail, at: trail.literal(at, 1),
    "Slice": _slice_end,
    "Transpose": lambda trail, at: attribute(at, "perm"),
    "Unsqueeze": lambda trail, at: trail.literal(at, 1),
}


def shaped(shape: Shape, steps: Sequence[Step], targets: dict[str, Shape] | None = None) -> Shape:
    """The shape after steps that keep the flat order of elements: Cast, Reshape, Unsqueeze, Slice. Raises Refuse.

    targets: gets what each Reshape makes, by its output.
    """
    for step in steps:
        if step.op == "Reshape":
            shape = _reshaped(shape, step.place, step.said)
            if targets is not None:
                targets[step.place.node.output[0]] = shape
        elif step.op == "Unsqueeze":
            shape = _unsqueezed(shape, step.place, step.said)
        elif step.op == "Slice":
            step.place.require(len(shape) == 1, "Slice of a value of shape {}, not of flat elements", list(shape))
            (said,), (size,) = step.said.values, shape
            end = min(said, size) if said >= 0 else size + said  # beyond the last, as exporters write "all": the last
            step.place.require(end > 0, f"Slice to [{said}] of {size} elements, not to 1 to {size}")
            shape = (end,)
    return shape


def _reshaped(shape: Shape, place: Place, target: Literal) -> Shape:
    place.require(len(target.dims) == 1, "Reshape to {}, not to a list of dimensions", target)
    dims, size = list(target.values), math.prod(shape)
    if 0 in dims and not attribute(place, "allowzero", 0):  # a zero stands for the dimension that is there
        dims = [shape[at] if dim == 0 and at < len(shape) else dim for at, dim in enumerate(dims)]
    fits = all(dim > 0 or dim == -1 for dim in dims) and dims.count(-1) <= 1
    rest = math.prod(dim for dim in dims if dim > 0)
    place.require(fits and size % rest == 0, "Reshape of {} elements to {}, which they do not fill", size, target)
    place.require(-1 in dims or size == rest, "Reshape of {} elements to {}, which they do not fill", size, target)
    return tuple(size // rest if dim == -1 else dim for dim in dims)


def _unsqueezed(shape: Shape, place: Place, axes: Literal) -> Shape:
    last = len(shape)
    place.require(axes.is_one(*range(-last - 1, last + 1)), "Unsqueeze on axes {} of shape {}", axes.one, list(shape))
    axis = axes.values[0] % (last + 1)
    return (*shape[:axis], 1, *shape[axis:])


def turned(steps: Sequence[Step]) -> tuple[list[Step], tuple[int, int]]:
    """Split the Transposes of a matrix from the steps before them: (the other steps, perm). Raises Refuse."""
    perm, kept = (0, 1), []
    for step in steps:
        if step.op == "Transpose":
            said = [1, 0] if step.said is None else step.said
            step.place.require(said == [1, 0], f"Transpose with perm {said}, not [1, 0]")
            perm = (perm[1], perm[0])
        elif step.op == "Cast" or perm == (0, 1):
            kept.append(step)
        else:
            step.place.refuse(f"{step.op} after a Transpose, not before it")
    return kept, perm


def rounded(dtype: str, steps: Sequence[Step]) -> tuple[str, str]:
    """What Casts make of exact products that are rounded to `dtype`: (weight_dtype, dtype). Raises Refuse.

    A Cast to float16 or bfloat16 rounds float32 products; one to float32 is exact. Nothing is rounded twice.
    """
    weight_dtype = dtype
    for step in steps:
        if step.op != "Cast":
            continue
        to = DTYPE_NAME.get(step.said)
        if to is None:
            step.place.refuse(f"Cast of the weight to {type_name(step.said)}, not FLOAT16, BFLOAT16 or FLOAT")
        step.place.require(
            weight_dtype in ("float32", to) or to == "float32",
            f"Cast of the weight to {type_name(step.said)} over {weight_dtype}, which would round it twice",
        )
        weight_dtype, dtype = to if weight_dtype == "float32" else weight_dtype, to
    return weight_dtype, dtype
