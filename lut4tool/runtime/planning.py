"""How a plan is made: every operator, attribute, constant and slot resolved, every problem found, before anything runs.

Model-local functions, and the standard's own bodies for operators that no row serves, are inlined into the graph that
calls them. A constant stays a NumPy array (a view of the file's map where it is external); an mx.array is made once
where a step wants one. Steps whose inputs are small constants run while planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto
from onnx.defs import OpSchema

from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN
from lut4tool.runtime import registry, types
from lut4tool.runtime.backend import mx
from lut4tool.runtime.binding import Call, Frame, bind, bind_either, bind_host
from lut4tool.runtime.dtypes import load, on_host, to_device, to_numpy
from lut4tool.runtime.folding import FILLED, FOLDED, WIDENED, quantized, widens
from lut4tool.runtime.functions import body_of, is_random, schema_of
from lut4tool.runtime.fusion import fuse
from lut4tool.runtime.graph import ABSENT, DROPPED, Graph, RunError, Step
from lut4tool.runtime.plan import Node, Plan
from lut4tool.runtime.registry import Operator, Unsupported
from lut4tool.runtime.scope import Arrays, Block, Body, Constant, Planned, Scope, Site, Value
from lut4tool.runtime.shapes import Shapes
from lut4tool.storage import StorageError, Tensors, abridged, nbytes

__all__ = ["RunError", "Unsupported", "check", "plan"]

#: Nodes that functions may bring in when they are inlined: some that call each other twice would have billions.
INLINED = 1 << 16
#: Attributes of one node that are read.
ATTRIBUTES = 1000
#: So many of a function's names and imports count as one node.
_PARTS = 16
#: Bytes that constants computed while planning take, at most, over WIDENED times the model's own.
ROOM = 1 << 30
#: After so many problems the rest of a model is not looked at.
PROBLEMS = 500
#: Functions that call functions, at most so deep: ONNX forbids recursion.
DEPTH = 50


def plan(model: onnx.ModelProto, device: mx.Device, tensors: Tensors) -> Plan:
    """Plan a model for a device; `tensors` reads its weights.

    Raises Unsupported with every problem of the whole model in one report, StorageError for weights it cannot read.
    """
    registry.load()
    with mx.stream(device), np.errstate(all="ignore"):
        return _Planner(model, device, tensors).plan()


def check(model: onnx.ModelProto, device: mx.Device) -> list[str]:
    """Return what keeps a model from being planned, in sentences, from its metadata alone: weights are not read."""
    registry.load()
    with mx.stream(device), np.errstate(all="ignore"):
        checker = _Checker(model, device, Shapes(None))
        try:
            checker.plan()
        except Unsupported:
            return list(checker.problems)
    return []


class _Planner:
    """Turns a ModelProto into a Plan, collecting the problems on the way."""

    prepares = True  # operators for the values that are known

    def __init__(self, model: onnx.ModelProto, device: mx.Device, tensors: Tensors) -> None:
        self.model, self.device, self.tensors = model, device, tensors
        self.frame: Frame = [None, None]
        self.problems: dict[str, None] = {}  # an ordered set
        self.names: set[str] = set()
        self.dynamic: list[int] = []
        self.kernels: dict[str, Any] = {}
        self.subgraphs: dict[str, Graph] = {}
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
        self.inlined = 0
        self.constants: dict[int, tuple[AttributeProto, np.ndarray]] = {}
        stored = sum(map(nbytes, model.graph.initializer))
        self.room = WIDENED * stored + ROOM  # bytes that are left for results of folding

    def plan(self) -> Plan:
        graph, body = self.model.graph, Body(Scope(), Block(), _versions(self.model.opset_import))
        initialized = {tensor.name for tensor in graph.initializer}
        old = self.model.ir_version < 4  # every initializer is listed as an input there, and none is one
        inputs = tuple(value for value in graph.input if not (old and value.name in initialized))
        defaults: dict[str, Any] = {}
        if "" not in body.versions and any(_domain(node.domain) == "" for node in graph.node):
            self.problem("the model imports no version of the standard's operators (opset_import of domain '')")
        newest = onnx.defs.onnx_opset_version()
        if body.versions.get("", 0) > newest:
            known = f"the installed onnx knows the standard's operators up to version {newest}"
            self.problem(f"the model imports version {body.versions['']}; {known}")
        main = self.graph(graph, inputs, body, defaults)
        if self.problems:
            raise Unsupported(_report(list(self.problems)))
        defaults = {name: to_device(value) for name, value in defaults.items()}
        if on_host():
            self.forget(main)
        ports = tuple(map(_apart, inputs)), tuple(map(_apart, graph.output))
        place = "numpy" if on_host() else "mlx"
        return Plan(main, *ports, defaults, self.subgraphs, self.kernels, tuple(self.dynamic), place)

    def forget(self, main: Graph) -> None:
        """On a CPU, empty the slots of constants that no step reads: what was packed would be in memory twice."""
        read = {slot for graph in (main, *self.subgraphs.values()) for slot in graph.outputs}
        read |= {slot for graph in (main, *self.subgraphs.values()) for step in graph.steps for slot in step.inputs}
        for slot in set(range(len(self.frame))) - read:
            self.frame[slot] = None

    def problem(self, text: str) -> None:
        self.problems[abridged(text)] = None
        if len(self.problems) == PROBLEMS:
            self.problems[f"and more: it was looked at no further after {PROBLEMS} reasons"] = None
            raise Unsupported(_report(list(self.problems)))

    # -- names and slots

    def declare(self, name: str, body: Body, host: bool = False, kind: str | None = None) -> int:
        """A new slot for a name that an input or a node defines."""
        self.frame.append(None)
        slot = len(self.frame) - 1
        self.define(name, Value(slot, host=host, kind=kind), body.scope)
        self.dynamic.append(slot)
        body.block.own.add(slot)
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
            self.frame.append(constant.value if host and not on_host() else load(constant.value))
            constant.slots[form] = len(self.frame) - 1
        return constant.slots[form]

    # -- graphs

    def graph(
        self, graph: onnx.GraphProto, inputs: Sequence[onnx.ValueInfoProto], body: Body, defaults: dict[str, Any]
    ) -> Graph:
        """Plan a graph; `defaults` receives the initializers that are inputs."""
        slots = [self.declare(value.name, body, kind=types.type_text(value.type)) for value in inputs]
        names = {value.name for value in inputs}
        for tensor in graph.initializer:
            if tensor.name in names:
                defaults[tensor.name] = self.tensors.array(tensor)
            else:
                self.define(tensor.name, Value(constant=Constant(self.tensors.array(tensor))), body.scope)
        for sparse in graph.sparse_initializer:
            self.define(sparse.values.name, Value(constant=Constant(self.dense(sparse))), body.scope)
        self.nodes(graph.node, body)
        outputs = [self.output(value.name, body.scope) for value in graph.output]
        if on_host() and self.prepares:
            fuse(body.block, self.frame, outputs)
        return body.block.finish(self.frame, slots, outputs, [_apart(value).type for value in graph.output])

    def subgraph(self, graph: onnx.GraphProto, path: str, outer: Body) -> Graph:
        given = {tensor.name for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in given]
        scope = Scope(path, outer.scope, outer.scope.depth)
        planned = self.graph(graph, inputs, Body(scope, Block(), outer.versions, outer.attributes), {})
        self.subgraphs[path] = planned
        return planned

    def output(self, name: str, scope: Scope) -> int:
        value = scope.find(name)
        if value is None:
            self.problem(f"graph output '{scope.path}{name}' is computed by no node")
            return ABSENT
        return self.place(value, host=value.small or on_host())

    def nodes(self, nodes: Sequence[onnx.NodeProto], body: Body) -> None:
        later = {output for node in nodes for output in node.output}
        for node in nodes:
            name = self.name(node, body.scope)
            inputs = [self.input(wanted, name, body.scope, later) for wanted in node.input]
            domain = _domain(node.domain)
            if len(node.attribute) > ATTRIBUTES:
                self.problem(f"node '{name}' has {len(node.attribute)} attributes; at most {ATTRIBUTES} are read")
            else:
                attributes = self.attributes(node, name, body)
                self.node(Site(node, name, domain, body.versions.get(domain, 1), attributes, inputs, body))
            for output in filter(None, node.output):  # after a problem: the nodes that follow are looked at too
                body.scope.values.setdefault(output, Value(unknown=True))

    def name(self, node: onnx.NodeProto, scope: Scope) -> str:
        """The node's name with its path; where it has none, or another node has it too, its first output tells."""
        output = next(filter(None, node.output), "")
        name = abridged(scope.path + (node.name or f"{node.op_type}:{output}"))
        if name in self.names:
            name = abridged(f"{name}:{output}")
        self.names.add(name)
        return name

    def input(self, wanted: str, name: str, scope: Scope, later: set[str]) -> Value:
        value = scope.find(wanted) if wanted else Value()
        if value is not None:
            return value
        why = "which is computed after it: the graph is not sorted, or has a cycle"
        self.problem(f"node '{name}' reads '{wanted}', {why if wanted in later else 'which nothing defines'}")
        return Value(unknown=True)

    def node(self, site: Site) -> None:
        """Plan one node: by its row, or by a body inlined in its place."""
        node, row = site.node, registry.find(site.domain, site.node.op_type, site.version)
        body = self.functions.get((site.domain, node.op_type, node.overload))
        if body is not None and not (row is not None and site.domain == DOMAIN):
            self.inline(site, body, {})
        elif row is None or not types.exists(row.domain, row.name, site.version):
            self.expand(site)
        elif (row.domain, row.name) == ("", "Identity") and len(site.inputs) == len(node.output) == 1:
            self.define(node.output[0], site.inputs[0], site.body.scope)
        else:
            self.step(site, row)

    # -- bodies in a node's place

    def inline(self, site: Site, function: onnx.FunctionProto, defaults: Mapping[str, Any]) -> None:
        """Plan a function's nodes in the caller's block, its formal inputs standing for the call's values."""
        node, body, kind = site.node, site.body, site.node.op_type
        if len(site.inputs) > len(function.input) or len(site.outputs) > len(function.output):
            shape = f"{len(function.input)} inputs and {len(function.output)} outputs"
            self.problem(f"node '{site.name}': the function {kind} has {shape}, fewer than the node")
            return
        if body.scope.depth >= DEPTH:
            self.problem(f"node '{site.name}': functions call each other more than {DEPTH} deep: {kind} calls itself")
            return
        read = (function.input, function.output, function.attribute_proto, function.opset_import)  # at each call
        self.inlined += len(function.node) + sum(map(len, read)) // _PARTS
        if self.inlined > INLINED:
            self.problem(f"functions call functions until there are more than {INLINED} nodes: {kind} at the last")
            return
        scope = Scope(site.name + "/", None, body.scope.depth + 1)
        absent = [Value()] * (len(function.input) - len(site.inputs))
        scope.values.update(zip(function.input, [*site.inputs, *absent], strict=True))
        own = {a.name: self.attribute(a, site.name, body) for a in function.attribute_proto}
        versions = {**body.versions, **_versions(function.opset_import)}
        self.nodes(function.node, Body(scope, body.block, versions, {**defaults, **own, **site.attributes}))
        for formal, output in zip(function.output, node.output, strict=False):
            value = scope.find(formal)
            if value is None:
                self.problem(f"function output '{scope.path}{formal}' is computed by no node")
            elif output:
                self.define(output, value, body.scope)

    def expand(self, site: Site) -> None:
        """Plan the standard's own body of an operator that no row serves."""
        node, schema = site.node, schema_of(site.domain, site.node.op_type, site.version)
        elements = [0 if value.absent else types.number(value.type) for value in site.inputs]
        try:
            function = body_of(node, schema, site.version, elements) if schema is not None else None
        except Unsupported as error:
            self.problem(f"node '{site.name}' ({node.op_type}): {error}")
            return
        if schema is None or function is None:
            what = f"{site.domain or 'ai.onnx'}::{node.op_type}"
            why = registry.REFUSED.get((site.domain, node.op_type))
            text = f"node '{site.name}': {what} is not supported at version {site.version}"
            self.problem(f"{text}: {why}" if why else text)
            return
        written = {name: entry.default_value for name, entry in schema.attributes.items()}
        defaults = {
            name: self.attribute(value, site.name, site.body)
            for name, value in written.items()
            if value.type != AttributeProto.UNDEFINED
        }
        self.inline(site, function, defaults)

    # -- steps

    def step(self, site: Site, row: Operator) -> None:
        schema = schema_of(row.domain, row.name, site.version)
        if self.refuse(site, row, schema) or any(value.unknown for value in site.inputs):
            return
        if self.keep(site):
            return
        run = self.prepared(site, row)
        if run is None:
            return
        size = len(self.frame)
        read = [site.inputs[place] for place in getattr(run, "reads", range(len(site.inputs)))]
        call, slots = self.call(run, row, read)
        if not row.planned and schema is not None and not is_random(schema) and self.fold(site, call):
            self.release(site, size)
            return
        known = all(value.on_host or index in row.host for index, value in enumerate(site.inputs))
        host = row.shape or (known and (row.takes_xp or bool(row.host)))
        given = [value.type for value in site.inputs]
        kinds = types.results(row, site.version, given, site.attributes, len(site.outputs))
        outputs = tuple(
            self.declare(name, site.body, host and (row.takes_xp or row.shape), kind) if name else DROPPED
            for name, kind in zip(site.outputs, kinds, strict=True)
        )
        hosted = types.on_host(row, len(site.outputs), [*given, *kinds], self.device)
        step = Step(site.name, row, call, slots, outputs, host=hosted, shape=host and not hosted)
        planned = Planned(run, read, site.attributes, bool(kinds) and kinds[0] == "tensor(float)")
        site.body.block.add(step, site.subgraphs, planned)

    def prepared(self, site: Site, row: Operator) -> Callable[..., Any] | None:
        """What runs a node: the row's function, or what a planned one makes of the node; None where it is refused."""
        host = on_host()
        prepare = row.prepare if host and self.prepares else None
        if not row.planned and row.check is None and prepare is None:
            return _bound(site, row, host)
        notes: list[Any] = []
        constants = Arrays([value.constant for value in site.inputs])
        given = tuple(not value.absent for value in site.inputs)
        kinds = tuple(value.type for value in site.inputs)
        quantized = tuple(value.constant.quantized if value.constant else None for value in site.inputs)
        facts = Node(
            site.name, row.name, row.domain, site.version, site.attributes, constants, given, kinds, quantized,
            len(site.outputs), self.device, notes.append,
        )  # fmt: skip
        try:
            if row.check is not None:
                row.check(facts)
            run: Callable[..., Any] = row.run(facts) if row.planned else _bound(site, row, host)
            run = run if prepare is None else _quicker(prepare, facts, run)
        except Lut4Error as error:
            self.problem(f"node '{site.name}' ({row.name}): {error}")
            return None
        self.kernels.update((site.name, note) for note in notes)
        return run

    def call(self, run: Callable[..., Any], row: Operator, inputs: Sequence[Value]) -> tuple[Call, tuple[int, ...]]:
        """Bind a function to the slots of its inputs, each constant in the form that the operator wants."""
        if on_host():
            slots = tuple(self.place(value, host=True) for value in inputs)
            return bind_host(run, self.frame, slots), slots
        host = frozenset(row.host)
        if not row.takes_xp:
            slots = tuple(self.place(value, index in host) for index, value in enumerate(inputs))
            return bind(run, self.frame, slots, host), slots
        slots = mlx = tuple(self.place(value, index in host or value.small) for index, value in enumerate(inputs))
        if not all(value.on_host for value in inputs):
            mlx = tuple(self.place(value, index in host) for index, value in enumerate(inputs))
        return bind_either(run, self.frame, slots, mlx, host), slots

    def fold(self, site: Site, call: Call) -> bool:
        """Run a step now where all its inputs are small constants and so are its results (those of Constant: any).

        On a CPU also where it makes a weight of bytes a float one: see folding.WIDENED.
        """
        constants = [value.constant for value in site.inputs if value.constant is not None]
        given = [value for value in site.inputs if not value.absent]
        if len(constants) < len(given):
            return False
        widened = on_host() and widens(site, constants)
        if sum(constant.size for constant in constants) > FOLDED and not widened:
            return False
        try:
            result = call()
        except Exception:  # noqa: BLE001 - it fails again when it runs, where the node is named
            return False
        results = result if type(result) is tuple else (result,)
        most = FILLED if (site.domain, site.node.op_type) == ("", "ConstantOfShape") else FOLDED
        large = bool(given) and not widened and any(getattr(part, "size", most + 1) > most for part in results)
        if large or len(results) < len(site.outputs):
            return False
        size = sum(getattr(part, "nbytes", 0) for part in results) if given else 0
        if size > self.room:
            return False
        self.room -= size
        stored = sum(constant.stored for constant in constants) if given else None
        for output, part in zip(site.outputs, results, strict=False):
            if output:
                self.define(output, Value(constant=Constant(to_numpy(part), stored)), site.body.scope)
        return True

    def keep(self, site: Site) -> bool:
        """On a CPU, leave a float matrix that a step makes of constant bytes as these bytes."""
        constants = [value.constant for value in site.inputs if value.constant is not None]
        given = [value for value in site.inputs if not value.absent]
        if not (on_host() and self.prepares) or len(constants) < len(given):
            return False
        found = quantized(site, constants)
        if found is None:
            return False
        constant = Constant(None, sum(constant.stored for constant in constants), found)
        self.define(site.outputs[0], Value(constant=constant), site.body.scope)
        return True

    def release(self, site: Site, size: int) -> None:
        """Take back the slots from `size` on, which only a step read that was folded."""
        del self.frame[size:]
        for constant in (value.constant for value in site.inputs if value.constant is not None):
            constant.slots = {form: slot for form, slot in constant.slots.items() if slot < size}

    def refuse(self, site: Site, row: Operator, schema: OpSchema | None) -> bool:
        """Report attributes and inputs that the operator's function does not take, or lacks."""
        known, start, given = len(self.problems), f"node '{site.name}': {row.name}", site.attributes.keys()
        if not row.planned:
            accepted = set(row.attributes)
        else:
            accepted = set(schema.attributes) if schema is not None else set(given)
        for key in sorted(given - accepted):
            self.problem(f"{start} has no attribute '{key}' that is supported")
        for fault in types.faults(row, site):
            self.problem(f"{start} {fault}")
        if row.planned:
            return len(self.problems) > known
        for key, parameter in row.attributes.items():
            if parameter.default is parameter.empty and key not in given:
                self.problem(f"{start} needs the attribute '{key}'")
        if len(site.inputs) > len(row.inputs) and not row.variadic:
            self.problem(f"{start} takes at most {len(row.inputs)} inputs, not {len(site.inputs)}")
        for index, parameter in enumerate(row.inputs):
            needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
            lacks = index >= len(site.inputs) or (site.inputs[index].absent and not site.inputs[index].unknown)
            if needed and lacks:
                self.problem(f"{start} needs the input '{parameter.name}'")
        return len(self.problems) > known

    # -- attributes

    def attributes(self, node: onnx.NodeProto, name: str, body: Body) -> dict[str, Any]:
        """A node's attributes as Python values; one that refers to an attribute its function lacks is left out."""
        values = {}
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                values[attribute.name] = self.attribute(attribute, name, body)
            elif attribute.ref_attr_name in body.attributes:
                values[attribute.name] = body.attributes[attribute.ref_attr_name]
        return values

    def attribute(self, attribute: AttributeProto, name: str, body: Body) -> Any:
        kind = attribute.type
        if kind == AttributeProto.UNDEFINED:
            self.problem(f"node '{name}': its attribute '{attribute.name}' has no type")
            return None
        if kind == AttributeProto.GRAPH:
            return self.subgraph(attribute.g, f"{name}/{abridged(attribute.name)}/", body)
        if kind == AttributeProto.TENSOR:
            try:
                return self.constant(attribute)
            except StorageError as error:
                self.problem(f"node '{name}': its attribute '{attribute.name}': {error}")
                return np.zeros(0, np.float32)
        if kind == AttributeProto.SPARSE_TENSOR:
            return self.dense(attribute.sparse_tensor)
        if kind == AttributeProto.STRING:
            return attribute.s.decode("utf-8", "surrogateescape")
        if kind == AttributeProto.STRINGS:
            return [text.decode("utf-8", "surrogateescape") for text in attribute.strings]
        return onnx.helper.get_attribute_value(attribute)

    def constant(self, attribute: AttributeProto) -> np.ndarray:
        """An attribute's tensor, one array for all calls of a function that has it. Raises StorageError.

        The attribute is kept too: while it is, protobuf gives the same object for it each time.
        """
        if id(attribute) not in self.constants:
            self.constants[id(attribute)] = attribute, np.asarray(self.tensors.array(attribute.t))
        return self.constants[id(attribute)][1]

    def dense(self, sparse: onnx.SparseTensorProto) -> np.ndarray:
        """A sparse tensor as a dense array: its indices are flat [n] or coordinates [n, rank]. Raises StorageError."""
        values, indices = self.tensors.array(sparse.values), self.tensors.array(sparse.indices)
        try:
            dense = np.zeros(tuple(sparse.dims), values.dtype)
            if indices.ndim == 1:
                dense.reshape(-1)[indices] = values
            else:
                dense[tuple(indices.T)] = values
        except (ValueError, IndexError, TypeError, MemoryError) as error:
            raise StorageError(f"the sparse tensor '{sparse.values.name}' is no array: {error}") from error
        return dense


