"""The only file that changes a graph: each proved site becomes one node, and what only it used goes.

DESIGN section 3 lists the differences that are permitted; everything else keeps its bytes and its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import onnx

from lut4tool.errors import Lut4Error
from lut4tool.formats import DOMAIN, ONNX_DTYPE, VERSION
from lut4tool.recognize.layout import Laid
from lut4tool.recognize.proof import Proof, Step
from lut4tool.storage import PLAIN, subgraphs

#: The first IR version that knows model-local functions.
_FUNCTIONS_IR = 8
#: The first IR version in which an initializer need not be a graph input (and one that is can be overridden).
_FREE_INITIALIZERS_IR = 4


class RewriteError(Lut4Error):
    """A model that cannot be rewritten, or a place that cannot be written to, in words."""


class NewTensor(NamedTuple):
    """A tensor that a rewrite adds, without its data yet: `role` of `proof` says what that is."""

    tensor: onnx.TensorProto
    proof: Proof
    role: str
    in_function: bool

    @property
    def is_open(self) -> bool:
        """Whether its data is missing: not where the bytes of another tensor serve."""
        held = self.proof.roles[self.role]
        return isinstance(held, Laid) and not held.view


def apply(model: onnx.ModelProto, proofs: Sequence[Proof]) -> list[NewTensor]:
    """Rewrite the proved sites of a model in place; without proofs nothing changes.

    Linear in the size of the graphs. Returns the tensors that are laid out anew, for the caller to fill: one for all
    sites that share it. Raises RewriteError, before any change, where the model defines or imports ai.lut4tool in
    another sense.
    """
    if not proofs:
        return []
    bodies = _missing_bodies(model, sorted({proof.op for proof in proofs}), default_opset(model) or proofs[0].opset)
    if model.ir_version < _FREE_INITIALIZERS_IR:
        _drop_initializer_inputs(model.graph)
    names = Names(model)
    added: list[NewTensor] = []
    for function in sorted({proof.site.function for proof in proofs}, key=lambda index: -1 if index is None else index):
        container = model.graph if function is None else model.functions[function]
        own = [proof for proof in proofs if proof.site.function == function]
        added += _edit_container(container, own, model.training_info if function is None else (), names)
        if function is not None:
            _import_domain(container)
    _import_domain(model)
    _put_first(model.functions, bodies)
    model.ir_version = max(model.ir_version, _FUNCTIONS_IR)
    return added


def default_opset(model: onnx.ModelProto) -> int:
    """Version of the default domain that a model imports (0: none)."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


class Names:
    """The names of a model's values and nodes, read where a new one is wanted first."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._taken: set[str] = set()

    def free(self, wanted: str) -> str:
        """The name, with a number where it is taken; it is taken from now on."""
        if not self._taken:
            waiting: list[Any] = [self._model.graph, *self._model.functions]
            for body in waiting:
                functions = isinstance(body, onnx.FunctionProto)
                self._taken.update(body.input if functions else (entry.name for entry in body.input))
                self._taken.update(() if functions else (entry.name for entry in body.initializer))
                for node in body.node:
                    self._taken.update((node.name, *node.input, *node.output))
                    waiting += subgraphs(node)
        name, number = wanted, 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


class _Around:
    """Writes the nodes before and after a product."""

    def __init__(self, product: onnx.NodeProto, names: Names) -> None:
        self.nodes: tuple[list[onnx.NodeProto], list[onnx.NodeProto]] = [], []
        self._names = names
        self._product = self._last = product
        self._y = product.output[0]

    def before(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node before the product; its value."""
        self.nodes[0].append(self._made(op, inputs, self._names.free(f"{self._y}/{op}"), attributes))
        return self.nodes[0][-1].output[0]

    def number(self, value: float) -> str:
        """A FLOAT scalar."""
        return self.before("Constant", value=onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [value]))

    def after(self, op: str, *inputs: str, **attributes: Any) -> None:
        """A node of the last value so far, which makes the product's output from now on."""
        self._last.output[0] = self._names.free(f"{self._y}/{self._last.op_type}")
        self._last = self._made(op, (self._last.output[0], *inputs), self._y, attributes)
        self.nodes[1].append(self._last)

    def _made(self, op: str, inputs: Sequence[str], output: str, attributes: dict[str, Any]) -> onnx.NodeProto:
        name = self._names.free(f"{self._product.name}/{op}") if self._product.name else ""
        return onnx.helper.make_node(op, inputs, [output], name, **attributes)


