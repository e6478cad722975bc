"""A model's plan: every operator, attribute, constant and slot resolved, every problem found, before anything runs.

Model-local functions, and the standard's own bodies for operators that no row serves, are inlined into the graph that
calls them. A constant stays a NumPy array (a view of the file's map where it is external); an mx.array is made once where
a step wants one. Steps whose inputs are small constants run while planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto
from onnx.defs import OpSchema

from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN
from lut4tool.runtime import registry
from lut4tool.runtime.backend import mx
from lut4tool.runtime.binding import Call, Frame, bind, bind_either
from lut4tool.runtime.dtypes import to_mx, to_numpy
from lut4tool.runtime.functions import body_of, infer_types, schema_of
from lut4tool.runtime.graph import ABSENT, DROPPED, Graph, RunError, Step
from lut4tool.runtime.registry import Operator, Unsupported
from lut4tool.storage import Tensors

__all__ = ["Node", "Plan", "Planner", "RunError", "Unsupported", "plan"]

#: Constants of at most this many elements are host values, so that shape arithmetic stays on the host.
SMALL = 64
#: A step whose constant inputs, and whose results, have at most this many elements is run once, while planning.
FOLDED = 1 << 16


@dataclass(frozen=True)
class Node:
    """What a planned operator sees of its node.

    attributes: Python values, subgraphs as Graph (callables); constants: each input's NumPy array, None where it is not a
    constant; given: whether each input is there; outputs: how many; note: records a choice in the plan under the node.
    """

    name: str
    op_type: str
    domain: str
    version: int
    attributes: Mapping[str, Any]
    constants: tuple[np.ndarray | None, ...]
    given: tuple[bool, ...]
    outputs: int
    device: mx.Device
    note: Callable[[Any], None]


@dataclass(frozen=True)
class Plan:
    """A model ready to run.

    graph: the main graph, its inputs in the order of `inputs`; defaults: values of inputs that may be left out;
    subgraphs: every other graph, by the path of its node; kernels: what planned operators chose, by node.
    """

    graph: Graph
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    defaults: Mapping[str, Any]
    subgraphs: Mapping[str, Graph]
    kernels: Mapping[str, Any]
    dynamic: tuple[int, ...]

    def clear(self) -> None:
        """Empty the frame of what a failed run left there."""
        for slot in self.dynamic:
            self.graph.frame[slot] = None

    def steps(self) -> list[Step]:
        """Every step of the model, subgraphs' after the main graph's."""
        return [step for graph in (self.graph, *self.subgraphs.values()) for step in graph.steps]

    def describe(self) -> list[dict[str, str]]:
        """One row a step: node, op, where ("host", "mlx" or the kernel's name), and the refusals of other kernels."""
        rows = []
        for step in self.steps():
            choice = self.kernels.get(step.name)
            row = {"node": step.name, "op": f"{step.operator.domain or 'ai.onnx'}::{step.operator.name}"}
            row["where"] = choice.name if choice is not None else "host" if step.host else "mlx"
            if choice is not None:
                row["refused"] = "; ".join(f"{name}: {why}" for name, why in choice.refusals.items())
            rows.append(row)
        return rows


def plan(model: onnx.ModelProto, device: mx.Device, tensors: Tensors) -> Plan:
    """Plan a model for a device; `tensors` reads its weights.

    Raises Unsupported with every problem of the whole model in one report, StorageError for weights that cannot be read.
    """
    registry.load()
    with mx.stream(device), np.errstate(all="ignore"):
        return Planner(model, device, tensors).plan()


class Constant:
    """An initializer, a Constant node's value or a folded result: its NumPy array, and the slots of its two forms."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value) if isinstance(value, np.ndarray) else value
        self.slots: dict[str, int] = {}

    @property
    def size(self) -> int:
        return self.value.size if isinstance(self.value, np.ndarray) else 0

    @property
    def small(self) -> bool:
        return self.size <= SMALL


@dataclass(eq=False)
class Value:
    """What a name stands for: a slot that steps write, a constant, or neither: an absent input.

    host: known to be a host value; unknown: what defines it has a problem of its own.
    """

    slot: int = ABSENT
    constant: Constant | None = None
    host: bool = False
    unknown: bool = False

    @property
    def absent(self) -> bool:
        return self.slot == ABSENT and self.constant is None


class Scope:
    """The names that the nodes of one graph or function body see; a subgraph sees its parent's too."""

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
    """A graph under construction: its steps, all the slots each reads (by its subgraphs too), and the slots it owns."""

    steps: list[Step] = field(default_factory=list)
    reads: list[set[int]] = field(default_factory=list)
    own: set[int] = field(default_factory=set)

    def finish(
        self, frame: Frame, inputs: Sequence[int], outputs: Sequence[int], types: Sequence[onnx.TypeProto]
    ) -> Graph:
        """Find for each step the slots that nobody reads after it."""
        needed, steps = set(outputs), []
        for step, reads in zip(reversed(self.steps), reversed(self.reads), strict=True):
            last = ((reads | set(step.outputs)) & self.own) - needed
            needed |= reads
            steps.append(replace(step, free=tuple(sorted(last | ({DROPPED} & set(step.outputs))))))
        return Graph(frame, inputs, outputs, steps[::-1], self.own, needed - self.own - {ABSENT}, types)


@dataclass(frozen=True)
class Context:
    """How the nodes of one body are read: opset versions by domain, and the attributes of the function's call."""

    versions: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Planner:
    """Turns a ModelProto into a Plan, collecting the problems on the way."""

    def __init__(self, model: onnx.ModelProto, device: mx.Device, tensors: Tensors) -> None:
        self.model, self.device, self.tensors = model, device, tensors
        self.frame: Frame = [None, None]
        self.problems: dict[str, None] = {}  # an ordered set
        self.dynamic: list[int] = []
        self.kernels: dict[str, Any] = {}
        self.subgraphs: dict[str, Graph] = {}
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
        self.types: dict[str, onnx.TypeProto] | None = None

    def plan(self) -> Plan:
        graph, context = self.model.graph, Context(_versions(self.model.opset_import))
        initialized = {tensor.name for tensor in graph.initializer}
        old = self.model.ir_version < 4  # every initializer is listed as an input there, and none is one
        inputs = tuple(value for value in graph.input if not (old and value.name in initialized))
        defaults: dict[str, Any] = {}
        main = self.graph(graph, inputs, Scope(), context, defaults)
        if self.problems:
            raise Unsupported(_report(list(self.problems)))
        defaults = {name: to_mx(value) for name, value in defaults.items()}
        return Plan(main, inputs, tuple(graph.output), defaults, self.subgraphs, self.kernels, tuple(self.dynamic))

    def problem(self, text: str) -> None:
        self.problems[text] = None

    # -- names and slots

    def declare(self, name: str, scope: Scope, block: Block, host: bool = False) -> int:
        """A new slot for a name that an input or a node defines."""
        self.frame.append(None)
        slot = len(self.frame) - 1
        self.define(name, Value(slot, host=host), scope)
        self.dynamic.append(slot)
        block.own.add(slot)
        return slot

    def define(self, name: str, value: Value, scope: Scope) -> None:
        if name in scope.values:
            self.problem(f"the name '{scope.path}{name}' is defined twice")
        scope.values[name] = value

    def place(self, value: Value, host: bool) -> int:
        """The slot to read a value from; a constant's slot holds the wanted form: NumPy or MLX."""
        constant, form = value.constant, "host" if host else "mlx"
        if constant is None:
            return value.slot
        if form not in constant.slots:
            held = constant.value if host else to_mx(constant.value)
            if isinstance(held, mx.array):
                mx.eval(held)
            self.frame.append(held)
            constant.slots[form] = len(self.frame) - 1
        return constant.slots[form]

    # -- graphs

    def graph(
        self,
        graph: onnx.GraphProto,
        inputs: Sequence[onnx.ValueInfoProto],
        scope: Scope,
        context: Context,
        defaults: dict[str, Any],
    ) -> Graph:
        """Plan a graph; `defaults` receives the initializers that are inputs."""
        block = Block()
        slots = [self.declare(value.name, scope, block) for value in inputs]
        names = {value.name for value in inputs}
        for tensor in graph.initializer:
            if tensor.name in names:
                defaults[tensor.name] = self.tensors.array(tensor)
            else:
                self.define(tensor.name, Value(constant=Constant(self.tensors.array(tensor))), scope)
        for sparse in graph.sparse_initializer:
            self.define(sparse.values.name, Value(constant=Constant(self.dense(sparse))), scope)
        self.nodes(graph.node, scope, block, context)
        outputs = [self.output(value.name, scope) for value in graph.output]
        return block.finish(self.frame, slots, outputs, [value.type for value in graph.output])

    def subgraph(self, graph: onnx.GraphProto, path: str, scope: Scope, context: Context) -> Graph:
        given = {tensor.name for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in given]
        planned = self.graph(graph, inputs, Scope(path, scope), context, {})
        self.subgraphs[path] = planned
        return planned

    def output(self, name: str, scope: Scope) -> int:
        value = scope.find(name)
        if value is None:
            self.problem(f"graph output '{scope.path}{name}' is computed by no node")
            return ABSENT
        return self.place(value, host=value.constant is not None and value.constant.small)

    def nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope, block: Block, context: Context) -> None:
        later = {output for node in nodes for output in node.output}
        for node in nodes:
            name = scope.path + (node.name or f"{node.op_type}:{next(filter(None, node.output), '')}")
            inputs = [self.input(wanted, name, scope, later) for wanted in node.input]
            self.node(node, name, inputs, scope, block, context)
            for output in filter(None, node.output):  # after a problem, so that the nodes that follow are looked at too
                scope.values.setdefault(output, Value(unknown=True))

    def input(self, wanted: str, name: str, scope: Scope, later: set[str]) -> Value:
        value = scope.find(wanted) if wanted else Value()
        if value is not None:
            return value
        if wanted in later:
            self.problem(
                f"node '{name}' reads '{wanted}' before it is computed: the graph is not sorted, or has a cycle"
            )
        else:
            self.problem(f"node '{name}' reads '{wanted}', which nothing defines")
        return Value(unknown=True)

    def node(self, node: onnx.NodeProto, name: str, inputs: list[Value], scope: Scope, block: Block, context: Context) -> None:  # fmt: skip
        """Plan one node: by its row, or by a body inlined in its place."""
        domain = _domain(node.domain)
        version = context.versions.get(domain, 1)
        if domain == "" and domain not in context.versions:
            self.problem("the model imports no version of the standard's domain (opset_import)")
            return
        row = registry.find(domain, node.op_type, version)
        body = self.functions.get((domain, node.op_type, node.overload))
        attributes = self.attributes(node, name, scope, context)
        if row is not None and domain == "" and row.name == "Identity" and len(inputs) == len(node.output) == 1:
            self.define(node.output[0], inputs[0], scope)
        elif body is not None and not (row is not None and domain == DOMAIN):
            self.inline(node, name, body, attributes, inputs, scope, block, context)
        elif row is not None:
            self.step(node, name, row, version, attributes, inputs, scope, block)
        else:
            self.expand(node, name, domain, version, attributes, inputs, scope, block, context)

    # -- bodies in a node's place

    def inline(
        self, node: onnx.NodeProto, name: str, body: onnx.FunctionProto, attributes: Mapping[str, Any], inputs: Sequence[Value],
        scope: Scope, block: Block, context: Context,
    ) -> None:  # fmt: skip
        """Plan a function's nodes in the caller's graph, formal inputs standing for the call's values."""
        if len(inputs) > len(body.input) or len(node.output) > len(body.output):
            self.problem(
                f"node '{name}': {node.op_type} takes {len(body.input)} inputs and has {len(body.output)} outputs"
            )
            return
        if name.count("/") > 100:
            self.problem(f"node '{name}': function {node.op_type} calls itself")
            return
        inner = Scope(name + "/")
        values = [*inputs, *[Value()] * (len(body.input) - len(inputs))]
        inner.values.update(zip(body.input, values, strict=True))
        defaults = {a.name: self.attribute(a, name, scope) for a in body.attribute_proto}
        called = Context({**context.versions, **_versions(body.opset_import)}, {**defaults, **attributes})
        self.nodes(body.node, inner, block, called)
        for formal, output in zip(body.output, node.output, strict=False):
            value = inner.find(formal)
            if value is None:
                self.problem(f"function output '{inner.path}{formal}' is computed by no node")
            elif output:
                self.define(output, value, scope)

    def expand(
        self, node: onnx.NodeProto, name: str, domain: str, version: int, attributes: Mapping[str, Any], inputs: Sequence[Value],
        scope: Scope, block: Block, context: Context,
    ) -> None:  # fmt: skip
        """Plan the standard's own body of an operator that no row serves."""
        schema = schema_of(domain, node.op_type, version)
        body = None
        if schema is not None:
            if schema.has_context_dependent_function and self.types is None:
                self.types = infer_types(self.model)
            body = body_of(node, schema, version, [(self.types or {}).get(wanted) for wanted in node.input])
        if schema is None or body is None:
            self.problem(f"node '{name}': {domain or 'ai.onnx'}::{node.op_type} is not supported at version {version}")
            return
        defaults = {
            key: self.attribute(entry.default_value, name, scope)
            for key, entry in schema.attributes.items()
            if entry.default_value.type != AttributeProto.UNDEFINED
        }
        self.inline(node, name, body, {**defaults, **attributes}, inputs, scope, block, context)

    # -- steps

    def step(
        self, node: onnx.NodeProto, name: str, row: Operator, version: int, attributes: Mapping[str, Any],
        inputs: Sequence[Value], scope: Scope, block: Block,
    ) -> None:  # fmt: skip
        outputs, schema = _trimmed(node.output), schema_of(row.domain, row.name, version)
        if self.refuse(name, row, schema, attributes, inputs):
            return
        run: Callable[..., Any]
        if row.planned:
            notes: list[Any] = []
            constants = tuple(value.constant.value if value.constant else None for value in inputs)
            given = tuple(not value.absent for value in inputs)
            facts = Node(name, row.name, row.domain, version, attributes, constants, given, len(outputs), self.device, notes.append)  # fmt: skip
            try:
                run = row.run(facts)
            except Lut4Error as error:
                self.problem(f"node '{name}' ({row.name}): {error}")
                return
            self.kernels.update((name, note) for note in notes)
        else:
            bound = {**attributes, "outputs": len(outputs)} if row.takes_outputs else attributes
            run = partial(row.run, **bound) if bound else row.run
        call, slots = self.call(run, row, inputs)
        host = bool(inputs) and all(
            value.host or _small(value) or index in row.host for index, value in enumerate(inputs)
        )
        foldable = not row.planned and schema is not None and not schema.non_deterministic
        if not (foldable and self.fold(call, inputs, outputs, scope)):
            written = tuple(self.declare(o, scope, block, host and row.takes_xp) if o else DROPPED for o in outputs)
            block.steps.append(Step(name, row, call, slots, written, host=host and (row.takes_xp or bool(row.host))))
            inner = [graph.captured for graph in attributes.values() if isinstance(graph, Graph)]
            block.reads.append(set(slots).union(*inner))

    def call(self, run: Callable[..., Any], row: Operator, inputs: Sequence[Value]) -> tuple[Call, tuple[int, ...]]:
        """Bind a function to the slots of its inputs, each constant in the form that the operator wants."""
        host = frozenset(row.host)
        mlx = tuple(self.place(value, index in host) for index, value in enumerate(inputs)) if not row.takes_xp else ()
        if not row.takes_xp:
            return bind(run, self.frame, mlx, host), mlx
        either = tuple(self.place(value, index in host or _small(value)) for index, value in enumerate(inputs))
        only_host = all(value.host or _small(value) or value.absent for value in inputs)
        mlx = either if only_host else tuple(self.place(value, index in host) for index, value in enumerate(inputs))
        return bind_either(run, self.frame, either, mlx, host), either

    def fold(self, call: Call, inputs: Sequence[Value], outputs: Sequence[str], scope: Scope) -> bool:
        """Run a step now where all its inputs are small constants and so are its results."""
        constants = [value.constant for value in inputs if value.constant is not None]
        size = sum(constant.size for constant in constants)
        if size > FOLDED or len(constants) < sum(not value.absent for value in inputs):
            return False
        try:
            result = call()
        except Exception:  # noqa: BLE001 - it fails again when it runs, where the node is named
            return False
        results = result if type(result) is tuple else (result,)
        large = inputs and any(getattr(part, "size", FOLDED + 1) > FOLDED for part in results)
        if len(results) < len(outputs) or large:
            return False
        for output, part in zip(outputs, results, strict=False):
            if output:
                self.define(output, Value(constant=Constant(to_numpy(part))), scope)
        return True

    def refuse(self, name: str, row: Operator, schema: OpSchema | None, attributes: Mapping[str, Any], inputs: Sequence[Value]) -> bool:  # fmt: skip
        """Report attributes and inputs that the operator's function does not take, or lacks."""
        known = len(self.problems)
        if row.planned:
            unfit = attributes.keys() - schema.attributes.keys() if schema is not None else set()
        else:
            unfit = attributes.keys() - row.attributes.keys()
        for key in sorted(unfit):
            self.problem(f"node '{name}': attribute '{key}' of {row.name} is not supported")
        for key, parameter in row.attributes.items():
            if parameter.default is parameter.empty and key not in attributes:
                self.problem(f"node '{name}': {row.name} needs the attribute '{key}'")
        if not row.planned and len(inputs) > len(row.inputs) and not row.variadic:
            self.problem(f"node '{name}': {row.name} takes at most {len(row.inputs)} inputs, not {len(inputs)}")
        for index, parameter in enumerate(() if row.planned else row.inputs):
            needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
            if needed and (index >= len(inputs) or inputs[index].absent and not inputs[index].unknown):
                self.problem(f"node '{name}': {row.name} needs the input '{parameter.name}'")
        return len(self.problems) > known or any(value.unknown for value in inputs)

    # -- attributes

    def attributes(self, node: onnx.NodeProto, name: str, scope: Scope, context: Context) -> dict[str, Any]:
        """A node's attributes as Python values; one that refers to a function's attribute left out is left out too."""
        values = {}
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                values[attribute.name] = self.attribute(attribute, name, scope, context)
            elif attribute.ref_attr_name in context.attributes:
                values[attribute.name] = context.attributes[attribute.ref_attr_name]
        return values

    def attribute(self, attribute: AttributeProto, name: str, scope: Scope, context: Context | None = None) -> Any:
        kind = attribute.type
        if kind == AttributeProto.GRAPH and context is not None:
            return self.subgraph(attribute.g, f"{name}/{attribute.name}/", scope, context)
        if kind == AttributeProto.TENSOR:
            return np.asarray(self.tensors.array(attribute.t))
        if kind == AttributeProto.SPARSE_TENSOR:
            return self.dense(attribute.sparse_tensor)
        if kind == AttributeProto.STRING:
            return attribute.s.decode("utf-8", "surrogateescape")
        if kind == AttributeProto.STRINGS:
            return [text.decode("utf-8", "surrogateescape") for text in attribute.strings]
        return onnx.helper.get_attribute_value(attribute)

    def dense(self, sparse: onnx.SparseTensorProto) -> np.ndarray:
        """A sparse tensor as a dense array: indices are flat [n] or coordinates [n, rank]."""
        values, indices = self.tensors.array(sparse.values), self.tensors.array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        return dense


def _small(value: Value) -> bool:
    return value.constant is not None and value.constant.small


def _trimmed(outputs: Sequence[str]) -> list[str]:
    """The outputs without the empty names at the end, which ask for nothing."""
    names = list(outputs)
    while names and not names[-1]:
        names.pop()
    return names


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _versions(entries: Sequence[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(entry.domain): entry.version for entry in entries}


def _report(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"the model cannot run, for {len(problems)} reasons:", *(f"  {text}" for text in problems)])