class _Checker(_Planner):
    """A planner that loads no weights and prepares no kernels."""

    prepares = False

    def place(self, value: Value, host: bool) -> int:
        """Small constants have slots; the others are never read."""
        return super().place(value, host) if value.constant is None or value.small else ABSENT

    def prepared(self, site: Site, row: Operator) -> Callable[..., Any] | None:
        """Control flow is planned as ever; what packs weights is only checked."""
        if not (row.planned and row.domain):
            return super().prepared(site, row)
        return super().prepared(site, replace(row, planned=False))


def _apart(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """A copy: any part of a model keeps the whole of it, weights included, in memory."""
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy


def _quicker(prepare: Callable[..., Any], facts: Node, run: Callable[..., Any]) -> Callable[..., Any]:
    """What a row prepares for a node; its function where the node is malformed, which fails when it runs, in words."""
    try:
        return prepare(facts, run) or run
    except Exception:  # noqa: BLE001 - it fails when it runs, where the node is named
        return run


def _bound(site: Site, row: Operator, host: bool) -> Callable[..., Any]:
    """The operator's function with its attributes; on a CPU with `xp` too."""
    attributes = {**site.attributes, "outputs": len(site.outputs)} if row.takes_outputs else site.attributes
    first = (np,) if host and row.takes_xp else ()
    return partial(row.run, *first, **attributes) if attributes or first else row.run


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _versions(entries: Sequence[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(entry.domain): entry.version for entry in entries}


def _report(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"the model cannot run, for {len(problems)} reasons:", *(f"  {text}" for text in problems)])
