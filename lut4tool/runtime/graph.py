"""A planned graph, ready to run: steps over one list of values, the frame.

A step reads and writes fixed slots of the frame. Subgraphs share their parent's frame, so a captured value is just a
slot. Slot 0 (ABSENT) is always None: an input that is left out. Slot 1 (DROPPED) takes outputs that nobody wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from lut4tool.errors import Lut4Error
from lut4tool.runtime.binding import Call, Frame
from lut4tool.runtime.registry import Operator

ABSENT, DROPPED = 0, 1


#: Built-in errors whose text is a sentence: of operators here, NumPy and MLX.
_SENTENCES = (ValueError, IndexError, TypeError, RuntimeError)


class RunError(Lut4Error):
    """Wrong feeds, or a node that failed while running; the text names it."""


class NodeError(RunError):
    """A node that failed while running, named by the graph that holds it."""


@dataclass(frozen=True)
class Step:
    """One node: `call` reads the frame; its results go to `outputs`; then the slots in `free` are emptied.

    inputs: the slots it reads, as its node lists them; host: it computes on the host on any device; shape: so it does
    because all of them are shapes and small constants, which stay there. fused: the steps of the other nodes whose
    work it does (see fusion.py).
    """

    name: str
    operator: Operator
    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()
    host: bool = False
    shape: bool = False
    fused: tuple[Step, ...] = ()


#: What runs a step: its call, the slot of a single result or -1, the slots of its results, those to empty, the step.
#: What runs several, a region (see regions.py), writes the frame itself, names the node that fails and has no step.
Line = tuple[Call, int, tuple[int, ...], tuple[int, ...], Step | None]


def line(step: Step, call: Call | None = None) -> Line:
    """The line of a step, with another call in the place of its own."""
    single = step.outputs[0] if len(step.outputs) == 1 else -1
    return call or step.call, single, step.outputs, step.free, step


def execute(frame: Frame, lines: Sequence[Line]) -> None:
    """Run lines in their order. Raises NodeError for the node that fails, by its name."""
    ndarray, step = np.ndarray, None
    try:
        for call, single, several, free, step in lines:  # noqa: B007 - the step is read by the except
            result = call()
            if single < 0:
                _spread(frame, several, result)
            else:
                frame[single] = result if type(result) is ndarray else _one(result)
            for slot in free:
                frame[slot] = None
    except NodeError:
        raise
    except Exception as error:
        if step is None:
            raise
        raise failure(step, error) from error


def failure(step: Step, error: Exception) -> NodeError:
    """What is raised for a step whose operator raised an error."""
    return NodeError(f"node '{step.name}' ({step.operator.name}) failed: {_sentence(error)}")


class Graph:
    """A graph or subgraph: call it with its inputs (as many as `inputs`), get the list of its outputs.

    types: the declared type of each output; captured: slots of outer graphs that it reads; lines: what a run executes,
    one for each step unless a region has taken several.
    """

    def __init__(
        self,
        frame: Frame,
        inputs: Sequence[int],
        outputs: Sequence[int],
        steps: Sequence[Step],
        own: AbstractSet[int],
        captured: AbstractSet[int] = frozenset(),
        types: Sequence[onnx.TypeProto] = (),
    ) -> None:
        self.frame, self.steps, self.captured, self.types = frame, tuple(steps), captured, tuple(types)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._emptied = tuple(slot for slot in dict.fromkeys((*self.outputs, *self.inputs)) if slot in own)
        self.watch(lambda step: step.call)

    def regions(self) -> list[tuple[Step, ...]]:
        """The steps of each region that serves a run, or before the first run may."""
        several: list[Any] = [call for call, *_, step in self.lines if step is None]
        return [steps for region in several for steps in region.serving()]

    def watch(self, calls: Callable[[Step], Call]) -> None:
        """Run what `calls` gives for each step in the place of its call (a profile's way in)."""
        self.lines: Sequence[Line] = tuple(line(step, calls(step)) for step in self.steps)

    def __call__(self, *values: Any) -> list[Any]:
        """Run the steps. Raises NodeError for the node that fails, by its name."""
        if len(values) != len(self.inputs):
            raise RunError(f"its subgraph takes {len(self.inputs)} inputs, not {len(values)}")
        frame = self.frame
        for slot, value in zip(self.inputs, values, strict=True):
            frame[slot] = value
        execute(frame, self.lines)
        results = [frame[slot] for slot in self.outputs]
        for slot in self._emptied:
            frame[slot] = None
        return results


def _spread(frame: Frame, slots: Sequence[int], result: Any) -> None:
    """Store the results of a node with several outputs (or none)."""
    if type(result) is not tuple or len(result) < len(slots):
        raise RunError(f"{len(slots)} outputs are asked for, not all of which the operator computes")
    for slot, value in zip(slots, result, strict=False):
        frame[slot] = np.asarray(value) if isinstance(value, np.generic) else value


def _one(result: Any) -> Any:
    """The first of an operator's results; NumPy's scalars become arrays of rank 0."""
    value = result[0] if type(result) is tuple else result
    return np.asarray(value) if isinstance(value, np.generic) else value


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"{text} is no value that it knows"
    if text and (isinstance(error, Lut4Error) or type(error) in _SENTENCES):
        return text
    return f"{type(error).__name__}: {text}"
