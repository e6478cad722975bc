"""Fusion on a CPU: a convolution takes in the elementwise operators after it, and chains of those become one step.

A value is fused over only where nothing else can see it: one reader (or two, x and f(x) of x * f(x)), no graph output,
no subgraph. Constant factors and summands right after a convolution, BatchNormalization among them, are multiplied into
its weights and bias in float64. The fused step stands where its last node stood, so all that it reads is there.
Shapes are known at run time only: where an operand would broadcast otherwise than the native stages do, the nodes run
one after the other as they would have without fusion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from lut4tool.runtime import convolution
from lut4tool.runtime.binding import Frame, bind_host
from lut4tool.runtime.chains import CURRENT, SAVED, After, Chain, Link, elementwise, folded, link_of
from lut4tool.runtime.graph import Step
from lut4tool.runtime.ops.conv import REMEMBERED, PreparedConv
from lut4tool.runtime.scaling import fuse_scaling
from lut4tool.runtime.scope import Block, Planned

#: Nodes between x and the x * f(x) that ends them, at most.
DETOUR = 6
#: Operators whose result is a new array of float32, which a chain may be written over.
_FRESH = ("MatMul", "Gemm", "ConvTranspose")


def fuse(block: Block, frame: Frame, outputs: Sequence[int]) -> None:
    """Fuse the steps of a block whose graph returns the slots `outputs`."""
    fuse_scaling(block, frame, outputs)
    if not convolution.available():
        return
    follower = _Follower(block, frame, outputs)
    kept: list[tuple[Step, set[int], Planned | None]] = []
    for index in range(len(block.steps)):
        if index not in follower.taken:
            follower.follow(index)
    for index, (step, reads, planned) in enumerate(zip(block.steps, block.reads, block.planned, strict=True)):
        if index in follower.fused:
            whole = follower.fused[index]
            kept.append((whole, set(whole.inputs), None))
        elif index not in follower.taken:
            kept.append((step, reads, planned))
    block.steps[:], block.reads[:], block.planned[:] = map(list, zip(*kept, strict=True)) if kept else ([], [], [])


class _Follower:
    """Follows values from the steps that make them. taken: indices of steps that are part of a fused one."""

    def __init__(self, block: Block, frame: Frame, outputs: Sequence[int]) -> None:
        self.steps, self.planned, self.frame = block.steps, block.planned, frame
        self.taken: set[int] = set()
        self.fused: dict[int, Step] = {}  # by the index of its last node
        self.readers: dict[int, list[int]] = defaultdict(list)
        for index, reads in enumerate(block.reads):
            for slot in reads:
                self.readers[slot].append(index)
        for slot in outputs:
            self.readers[slot] += [-1, -1, -1]  # whoever runs the graph reads it

    def follow(self, index: int) -> None:
        """Fuse what begins at a step."""
        step, planned = self.steps[index], self.planned[index]
        if planned is None or len(step.outputs) != 1:
            return
        conv = planned.run if isinstance(planned.run, PreparedConv) else None
        if conv is not None and conv.kernels.packed:  # run while planning, for a result too large to keep
            return
        fresh = conv is not None or (step.operator.domain == "" and step.operator.name in _FRESH and planned.float32)
        draft = _Draft(step.outputs[0], index)
        if not fresh and not self._begin(draft, index):
            return
        while self._extend(draft):
            pass
        if conv is None and sum(bool(link.stages) for link in draft.links) < (1 if fresh else 2):
            return
        self.taken |= {index, *draft.members}
        self.fused[draft.last] = _step(step, planned, conv, draft, self.frame)

    def _begin(self, draft: _Draft, index: int) -> bool:
        """Make an elementwise step the first link of a chain on one of its inputs."""
        step = self.steps[index]
        if not elementwise(step):
            return False
        for slot in dict.fromkeys(step.inputs):
            link = self._link(index, slot, None, draft)
            if link is not None and not link.squeezes:
                draft.first = slot
                draft.take(link, index, step.outputs[0])
                return True
        return False

    def _extend(self, draft: _Draft) -> bool:
        """Take the step, or the steps from x to x * f(x), that alone read the chain's value."""
        users = sorted(self.readers[draft.slot])
        if len(users) == 1 and users[0] >= 0:
            link = self._link(users[0], draft.slot, None, draft)
            if link is not None:
                draft.take(link, users[0], self.steps[users[0]].outputs[0])
            return link is not None
        return len(users) == 2 and users[0] >= 0 and self._detour(draft, *users)

    def _detour(self, draft: _Draft, index: int, end: int) -> bool:
        trial, saved = draft.copy(), draft.slot
        while index != end and len(trial.links) - len(draft.links) < DETOUR:
            link = self._link(index, trial.slot, None, trial)
            if link is None:
                return False
            if link.squeezes or any(stage.name == "save" for stage in link.stages):
                return False
            if trial.slot == saved:
                link = replace(link, saves=True)
            trial.take(link, index, self.steps[index].outputs[0])
            users = self.readers[trial.slot]
            if len(users) != 1 or users[0] < 0:
                return False
            (index,) = users
        link = self._link(index, trial.slot, saved, trial) if index == end else None
        if link is None:
            return False
        trial.take(link, end, self.steps[end].outputs[0])
        draft.become(trial)
        return True

    def _link(self, index: int, slot: int, saved: int | None, draft: _Draft) -> Link | None:
        """A step as a link on the value in `slot`; what else it reads become operands of the draft."""
        step, planned = self.steps[index], self.planned[index]
        if planned is None or not elementwise(step) or index in self.taken or len(step.outputs) != 1:
            return None
        sources: list[Any] = []
        operands = list(draft.operands)
        for place, value in zip(step.inputs, planned.inputs, strict=True):
            if place == slot and value.constant is None:
                sources.append(CURRENT)
            elif place == saved:
                sources.append(SAVED)
            elif value.absent:
                sources.append(None)
            elif value.constant is not None:
                sources.append(value.constant.value)
            else:
                sources.append(len(operands))  # the native stages take them in their order
                operands.append(place)
        wanted = [CURRENT] if saved is None else [CURRENT, SAVED]
        if not all(any(source is mark for source in sources) for mark in wanted):
            return None
        link = link_of(step, planned, sources, sum(link.squeezes for link in draft.links))
        if link is not None:
            draft.operands = operands
        return link


