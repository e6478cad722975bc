"""Clauses that the chains share: the steps between a weight's landmarks, their shapes, and what casts mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from onnx import TensorProto

from lut4tool.formats import DTYPE_NAME
from lut4tool.recognize.trail import Trail
from lut4tool.recognize.view import Shape, View, broadcast
from lut4tool.recognize.walk import Argument, Constant, Literal, Place, Value, attribute, type_name

#: Operators that move elements or repeat them.
MOVES = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Slice", "Expand", "Tile")


@dataclass(eq=False)
class Leaves:
    """The constants that a chain reads as data."""

    trail: Trail
    held: dict[str, tuple[Constant, Value, Place]] = field(default_factory=dict)
    reads: int = 0

    def read(self, value: Value, at: Place, what: str, types: frozenset[int], kinds: str) -> Constant:
        """A constant of one of these types, and of one shape without zeros."""
        if self.trail.op_type(value) not in ("initializer", "input", "Constant"):
            self.trail.refuse(value, at, f"a constant of {what}")
        found = self.trail.walk.constant(value, at)
        found_types, shapes = found.types, found.shapes
        at.require(found_types <= types, "{} {} is not {}", what, found, kinds)
        at.require(len(found_types) == 1, "{} {} is not of one type", what, found)
        at.require(len(shapes) == 1, "{} {} is not of one shape", what, found)
        at.require(all(map(all, shapes)), "{} {} is empty", what, found)
        self.held[found.name] = found, value, at
        self.reads += 1
        return found

    def floats(self, value: Value, at: Place, what: str) -> Constant:
        """A constant of a float type that a weight can have."""
        return self.read(value, at, what, frozenset(DTYPE_NAME), "FLOAT, FLOAT16 or BFLOAT16")

    def require_fixed(self, sources: Sequence[str]) -> None:
        """Refuse to lay out, in a function, what its callers give: several tensors, or external data."""
        for name in sources:
            found, value, at = self.held[name]
            formal = isinstance(self.trail.walk.source(value, at).definition, Argument)
            apart = formal and any(tensor.data_location == TensorProto.EXTERNAL for tensor in found.tensors)
            at.require(not apart, "{} is external data that a call gives, which a function's Constant cannot be", found)
            one = len(found.tensors) == 1
            at.require(one, "{} is another tensor at each call; one is expected where bytes are laid out anew", found)

    @property
    def once(self) -> bool:
        """Whether each is read in one place only, so that it can be cut."""
        return self.reads == len(self.held)


class Seen(NamedTuple):
    """What a step with a target makes."""

    op: str
    view: View


class Step(NamedTuple):
    """One node that moves or casts elements, and what it says.

    said: a Cast's type, a target of Reshape or Expand, a Slice's end and axis, a Transpose's perm, axes, repeats.
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


def _slice_end(trail: Trail, cut: Place) -> tuple[int, int]:
    """The end and the axis of a Slice [0 : end] of one axis."""
    start, end = trail.literal(cut, 1), trail.literal(cut, 2)
    axes, steps = trail.literal(cut, 3, absent=(0,)), trail.literal(cut, 4, absent=(1,))
    cut.require(start.is_list(0), "Slice from {}, not from [0]", start)
    cut.require(end.dims == (1,), "Slice to {}, not to one end", end)
    cut.require(axes.dims == (1,), "Slice on axes {}, not on one", axes)
    cut.require(steps.is_list(1), "Slice with steps {}, not [1]", steps)
    return end.values[0], axes.values[0]


def _end(place: Place, said: int, size: int) -> int:
    """How many elements a Slice from 0 leaves of so many; an end beyond the last, as exporters write "all", is that."""
    end = min(said, size) if said >= 0 else size + said
    place.require(end > 0, f"Slice to [{said}] of {size} elements, not to 1 to {size}")
    return end


