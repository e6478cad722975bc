"""A model's plan: the steps to run, with every operator, attribute, constant and slot resolved before anything runs.

All values of a run lie in one list, the frame; a step reads and writes fixed slots of it. Subgraphs write to slots of
the same frame, so that a captured value is just a slot, and model-local functions are inlined into the graph that calls
them. Slot 0 is always None: an absent input. Slot 1 takes outputs that nobody wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx

from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN
from lut4tool.runtime import registry
from lut4tool.runtime.backend import mx
from lut4tool.runtime.binding import Call, Frame, bind, bind_either
from lut4tool.runtime.dtypes import to_mx
from lut4tool.runtime.registry import Operator, Unsupported
from lut4tool.storage import StorageError, Tensors

ABSENT, DROPPED = 0, 1

#: Constants of at most this many elements are also kept on the host, where shape arithmetic runs.
SMALL = 64


class RunError(Lut4Error):
    """Wrong feeds, or a node that failed while running; the text names it."""


class NodeError(RunError):
    """A node that failed while running; raised once, by the graph that holds the node."""


@dataclass(frozen=True)
class Step:
    """One node, ready to run: `call` reads the frame; results go to `outputs`; then the slots in `free` are dropped."""

    name: str
    operator: Operator
    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """What a planned operator sees of its node: subgraphs are callables, constants NumPy arrays (None: not constant)."""

    name: str
    op_type: str
    domain: str
    version: int
    attributes: Mapping[str, Any]
    constants: tuple[np.ndarray | None, ...]
    outputs: int
    device: mx.Device
    note: Callable[[Any], None]


class Constant:
    """An initializer or a Constant node's value: a NumPy array, and an mx.array made once where a step wants one."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.asarray(array).view(np.ndarray)
        self.slots: dict[str, int] = {}


@dataclass(eq=False)
class Value:
    """What a name stands for: a slot that steps write, or a constant."""

    slot: int = ABSENT
    constant: Constant | None = None


class Graph:
    """A planned graph or subgraph: call it with its inputs, get the list of its outputs."""

    def __init__(self, frame: Frame, inputs: Sequence[int], outputs: Sequence[int], steps: Sequence[Step], own: set[int]):
        self.frame, self.inputs, self.outputs, self.steps = frame, tuple(inputs), tuple(outputs), tuple(steps)
        self.own = tuple(own)
        self._kept = tuple(slot for slot in dict.fromkeys(outputs) if slot in own)
        self._program = tuple(
            (step.call, step.outputs[0] if len(step.outputs) == 1 else -1, step.outputs, step.free) for step in steps
        )

    def __call__(self, *values: Any) -> list[Any]:
        if len(values) != len(self.inputs):
            raise RunError(f"a subgraph takes {len(self.inputs)} inputs, not {len(values)}")
        frame, index = self.frame, 0
        for slot, value in zip(self.inputs, values, strict=True):
            frame[slot] = value
        try:
            for index, (call, one, several, free) in enumerate(self._program):  # noqa: B007 - the except names it
                result = call()
                if one >= 0:
                    frame[one] = result[0] if type(result) is tuple else result
                else:
                    if type(result) is not tuple or len(result) < len(several):
                        raise RunError(f"{len(several)} outputs are asked for and not all were computed")
                    for slot, value in zip(several, result, strict=False):
                        frame[slot] = value
                for slot in free:
                    frame[slot] = None
        except NodeError:
            raise
        except Exception as error:
            step = self.steps[index]
            raise NodeError(f"node '{step.name}' ({step.operator.name}) failed: {_sentence(error)}") from error
        results = [frame[slot] for slot in self.outputs]
        for slot in self._kept:
            frame[slot] = None
        return results


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Lut4Error) else f"{type(error).__name__}: {text}"


class Scope:
    """Names seen by the nodes of one graph or function body; a subgraph sees its parent's."""

    def __init__(self, path: str = "", parent: Scope | None = None) -> None:
        self.path, self.parent = path, parent
        self.values: dict[str, Value] = {}

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        return None


