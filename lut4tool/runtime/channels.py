"""Weights of convolutions on a GPU: laid out once with their channels last, as MLX's convolution reads them."""

from __future__ import annotations

from typing import Any

from lut4tool.runtime.backend import mx
from lut4tool.runtime.plan import Plan


def lay_out(plan: Plan) -> None:
    """Lay out the constant weights of a plan's Conv nodes; their values and shapes stay what they are."""
    frame, dynamic = plan.graph.frame, frozenset(plan.dynamic)
    for step in plan.steps():
        slot = step.inputs[1] if (step.operator.domain, step.operator.name) == ("", "Conv") else 0
        if slot not in dynamic and isinstance(frame[slot], mx.array) and frame[slot].ndim > 2:
            frame[slot] = _channels_last(frame[slot])


def _channels_last(weight: Any) -> Any:
    """The same [M, C / group, *kernel], in memory [M, *kernel, C / group]: moving the axis, MLX then copies nothing."""
    moved = mx.contiguous(mx.moveaxis(weight, 1, -1))
    mx.eval(moved)  # alone, so that what is made of it next is a view
    view = mx.moveaxis(moved, -1, 1)
    mx.eval(view)
    return view