# allowzero, which PyTorch's exporter writes, speaks of zeros in a target, which _reshaped reads.
_FREE = {"Cast": ("to",), "Reshape": ("allowzero",), "Transpose": ("perm",)}
_SAID = {
    "Cast": lambda trail, at: attribute(at, "to"),
    "Reshape": lambda trail, at: trail.literal(at, 1),
    "Slice": _slice_end,
    "Transpose": lambda trail, at: attribute(at, "perm"),
    "Unsqueeze": lambda trail, at: trail.literal(at, 1),
    "Squeeze": lambda trail, at: trail.literal(at, 1, absent=()),
    "Expand": lambda trail, at: trail.literal(at, 1),
    "Tile": lambda trail, at: trail.literal(at, 1),
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
            axis = _new_axis(shape, step.place, step.said)
            shape = (*shape[:axis], 1, *shape[axis:])
        elif step.op == "Slice":
            end, axis = step.said
            step.place.require(axis in (0, -1), "Slice on axes {}, not [0]", [axis])
            step.place.require(len(shape) == 1, "Slice of a value of shape {}, not of flat elements", list(shape))
            shape = (_end(step.place, end, shape[0]),)
    return shape


def viewed(view: View, steps: Sequence[Step], seen: dict[str, Seen] | None = None) -> View:
    """The view after steps that move elements or repeat them, Casts passed. Raises Refuse.

    seen: gets what each step with a target makes, by its output.
    """
    for step in steps:
        place, said, shape = step.place, step.said, view.shape
        moved: View | None = view
        if step.op == "Reshape":
            moved = view.reshaped(_reshaped(shape, place, said))
        elif step.op == "Transpose":
            perm = said if said is not None else list(range(len(shape)))[::-1]
            place.require(sorted(perm) == list(range(len(shape))), f"Transpose with perm {perm} of shape {list(shape)}")
            moved = view.transposed(perm)
        elif step.op == "Unsqueeze":
            moved = view.with_axis(_new_axis(shape, place, said))
        elif step.op == "Squeeze":
            moved = view.transposed(_without(shape, place, said))
        elif step.op in ("Expand", "Tile"):
            moved = _repeated(view, step)
        elif step.op == "Slice":
            end, axis = said
            place.require(-len(shape) <= axis < len(shape), f"Slice on axis {axis} of shape {list(shape)}")
            moved = view.cut(axis % len(shape), _end(place, end, shape[axis]))
        if moved is None:
            place.refuse(f"{step.op} of elements that lie as {list(shape)}, which it would not keep in one piece")
        view = moved
        if seen is not None and step.op in ("Reshape", "Expand", "Tile"):
            seen[place.node.output[0]] = Seen(step.op, view)
    return view


def _repeated(view: View, step: Step) -> View | None:
    """Expand, or Tile of dimensions of 1; None where it is another one."""
    said, shape = step.said, view.shape
    step.place.require(len(said.dims) == 1, "{} to {}, not to a list", step.op, said)
    target = tuple(said.values)
    if step.op == "Tile":
        fits = len(target) == len(shape) and all(1 in pair for pair in zip(target, shape, strict=True))
        step.place.require(fits, f"Tile of shape {list(shape)} by {said}, not along dimensions of 1")
        target = tuple(times * size for times, size in zip(target, shape, strict=True))
    step.place.require(all(size > 0 for size in target), "{} to {}, not to positive sizes", step.op, said)
    common = broadcast(shape, target)
    return None if common is None else view.expanded(common)


def _without(shape: Shape, place: Place, axes: Literal) -> list[int]:
    """The axes that a Squeeze leaves."""
    fits = axes.is_one(*range(-len(shape), len(shape))) and shape[axes.values[0]] == 1
    place.require(fits, "Squeeze on axes {} of shape {}", axes.one, list(shape))
    return [axis for axis in range(len(shape)) if axis != axes.values[0] % len(shape)]


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


def _new_axis(shape: Shape, place: Place, axes: Literal) -> int:
    last = len(shape)
    place.require(axes.is_one(*range(-last - 1, last + 1)), "Unsqueeze on axes {} of shape {}", axes.one, list(shape))
    return axes.values[0] % (last + 1)


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
