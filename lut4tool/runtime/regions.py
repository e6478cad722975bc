"""Regions: consecutive steps that mx.compile makes one function of, for shapes that come again.

Only a run can tell which steps may be compiled: those that read no value of the device, whatever their types, shapes
and attributes make them do. So the first run traces each step by itself. After it a region calls a function that was
compiled for the shapes and host values it is given, and runs step by step where there is none. Host values, which are
shapes and what is computed from them, are part of a function: shape arithmetic is done once.

A function runs the very operations that the steps would have called, in one call: results are the same bit for bit, and
no kernel is built. LUT4TOOL_COMPILE=fuse lets MLX fuse them into kernels of its own, which takes seconds a kernel on
CUDA and may round once where two operations round twice; LUT4TOOL_COMPILE=0 turns regions off.

What keeps memory and compilations bounded: a function is compiled when its shapes come a second time, twice as often
after every KEPT compilations; KEPT functions stay. Where the shapes of a few steps change from run to run, as in a
decoding loop, those between them become regions of their own.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lut4tool.kernels import decoded
from lut4tool.runtime import backend
from lut4tool.runtime.backend import BackendError, mx
from lut4tool.runtime.binding import Frame
from lut4tool.runtime.dtypes import on_host
from lut4tool.runtime.graph import DROPPED, Line, Step, execute, line
from lut4tool.runtime.plan import Plan

SWITCH, SWITCHES = "LUT4TOOL_COMPILE", ("0", "1", "fuse")
#: Functions that a region keeps: the least recently used goes first.
KEPT = 16
#: Bytes that the functions of a region may hold in arrays of their own, such as masks made of shapes.
KEPT_BYTES = 1 << 28
#: Steps that a region has at least.
LEAST = 2
#: Different inputs whose number of calls a region remembers.
REMEMBERED = 16
#: A host value of at most so many bytes may be part of a function.
HOST_BYTES = 1024

#: What runs other graphs, whose captured values are no inputs of the step, and what draws random numbers.
_APART = {"If", "Loop", "Scan"}
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}

_ARRAY: Any = object()

#: The shape of each array that a region is given, and host values whole.
Key = tuple[Any, ...]


def install(plan: Plan) -> None:
    """Make regions of the steps of a plan on a GPU, unless a switch says no. Raises BackendError for a wrong switch."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in SWITCHES:
        raise BackendError(f"{SWITCH} is '{switch}'; it takes {', '.join(SWITCHES)}")
    fuse = switch == "fuse"
    if on_host() or switch == "0" or not backend.compiles() or not (fuse or backend.can_compile_unfused()):
        return
    make = partial(Region, plan.graph.frame, dynamic=frozenset(plan.dynamic), fuse=fuse)
    for graph in plan.graphs():
        marks = [_may_be_compiled(plan, step, fuse) for step in graph.steps]
        graph.lines = _grouped(graph.steps, marks, make)