@dataclass
class _Draft:
    """A chain in the making: the slot of its value, the index of its last step, and what it has taken."""

    slot: int
    last: int
    first: int | None = None  # the slot that the first link reads, where no product begins the chain
    links: list[Link] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)

    def take(self, link: Link, index: int, slot: int) -> None:
        self.links.append(link)
        self.members.append(index)
        self.slot, self.last = slot, index

    def copy(self) -> _Draft:
        return replace(self, links=list(self.links), operands=list(self.operands), members=list(self.members))

    def become(self, other: _Draft) -> None:
        self.__dict__.update(other.__dict__)


def _step(step: Step, planned: Planned, conv: PreparedConv | None, draft: _Draft, frame: Frame) -> Step:
    """The step that runs a draft whole, its product or its first elementwise node being `step`."""
    call: Callable[..., Any]
    if conv is not None:
        first, call = step.inputs[:1], FusedConv(conv, draft.links)
    elif draft.first is None:
        first, call = step.inputs, After(planned.run, len(step.inputs), Chain(draft.links))
    else:
        first, call = (draft.first,), Chain(draft.links)
    slots = (*first, *draft.operands)
    fused = tuple(link.step for link in draft.links if link.step is not step)
    outputs = fused[-1].outputs if fused else step.outputs
    return replace(step, call=bind_host(call, frame, slots), inputs=slots, outputs=outputs, fused=(*step.fused, *fused))


class FusedConv:
    """A convolution with constant weights and the chain on its result, the chain's first factors folded into them."""

    def __init__(self, conv: PreparedConv, links: Sequence[Link]) -> None:
        links, w, bias = folded(links, conv.kernels.w, conv.kernels.bias)
        self.conv = conv if w is conv.kernels.w else conv.with_weights(w, bias)
        self.chain = Chain(links)
        self._fits: dict[tuple[tuple[int, ...], ...], bool] = {}  # by the shapes of y and the operands

    def __call__(self, x: np.ndarray, *operands: np.ndarray) -> Any:
        """Convolve x [N, C, *size]; operands are the chain's."""
        placed, chain = self.conv.over(x.shape), self.chain
        shapes = (placed.shape, *[operand.shape for operand in operands])
        fits = self._fits.get(shapes)
        if fits is None:
            if len(self._fits) >= REMEMBERED:
                self._fits.clear()
            view = None if chain.points else chain.view(placed.shape, operands)
            fits = view is not None and prod(view[:2]) in (1, prod(placed.shape[:2]))  # not of rows
            self._fits[shapes] = fits
        if not fits:
            return chain.alone(placed(x), operands)
        return chain.squeezed(placed(x, chain.program, operands))