class _Scope:
    """One graph or function: the values it defines, how often each is used, and what has died."""

    def __init__(self, owner: Any, parent: _Scope | None) -> None:
        self.owner = owner
        self.parent = parent
        self.nodes: list[onnx.NodeProto] = list(owner.node)
        self.children: dict[Step | tuple[int, int, int], _Scope] = {}  # the third: where it stands in a list of graphs
        self.uses: Counter[str] = Counter()
        self.producer = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        self.annotations: dict[str, list[str]] = {}  # tensor -> the values that its annotation names
        self.dead_nodes: set[int] = set()
        self.around: dict[int, _Around] = {}  # by the index of a product
        self.dead_values: set[str] = set()
        declared = () if isinstance(owner, onnx.FunctionProto) else (*owner.input, *owner.initializer)
        self.others = {entry.name for entry in declared}

    def find(self, name: str) -> _Scope | None:
        """The scope whose value a name means here; None where nothing defines it."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.producer and name not in scope.others:
            scope = scope.parent
        return scope

    def use(self, names: Iterable[str], count: int = 1) -> list[tuple[_Scope, str]]:
        """Count uses of names; return those values that have none left."""
        unused = []
        for name in names:
            scope = self.find(name) if name else None
            if scope is not None:
                scope.uses[name] += count
                if not scope.uses[name]:
                    unused.append((scope, name))
        return unused

    def at(self, path: tuple[Step, ...]) -> _Scope:
        """The scope of a subgraph."""
        scope = self
        for step in path:
            scope = scope.children[step]
        return scope

    def every(self) -> Iterator[_Scope]:
        """This scope and all below it."""
        yield self
        for child in self.children.values():
            yield from child.every()


def _scope_of(owner: Any, parent: _Scope | None = None) -> _Scope:
    """Index a graph or function and its subgraphs, every use counted in the scope that defines the value."""
    scope = _Scope(owner, parent)
    for index, node in enumerate(scope.nodes):
        scope.use(node.input)
        for position, attribute in enumerate(node.attribute):
            if attribute.type in PLAIN:
                continue
            if attribute.HasField("g"):
                scope.children[index, position] = _scope_of(attribute.g, scope)
            for place, graph in enumerate(attribute.graphs):
                scope.children[index, position, place] = _scope_of(graph, scope)
    is_function = isinstance(owner, onnx.FunctionProto)
    scope.use(owner.output if is_function else [entry.name for entry in owner.output])
    for annotation in () if is_function else owner.quantization_annotation:
        names = [entry.value for entry in annotation.quant_parameter_tensor_names]
        scope.annotations.setdefault(annotation.tensor_name, []).extend(names)
        scope.use(names)
    return scope


def _edit_container(
    owner: Any, proofs: Sequence[Proof], training: Iterable[onnx.TrainingInfoProto], names: Names
) -> list[NewTensor]:
    """Rewrite the sites of one graph or function, subgraphs included."""
    top = _scope_of(owner)
    for info in training:  # training reads the main graph's values by name
        for graph in (info.initialization, info.algorithm):
            _scope_of(graph, top)
        for binding in (*info.initialization_binding, *info.update_binding):
            top.use((binding.key, binding.value))
    unused = []
    added: dict[Any, NewTensor] = {}
    for proof in proofs:
        roles = proof.roles.items()
        scope = top.at(proof.site.path)
        node = scope.nodes[proof.site.index]
        scope.use((*proof.inputs, proof.product.bias))  # before the old go: what both use never counts as unused
        unused += scope.use(node.input, -1)
        inputs = [held if isinstance(held, str) else _new(role, proof, added, names) for role, held in roles]
        scope.around[proof.site.index] = _replace(node, proof, inputs, names)
    _bury(unused)
    for scope in top.every():
        _remove_dead(scope)
        _insert_around(scope)
    return _declare(owner, added)


def _new(role: str, proof: Proof, added: dict[Any, NewTensor], names: Names) -> str:
    """The name of a tensor that is laid out anew, the same for all who share it."""
    key = proof.tensor_key(role)
    if key not in added:
        held = proof.roles[role]
        assert isinstance(held, Laid)
        source = f"{held.sources[0]}/" if held.sources else ""
        name = names.free(f"{source}{proof.op}/{role}")
        tensor = onnx.TensorProto()
        if held.view:  # the bytes stay where they are
            tensor.CopyFrom(proof.sources[held.sources[0]])
        tensor.name, tensor.data_type = name, held.data_type
        tensor.dims[:] = held.shape
        added[key] = NewTensor(tensor, proof, role, proof.site.function is not None)
    return added[key].tensor.name


def _declare(owner: Any, added: dict[Any, NewTensor]) -> list[NewTensor]:
    """Append new initializers to a graph, or Constant nodes to a function; return them as they stand there."""
    if isinstance(owner, onnx.GraphProto):
        owner.initializer.extend(new.tensor for new in added.values())
        last = len(owner.initializer) - len(added)
        tensors = owner.initializer
        return [new._replace(tensor=tensors[last + at]) for at, new in enumerate(added.values()) if new.is_open]
    constants = [onnx.helper.make_node("Constant", [], [new.tensor.name], value=new.tensor) for new in added.values()]
    _put_first(owner.node, constants)
    return [new._replace(tensor=owner.node[at].attribute[0].t) for at, new in enumerate(added.values()) if new.is_open]


def _replace(node: onnx.NodeProto, proof: Proof, inputs: Sequence[str], names: Names) -> _Around:
    """Make a node the proof's operator; its name, doc_string and metadata_props stay.

    Returns what the product has around it: the last of these nodes has its outputs then. What scales a half product,
    or its bias, is float32 as in onnx.reference and onnxruntime: it is rounded once, at the end.
    """
    product, writer = proof.product, _Around(node, names)
    x = writer.before("Transpose", product.x, perm=[1, 0]) if product.transpose_x else product.x
    node.op_type, node.domain = proof.op, DOMAIN
    node.ClearField("overload")
    node.ClearField("input")
    node.input.extend((x, *inputs))
    node.ClearField("attribute")
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in proof.attributes.items())
    wide = proof.dtype != "float32" and (product.alpha, product.beta) != (1, 1)
    if product.transpose_y:
        writer.after("Transpose", perm=[1, 0])
    if wide:
        writer.after("Cast", to=onnx.TensorProto.FLOAT)
    if product.alpha != 1:
        writer.after("Mul", writer.number(product.alpha))
    if product.bias:
        bias = writer.before("Cast", product.bias, to=onnx.TensorProto.FLOAT) if wide else product.bias
        bias = writer.before("Mul", bias, writer.number(product.beta)) if product.beta != 1 else bias
        writer.after("Add", bias)
    if wide:
        writer.after("Cast", to=ONNX_DTYPE[proof.dtype])
    return writer


def _insert_around(scope: _Scope) -> None:
    """Put in the nodes around the products of a scope, whose dead nodes are gone; the others are not copied."""
    if not any(any(around.nodes) for around in scope.around.values()):
        return
    order: list[tuple[int, int]] = [(index, 0) for index in range(len(scope.nodes)) if index not in scope.dead_nodes]
    for index, around in scope.around.items():
        for side, nodes in zip((-1, 1), around.nodes, strict=True):
            scope.owner.node.extend(nodes)
            order += [(index, side)] * len(nodes)
    place = iter(order)
    scope.owner.node.sort(key=lambda _: next(place))


def _bury(unused: list[tuple[_Scope, str]]) -> None:
    """Mark values that lost their last use, and in turn the nodes and annotations that only they kept alive."""
    while unused:
        scope, name = unused.pop()
        if scope.uses[name] or name in scope.dead_values:
            continue
        index = scope.producer.get(name)
        dying = [name] if index is None else [output for output in scope.nodes[index].output if output]
        if any(scope.uses[value] for value in dying):
            continue
        scope.dead_values.update(dying)
        if index is not None:
            scope.dead_nodes.add(index)
            unused += scope.use(scope.nodes[index].input, -1)
        for value in dying:
            unused += scope.use(scope.annotations.pop(value, ()), -1)


def _remove_dead(scope: _Scope) -> None:
    """Remove a scope's dead nodes, initializers, value_info and annotations."""
    if not scope.dead_values:
        return
    dead, owner = scope.dead_values, scope.owner
    _keep(owner.node, [index not in scope.dead_nodes for index in range(len(scope.nodes))])
    _keep(owner.value_info, [entry.name not in dead for entry in owner.value_info])
    if isinstance(owner, onnx.GraphProto):
        _keep(owner.initializer, [entry.name not in dead for entry in owner.initializer])
        annotations = owner.quantization_annotation
        _keep(annotations, [entry.tensor_name not in dead for entry in annotations])