@dataclass
class Block:
    """A graph under construction: its steps, the slots it owns, and every slot it reads, captured ones included."""

    steps: list[Step] = field(default_factory=list)
    reads: list[set[int]] = field(default_factory=list)
    own: set[int] = field(default_factory=set)

    def finish(self, frame: Frame, inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
        """Say for each step what nobody reads after it."""
        kept, steps = set(outputs), []
        for step, reads in zip(reversed(self.steps), reversed(self.reads), strict=True):
            last = ((reads | set(step.outputs)) & self.own) - kept
            kept |= reads
            steps.append(Step(step.name, step.operator, step.call, step.inputs, step.outputs, tuple(sorted(last))))
        return Graph(frame, inputs, outputs, steps[::-1], self.own)


@dataclass(frozen=True)
class Context:
    """What the nodes of one body are read with: opset versions by domain, and the attributes of the function's call."""

    versions: Mapping[str, int]
    attributes: Mapping[str, onnx.AttributeProto] | None = None


@dataclass(frozen=True)
class Plan:
    """A model ready to run: its graph, its frame, its inputs' slots and defaults, and the kernels chosen."""

    graph: Graph
    frame: Frame
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    defaults: Mapping[str, np.ndarray]
    kernels: Mapping[str, Any]

    def clear(self) -> None:
        """Drop what a failed run left in the frame."""
        for graph in self.graphs():
            for slot in graph.own:
                self.frame[slot] = None

    def graphs(self) -> Iterable[Graph]:
        """The main graph (subgraphs are reached through their steps' calls)."""
        return (self.graph,)


def plan(model: onnx.ModelProto, device: mx.Device, base_dir: str | None = None) -> Plan:
    """Plan a model for a device; raises Unsupported with every problem of the whole model in one report."""
    registry.load()
    return Planner(model, device, Tensors(base_dir)).plan()


class Planner:
    """Turns a ModelProto into a Plan, collecting problems on the way."""

    def __init__(self, model: onnx.ModelProto, device: mx.Device, tensors: Tensors) -> None:
        self.model, self.device, self.tensors = model, device, tensors
        self.frame: Frame = [None, None]
        self.problems: list[str] = []
        self.kernels: dict[str, Any] = {}
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}

    def plan(self) -> Plan:
        graph = self.model.graph
        context = Context({_domain(entry.domain): entry.version for entry in self.model.opset_import})
        scope, block = Scope(), Block()
        given = {value.name for value in graph.input}
        overridable = given if self.model.ir_version >= 4 else set()
        names = {tensor.name for tensor in graph.initializer}
        inputs = tuple(value for value in graph.input if value.name in overridable or value.name not in names)
        slots = [self.declare(value.name, scope, block) for value in inputs]
        defaults = self.initializers(graph, scope, overridable)
        self.nodes(graph.node, scope, block, context)
        outputs = [self.output(value.name, scope) for value in graph.output]
        if self.problems:
            raise Unsupported(_report(self.problems))
        return Plan(block.finish(self.frame, slots, outputs), self.frame, inputs, tuple(graph.output), defaults, self.kernels)

    # -- names and slots

    def slot(self, value: Any = None) -> int:
        self.frame.append(value)
        return len(self.frame) - 1

    def declare(self, name: str, scope: Scope, block: Block) -> int:
        """A new slot for a name that a graph input or a node defines."""
        if name in scope.values:
            self.problems.append(f"the name '{scope.path}{name}' is defined twice")
        slot = self.slot()
        block.own.add(slot)
        scope.values[name] = Value(slot)
        return slot

    def constant_slot(self, constant: Constant, where: str) -> int:
        """The slot that holds a constant's NumPy array ("host") or its mx.array ("mlx"), made once."""
        if where not in constant.slots:
            with mx.stream(self.device):
                value = constant.array if where == "host" else to_mx(constant.array)
                if isinstance(value, mx.array):
                    mx.eval(value)
            constant.slots[where] = self.slot(value)
        return constant.slots[where]

    def place(self, value: Value, host: bool) -> int:
        """The slot to read a value from, a constant in the form that is wanted."""
        return value.slot if value.constant is None else self.constant_slot(value.constant, "host" if host else "mlx")

    def output(self, name: str, scope: Scope) -> int:
        value = scope.find(name)
        if value is None:
            self.problems.append(f"graph output '{scope.path}{name}' is computed by no node")
            return ABSENT
        return self.place(value, host=value.constant is not None and value.constant.array.size <= SMALL)

    def initializers(self, graph: onnx.GraphProto, scope: Scope, overridable: set[str]) -> dict[str, np.ndarray]:
        """Define a graph's initializers; return the arrays of those that are inputs' defaults."""
        defaults: dict[str, np.ndarray] = {}
        for tensor in graph.initializer:
            if tensor.name in overridable:
                defaults[tensor.name] = self.tensors.array(tensor)
            elif tensor.name in scope.values:
                self.problems.append(f"the name '{scope.path}{tensor.name}' is defined twice")
            else:
                scope.values[tensor.name] = Value(constant=Constant(self.tensors.array(tensor)))
        return defaults

    # -- nodes

    def nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope, block: Block, context: Context) -> None:
        for node in nodes:
            self.node(node, scope, block, context)

    def node(self, node: onnx.NodeProto, scope: Scope, block: Block, context: Context) -> None:
        name = scope.path + (node.name or f"{node.op_type}:{next((o for o in node.output if o), '')}")
        inputs = [self.input(wanted, name, scope) for wanted in node.input]
        domain = _domain(node.domain)
        version = context.versions.get(domain, 1)
        row = registry.find(domain, node.op_type, version)
        if row is None:
            self.problems.append(f"node '{name}': {domain or 'ai.onnx'}::{node.op_type} version {version} is not supported")
            for output in filter(None, node.output):
                self.declare(output, scope, block)
            return
        self.step(node, name, row, version, inputs, scope, block, context)

    def input(self, wanted: str, name: str, scope: Scope) -> Value:
        if not wanted:
            return Value()
        value = scope.find(wanted)
        if value is None:
            self.problems.append(f"node '{name}' reads '{wanted}', which nothing before it defines")
            return Value()
        return value

    def step(
        self, node: onnx.NodeProto, name: str, row: Operator, version: int, inputs: list[Value], scope: Scope, block: Block, context: Context
    ) -> None:  # fmt: skip
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        host = frozenset(row.host)
        run: Callable[..., Any] = partial(row.run, **attributes) if attributes else row.run
        slots = [self.place(value, host=index in host or _small(value) and row.takes_xp) for index, value in enumerate(inputs)]
        if row.takes_xp:
            device_slots = [self.place(value, host=index in host) for index, value in enumerate(inputs)]
            call = bind_either(run, self.frame, slots, device_slots, host)
        else:
            call = bind(run, self.frame, slots, host)
        outputs = tuple(self.declare(output, scope, block) if output else DROPPED for output in node.output)
        block.steps.append(Step(name, row, call, tuple(slots), outputs))
        block.reads.append(set(slots))


def _small(value: Value) -> bool:
    return value.constant is not None and value.constant.array.size <= SMALL


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _report(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    return unique[0] if len(unique) == 1 else "\n".join([f"the model cannot run, for {len(unique)} reasons:", *unique])