class Region:
    """Consecutive steps of a graph. Calling it runs them on the graph's frame; an error names the node that failed.

    dynamic: the slots of the frame that steps write; fuse: MLX may fuse their operations; traced: all the steps are
    known to be ones that can be compiled.
    """

    def __init__(
        self, frame: Frame, steps: Sequence[Step], *, dynamic: frozenset[int], fuse: bool = False, traced: bool = False
    ) -> None:
        self.steps = tuple(steps)
        #: None where the steps could not be compiled for what the key stands for.
        self.functions: OrderedDict[Key, _Function | None] = OrderedDict()
        self.compilations = 0
        #: What runs where no function does: the steps, or smaller regions.
        self.lines: Sequence[Line] = [line(step) for step in self.steps]
        #: Whether all its steps may be compiled; None before the first run.
        self.whole = True if traced else None
        self._frame, self._dynamic, self._fuse = frame, dynamic, fuse
        written = {slot for step in self.steps for slot in step.outputs}
        read = dict.fromkeys(slot for step in self.steps for slot in step.inputs if slot in dynamic)
        freed = {slot for step in self.steps for slot in step.free}
        self._inputs = tuple(slot for slot in read if slot not in written)
        self._outputs = tuple(sorted(written - freed))
        self._freed = tuple(sorted(freed - written))
        self._calls: OrderedDict[Key, int] = OrderedDict()
        self._misses = 0
        self._parts: dict[tuple[Step, ...], Region] = {}
        self._record: list[Key | None] = []

    def __call__(self) -> tuple[()]:
        """Run the steps; results are in the frame. Raises NodeError."""
        if self.whole is None:
            self._first_run()
        elif not self.whole or not self._run_function():
            self._run_lines()
        return ()

    def serving(self) -> list[tuple[Step, ...]]:
        """The steps of each region that serves, or may: one never compiled as a whole gives way to its parts."""
        parts = [steps for part in _regions(self.lines) for steps in part.serving()]
        if any(self.functions.values()) or (self.whole is not False and not parts):
            return [self.steps]
        return parts

    # -- compiled

    def _run_function(self) -> bool:
        """Run a function for what is in the frame; False where there is none."""
        values = [self._frame[slot] for slot in self._inputs]
        key = _key(values)
        if key is None:
            return False
        new = key not in self.functions
        if new and not self._comes_again(key):
            return False
        function = self._keep(key, values) if new else self.functions[key]
        if function is None:
            return False
        try:
            results = function(values)
        except Exception:  # noqa: BLE001 - step by step the same error, if it is one of the model, names its node
            self.functions[key] = results = None
        if new:
            self._trim()
        else:
            self.functions.move_to_end(key)
        self._put(self._inputs, values)  # a function that is traced has moved them
        if results is None:
            return False
        for slot in self._freed:
            self._frame[slot] = None
        self._put(self._outputs, results)
        return True

    def _put(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self._frame[slot] = value

    def _comes_again(self, key: Key) -> bool:
        count = self._calls.pop(key, 0) + 1
        self._calls[key] = count
        if len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)
        return count >= 2 << self.compilations // KEPT

    def _keep(self, key: Key, values: Sequence[Any]) -> _Function:
        function = _Function(self._frame, self.steps, self._inputs, self._outputs, values, self._fuse)
        self.compilations += 1
        self.functions[key] = function
        self._calls.pop(key, None)
        return function

    def _trim(self) -> None:
        """Let the functions go that were used longest ago, until few are left and they hold little."""
        held = sum(function.nbytes for function in self.functions.values() if function is not None)
        while len(self.functions) > KEPT or (held > KEPT_BYTES and len(self.functions) > 1):
            _, function = self.functions.popitem(last=False)
            held -= function.nbytes if function is not None else 0

    # -- step by step

    def _first_run(self) -> None:
        """Run step by step, and find out which steps may be compiled."""
        key = _key([self._frame[slot] for slot in self._inputs])
        marks = []
        for step in self.steps:
            call, single, several, _, _ = line(step)
            execute(self._frame, [(call, single, several, (), step)])
            marks.append(_is_traceable(self._frame, step, self._dynamic))
            for slot in step.free:
                self._frame[slot] = None
        self.whole = all(marks)
        if self.whole and key is not None:
            self._comes_again(key)
        if not self.whole:
            self.lines = _grouped(self.steps, marks, self._part)

    def _run_lines(self) -> None:
        """Run step by step, or in smaller regions; at the misses 2, 4, 8... look for those that could serve."""
        self._misses += 1
        again, next_again = (count & (count - 1) == 0 for count in (self._misses, self._misses + 1))
        if not self.whole or not (again or next_again):
            execute(self._frame, self.lines)
            return
        before, self._record = self._record, []
        for step in self.steps:
            self._record.append(_key([self._frame[slot] for slot in step.inputs if slot in self._dynamic]))
            execute(self._frame, [line(step)])
        if again and before:
            marks = [now is not None and now == then for then, now in zip(before, self._record, strict=True)]
            self.lines = _grouped(self.steps, marks, self._part)
            self._parts = {part.steps: part for part in _regions(self.lines)}

    def _part(self, steps: Sequence[Step]) -> Region:
        part = self._parts.get(tuple(steps))
        return part or Region(self._frame, steps, dynamic=self._dynamic, fuse=self._fuse, traced=True)