def _keep(field: Any, kept: list[bool]) -> None:
    """Keep the marked elements of a repeated field, in order and without copying: the others go last and are cut."""
    if not all(kept):
        order = iter(kept)
        field.sort(key=lambda _: not next(order))
        del field[sum(kept) :]


def _put_first(field: Any, elements: Sequence[Any]) -> None:
    """Insert elements at the front of a repeated field, without copying the others."""
    if elements:
        order = iter([*range(1, len(field) + 1), *(0 for _ in elements)])
        field.extend(elements)
        field.sort(key=lambda _: next(order))


def _missing_bodies(model: onnx.ModelProto, ops: Sequence[str], opset: int) -> list[onnx.FunctionProto]:
    """Bodies that the model does not have yet; raise RewriteError where it has another one, or another version."""
    from lut4tool.rewrite.functions import body  # imports onnxscript, half a second

    for entry in (*model.opset_import, *(entry for function in model.functions for entry in function.opset_import)):
        if entry.domain == DOMAIN and entry.version != VERSION:
            raise RewriteError(f"the model imports {DOMAIN} at version {entry.version}; this lut4tool writes {VERSION}")
    missing = []
    for op in ops:
        ours = body(op, opset)
        found = [entry for entry in model.functions if (entry.domain, entry.name) == (DOMAIN, op)]
        if not found:
            missing.append(ours)
        elif [_bytes(entry) for entry in found] != [_bytes(ours)]:
            raise RewriteError(
                f"the model already defines a function {DOMAIN}::{op} with a body that is not lut4tool's"
            )
    return missing


def _import_domain(owner: onnx.ModelProto | onnx.FunctionProto) -> None:
    """Append ai.lut4tool to an opset_import that does not have it."""
    if all(entry.domain != DOMAIN for entry in owner.opset_import):
        owner.opset_import.add(domain=DOMAIN, version=VERSION)


def _drop_initializer_inputs(graph: onnx.GraphProto) -> None:
    """Below IR 4 initializers are listed as inputs and cannot be overridden; from IR 4 on those could."""
    names = {entry.name for entry in graph.initializer} | {entry.values.name for entry in graph.sparse_initializer}
    _keep(graph.input, [entry.name not in names for entry in graph.input])
    for node in graph.node:
        for subgraph in subgraphs(node):
            _drop_initializer_inputs(subgraph)


def _bytes(message: Any) -> bytes:
    return message.SerializeToString(deterministic=True)