class _Function:
    """Steps compiled for inputs of the shapes, and with the host values, of `values`."""

    def __init__(
        self,
        frame: Frame,
        steps: Sequence[Step],
        inputs: Sequence[int],
        outputs: Sequence[int],
        values: Sequence[Any],
        fuse: bool,
    ) -> None:
        self._arrays = [place for place, value in enumerate(values) if type(value) is mx.array]
        slots = [inputs[place] for place in self._arrays]
        hosts = [(slot, value) for slot, value in zip(inputs, values, strict=True) if type(value) is not mx.array]
        results: list[Any] = [_ARRAY] * len(outputs)  # those on the host; the others are what the function returns
        #: Bytes of the arrays that the tracing made, about: others may make some meanwhile.
        self.nbytes = 0
        lines, traced = [line(step) for step in steps], list[int]()

        def trace(*arrays: mx.array) -> list[mx.array]:  # called once a thread that runs the function
            for slot, value in (*hosts, *zip(slots, arrays, strict=True)):
                frame[slot] = value
            before = mx.get_active_memory()
            try:
                with decoded.one_run():
                    execute(frame, lines)
                found = [frame[slot] for slot in outputs]
            finally:
                for step in steps:
                    for slot in step.outputs:
                        frame[slot] = None
                traced.append(max(0, mx.get_active_memory() - before))
                if not fuse:  # whether it fuses, MLX asks when the tracing is over
                    backend.set_fusing(False)
            results[:] = [_ARRAY if type(value) is mx.array else value for value in found]
            return [value for value in found if type(value) is mx.array]

        self._results, self._traced, self._fuse = results, traced, fuse
        self._compiled = mx.compile(trace)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        try:
            arrays = iter(self._compiled(*[values[place] for place in self._arrays]))
        finally:
            if self._traced:
                self.nbytes = self._traced.pop()
                if not self._fuse:
                    backend.set_fusing(True)
        return [next(arrays) if value is _ARRAY else value for value in self._results]


def _may_be_compiled(plan: Plan, step: Step, fuse: bool) -> bool:
    """Whether a step may be in a region as far as its operator tells."""
    # Where a product and a sum are rounded once, compensated sums are wrong.
    choice = plan.kernels.get(step.name) if fuse else None
    return step.operator.name not in _APART | _RANDOM and (choice is None or choice.backend != "reference")


def _grouped(steps: Sequence[Step], marks: Sequence[bool], region: Callable[[Sequence[Step]], Region]) -> list[Line]:
    """The lines of steps, each run of at least LEAST that are marked as one region."""
    lines, start = [], 0
    while start < len(steps):
        stop = start
        while stop < len(steps) and marks[stop]:
            stop += 1
        if stop - start < LEAST:
            lines.append(line(steps[start]))
            start += 1
        else:
            lines.append((region(steps[start:stop]), -1, (), (), None))
            start = stop
    return lines


def _regions(lines: Sequence[Line]) -> list[Region]:
    return [call for call, *_ in lines if isinstance(call, Region)]


def _key(values: Sequence[Any]) -> Key | None:
    """What tells whether a function fits: shapes of arrays (types never change), host values; None where none can."""
    parts: list[Any] = []
    for value in values:
        if type(value) is mx.array:
            parts.append(value.shape)
        elif type(value) is np.ndarray and value.nbytes <= HOST_BYTES and not value.dtype.hasobject:
            parts.append((value.dtype, value.shape, value.tobytes()))
        elif value is None:
            parts.append(None)
        else:
            return None
    return tuple(parts)


def _is_traceable(frame: Frame, step: Step, dynamic: frozenset[int]) -> bool:
    """Whether a step that has just run, its inputs and results still in the frame, works on values yet to be known."""
    slots = [slot for slot in dict.fromkeys(step.inputs) if slot in dynamic]
    values = [frame[slot] for slot in (*slots, *step.outputs) if slot != DROPPED]
    if not all(value is None or isinstance(value, mx.array | np.ndarray) for value in values):
        return False
    places = [slot for slot in slots if isinstance(frame[slot], mx.array)]
    arrays = [frame[slot] for slot in places]

    def trace(*given: mx.array) -> list[mx.array]:
        for slot, value in zip(places, given, strict=True):
            frame[slot] = value
        with decoded.one_run():
            result = step.call()
        return [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, mx.array)]

    try:
        mx.compile(trace)(*arrays)
    except Exception:  # noqa: BLE001 - whatever it is, the step has just run without it
        return False
    finally:
        for slot, value in zip(places, arrays, strict=True):
            frame[slot] = value
    return True
