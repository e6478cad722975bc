"""Questions about a model's graphs: where a value comes from, whether it is constant, what a literal or attribute says.

A question with no provable answer raises Refuse. Nothing here knows a chain; nothing recurses on a graph's depth.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto

from lut4tool.formats import DTYPE_NAME
from lut4tool.recognize.proof import Site, Step
from lut4tool.storage import Tensors, abridged

#: A literal has at most so many elements: the codebook is the largest.
LITERAL_ELEMENTS = 16
#: Versions of the standard operators that the chains were proved for.
OPSETS = range(13, 29)

#: Products whose weight is looked at, by domain; the vendor's where they are asked for.
VENDOR = "com.microsoft"
PRODUCTS = (("", "MatMul"), ("", "Gemm"), (VENDOR, "FusedMatMul"))
VENDOR_PRODUCTS = ((VENDOR, "MatMulBnb4"), (VENDOR, "MatMulNBits"))

STANDARD = ("", "ai.onnx")
FOUR_BITS = frozenset({TensorProto.INT4, TensorProto.UINT4})
#: How a table is read by codes; GatherND is PyTorch's table[codes].
LOOKUPS = ("Gather", "GatherND")
_TYPES = {number: name for name, number in TensorProto.DataType.items()}
_INTEGERS = frozenset(number for number, name in _TYPES.items() if name.removeprefix("U").startswith("INT"))
#: Attributes of a Constant that hold numbers, besides `value`: where, and of which type.
_NUMBERS = {"value_int": ("i", 7), "value_ints": ("ints", 7), "value_float": ("f", 1), "value_floats": ("floats", 1)}
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
# Operators whose inputs after the first say where or how, and are not themselves part of the values.
_PLACING = frozenset(
    {
        "Cast",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Slice",
        "Expand",
        "Tile",
        "Pad",
        "Gather",
        "GatherElements",
        "GatherND",
    }
    | {"Transpose", "Flatten", "Split", "Resize", "DequantizeLinear", "Identity", "CastLike", "TopK", "Compress"}
)


class Refuse(Exception):  # noqa: N818 - a verdict on a chain, not an error
    """The walk stopped: one sentence, and the node (or tensor) where."""

    def __init__(self, reason: str, at: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at


class Argument:
    """A formal input: of a graph, a subgraph or a function."""


ARGUMENT = Argument()
Definition = NodeProto | TensorProto | SparseTensorProto | Argument


@dataclass(eq=False)
class Scope:
    """The names of one graph, subgraph or function body, and where it stands."""

    body: GraphProto | FunctionProto
    parent: Scope | None
    function: int | None
    path: tuple[Step, ...]
    prefix: str
    opset: int
    nodes: list[NodeProto] = field(default_factory=list)
    names: dict[str, Definition] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)
    overridable: set[str] = field(default_factory=set)

    def title(self, node: NodeProto) -> str:
        """The node's name as reported, with its path in front."""
        return self.prefix + (node.name or f"{node.op_type}:{next(iter(node.output), '')}")


class Value(NamedTuple):
    """A name and the scope that defines it."""

    scope: Scope
    name: str

    @property
    def definition(self) -> Definition:
        """The node that makes it, its tensor, or ARGUMENT."""
        return self.scope.names[self.name]


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """A node in its scope."""

    scope: Scope
    node: NodeProto
    index: int = -1  # where it is a product

    @property
    def title(self) -> str:
        """The node's name as reported."""
        return self.scope.title(self.node)

    @property
    def site(self) -> Site:
        """Where a product stands."""
        return Site(self.title, self.scope.function, self.scope.path, self.index)

    def refuse(self, sentence: str) -> NoReturn:
        """Stop the walk at this node."""
        raise Refuse(f"{sentence}, at node '{self.title}'", self.title)

    def require(self, fact: bool, sentence: str, *values: object) -> None:
        """Stop the walk at this node unless the fact holds. values: put into the sentence's {} only then."""
        if not fact:
            self.refuse(sentence.format(*values) if values else sentence)


class Constant(NamedTuple):
    """A constant value: its name where the chain reads it, and its tensor (one a call site for a formal input)."""

    name: str
    tensors: tuple[TensorProto, ...]

    @property
    def types(self) -> set[int]:
        """The types that it can have."""
        return {tensor.data_type for tensor in self.tensors}

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes that it can have."""
        return {tuple(tensor.dims) for tensor in self.tensors}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, where there is one."""
        (shape,) = self.shapes
        return shape

    def __str__(self) -> str:
        kinds = {f"{type_name(tensor.data_type)} {list(tensor.dims)}" for tensor in self.tensors}
        return f"'{self.name}', {' or '.join(sorted(kinds))},"


class Literal(NamedTuple):
    """An INT64 literal."""

    values: tuple[int, ...]
    dims: tuple[int, ...]

    def is_list(self, value: int) -> bool:
        """Whether it is [value], of rank 1."""
        return self.values == (value,) and self.dims == (1,)

    def is_one(self, *values: int) -> bool:
        """Whether it is one of the values, of shape [] or [1]."""
        return self.dims in ((), (1,)) and self.values[0] in values

    @property
    def one(self) -> str:
        """Its text where one number is wanted, for which [1] is as good as []."""
        return str(self.values[0]) if self.dims == (1,) else str(self)

    def __str__(self) -> str:
        if not self.dims:
            return str(self.values[0])
        return str(list(self.values)) + (f" of shape {list(self.dims)}" if len(self.dims) > 1 else "")


class Origin(NamedTuple):
    """What a value is computed from."""

    constant: bool  # from constants only
    decodes: bool = False  # passes a Gather, or a Mul or DequantizeLinear fed by integers
    integers: bool = False  # integers are among its data


class Walk:
    """The scopes of one model, and memoized answers about their values."""

    def __init__(
        self,
        model: onnx.ModelProto,
        vendor: bool = False,
        wanted: Collection[tuple[str, str]] = PRODUCTS,
        tensors: Tensors | None = None,
    ) -> None:
        self.model = model
        self.tensors = tensors  # reads literals that are external data
        self.wanted = {*wanted, *(VENDOR_PRODUCTS if vendor else ())}
        self.products: list[Place] = []  # in graph order
        self.scopes: list[Scope] = []
        self.functions = {(_domain(f.domain), f.name, f.overload): i for i, f in enumerate(model.functions)}
        self.calls: dict[int, list[Place]] = {index: [] for index in range(len(model.functions))}
        self._origins: dict[Value, Origin] = {}
        self._sources: dict[Value, Value] = {}
        self._bound: dict[Value, tuple[TensorProto, ...]] = {}
        self._enter(model.graph, None, "", model.opset_import)
        self.function_scopes = [
            self._enter(f, index, f"function {f.domain}::{f.name}{':' * bool(f.overload)}{f.overload}/", f.opset_import)
            for index, f in enumerate(model.functions)
        ]

    # Scopes

    def _enter(self, body: GraphProto | FunctionProto, function: int | None, prefix: str, imports: Any) -> Scope:
        """Read a body and its subgraphs, in graph order."""
        versions = {entry.version for entry in imports if entry.domain in STANDARD}
        root = self._scope(body, None, function, (), prefix, versions.pop() if len(versions) == 1 else 0)
        waiting: list[tuple[Scope, Iterator[tuple[int, NodeProto]]]] = [(root, iter(enumerate(root.nodes)))]
        while waiting:
            scope, nodes = waiting[-1]
            for index, node in nodes:
                place = Place(scope, node, index)
                if (_domain(node.domain), node.op_type) in self.wanted:
                    self.products.append(place)
                callee = self.functions.get((_domain(node.domain), node.op_type, node.overload))
                if callee is not None:
                    self.calls[callee].append(place)
                inner = [(at, entry) for at, entry in enumerate(node.attribute) if entry.type == AttributeProto.GRAPH]
                for position, attribute in reversed(inner):
                    path = (*scope.path, (index, position))
                    below = abridged(f"{scope.title(node)}/{attribute.name}/")
                    child = self._scope(attribute.g, scope, function, path, below, scope.opset)
                    waiting.append((child, iter(enumerate(child.nodes))))
                if inner:
                    break
            else:
                waiting.pop()
        return root

    def _scope(
        self, body: Any, parent: Scope | None, function: int | None, path: Any, prefix: str, opset: int
    ) -> Scope:
        """Collect the names that one body defines."""
        scope = Scope(body, parent, function, path, prefix, opset, list(body.node))
        self.scopes.append(scope)
        names = scope.names
        if isinstance(body, FunctionProto):
            names.update(dict.fromkeys(body.input, ARGUMENT))
        else:
            names.update({value.name: ARGUMENT for value in body.input})
            listed = set(names)
            if self.model.ir_version >= 4:
                scope.overridable = listed & {tensor.name for tensor in body.initializer}
            for name, tensor in self._tensors(body):
                if name in names and name not in listed:
                    scope.twice.add(name)
                listed.discard(name)
                names[name] = tensor
        for node in scope.nodes:
            for name in node.output:
                if name in names:
                    scope.twice.add(name)
                names[name] = node
        return scope

    @staticmethod
    def _tensors(graph: GraphProto) -> Iterator[tuple[str, TensorProto | SparseTensorProto]]:
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
        yield from ((sparse.values.name, sparse) for sparse in graph.sparse_initializer)

    def lookup(self, scope: Scope | None, name: str) -> Value | None:
        """The value that `name` means in `scope`, its own or captured; None where there is none."""
        while scope is not None and name not in scope.names:
            scope = scope.parent
        return None if scope is None or not name else Value(scope, name)

    def find(self, scope: Scope, name: str, at: Place) -> Value:
        """The value that `name` means in `scope`; refuses a name with no meaning or with more than one."""
        found = self.lookup(scope, name)
        if found is None:
            at.refuse(f"value '{name}' is not defined")
        if name in found.scope.twice or self.lookup(found.scope.parent, name) is not None:
            at.refuse(f"value '{name}' is defined more than once, and each name must have one meaning")
        return found

    # Values

    def source(self, value: Value, at: Place) -> Value:
        """The value behind any Identity nodes."""
        if getattr(value.definition, "op_type", "") != "Identity":
            return value
        passed: list[Value] = []
        met: set[Value] = set()
        while value not in self._sources:
            node = value.definition
            if not isinstance(node, NodeProto) or not self.is_standard(node, "Identity"):
                break
            check(Place(value.scope, node))
            if value in met:
                at.refuse(f"the Identity of value '{value.name}' reads its own output, a cycle")
            met.add(value)
            passed.append(value)
            value = self.find(value.scope, node.input[0], at)
        end = self._sources.get(value, value)
        self._sources.update(dict.fromkeys(passed, end))
        return end

    def is_standard(self, node: NodeProto, op: str) -> bool:
        """Whether the node is the ONNX operator `op`, not a model's own function of that name."""
        return node.op_type == op and node.domain in STANDARD and not self.is_own(node)

    def is_own(self, node: NodeProto) -> bool:
        """Whether the node calls a function of the model."""
        return (_domain(node.domain), node.op_type, node.overload) in self.functions

    def origin(self, value: Value) -> Origin:
        """What the value is computed from, through the nodes before it."""
        waiting: list[Value] = [value]
        opened: dict[Value, list[Value]] = {}
        while waiting:
            current = waiting[-1]
            if current in self._origins:
                waiting.pop()
            elif current not in opened:
                opened[current] = self.before(current)
                waiting += [earlier for earlier in opened[current] if earlier not in self._origins]
            else:  # a cycle's open end and a name with two meanings count as constant: the walk refuses them in words
                known = [self._origins.get(earlier, Origin(True)) for earlier in opened[current]]
                origin = self._combine(current, known)
                twice = current.name in current.scope.twice
                self._origins[current] = origin._replace(constant=True) if twice else origin
        return self._origins[value]

    def decoded(self, value: Value) -> bool:
        """Whether the value is computed from constants only, through a lookup or a scaling of integers."""
        origin = self.origin(value)
        return origin.constant and origin.decodes

    def before(self, value: Value) -> list[Value]:
        """The values that a value's node reads."""
        node = value.definition
        if not isinstance(node, NodeProto):
            return []
        found = (self.lookup(value.scope, name) for name in node.input if name)
        return [earlier for earlier in found if earlier is not None]

    def _combine(self, value: Value, before: list[Origin]) -> Origin:
        node = value.definition
        if isinstance(node, Argument):
            # What a function's callers give may be constant; `constant` looks, and says so where it is not.
            return Origin(value.scope.function is not None and value.scope.parent is None)
        if isinstance(node, TensorProto):
            return Origin(True, False, node.data_type in _INTEGERS)
        if isinstance(node, SparseTensorProto):
            return Origin(True)
        if node.op_type == "Constant":
            return Origin(True, False, any(a.HasField("t") and a.t.data_type in _INTEGERS for a in node.attribute))
        if (
            not before
            or len(before) < sum(map(bool, node.input))
            or node.op_type in _RANDOM
            or any(a.type == AttributeProto.GRAPH for a in node.attribute)
        ):
            return Origin(False)
        if node.op_type in ("Shape", "Size"):
            return Origin(before[0].constant)
        data = before[:1] if node.op_type in _PLACING else before
        integers = any(origin.integers for origin in data)
        decodes = node.op_type in LOOKUPS or (node.op_type in ("Mul", "DequantizeLinear") and integers)
        if node.op_type == "DequantizeLinear":  # a formal input's type is not written, and floats are rare here
            first = self.lookup(value.scope, "".join(node.input[:1]))
            decodes |= first is not None and isinstance(first.definition, Argument)
        callee = self.functions.get((_domain(node.domain), node.op_type, node.overload))
        if callee is not None:
            decodes = any(
                inner.op_type in (*LOOKUPS, "DequantizeLinear") for inner in self.model.functions[callee].node
            )
        return Origin(
            all(origin.constant for origin in before), decodes or any(origin.decodes for origin in data), integers
        )

    # Constants

    def constant(self, value: Value, at: Place) -> Constant:
        """The tensor of an initializer, of a Constant node, or of what every call site binds to a formal input."""
        value = self.source(value, at)
        return Constant(value.name, self._bindings(value, at))

    def _bindings(self, value: Value, at: Place) -> tuple[TensorProto, ...]:
        """Tensors that a value can be: one, or for a function's formal input one a call site."""
        if value in self._bound:
            return self._bound[value]
        tensors: dict[int, TensorProto] = {}
        waiting, seen = [(value, at)], {value}
        while waiting:
            current, reader = waiting.pop()
            scope = current.scope
            if not isinstance(current.definition, Argument) or scope.function is None or scope.parent is not None:
                tensor = self._tensor(current, reader)
                tensors[id(tensor)] = tensor
                continue
            assert isinstance(scope.body, FunctionProto)
            title = f"{scope.body.domain}::{scope.body.name}"
            position = list(scope.body.input).index(current.name)
            if not self.calls[scope.function]:
                reader.refuse(f"'{current.name}' is an input of function {title}, which no node calls")
            for call in reversed(self.calls[scope.function]):
                if position >= len(call.node.input) or not call.node.input[position]:
                    call.refuse(f"the call of function {title} gives no '{current.name}'; an initializer is expected")
                bound = self.source(self.find(call.scope, call.node.input[position], call), call)
                if bound not in seen:
                    seen.add(bound)
                    waiting.append((bound, call))
        return self._bound.setdefault(value, tuple(tensors.values()))

    def _tensor(self, value: Value, at: Place) -> TensorProto:
        """The tensor of an initializer or a Constant node."""
        found = value.definition
        if isinstance(found, TensorProto):
            if value.name in value.scope.overridable:
                at.refuse(f"initializer '{value.name}' is also a graph input, which callers can override")
            return found
        if isinstance(found, SparseTensorProto):
            at.refuse(f"initializer '{value.name}' is sparse; a dense one is expected")
        if isinstance(found, Argument):
            at.refuse(f"'{value.name}' is an input of its graph; an initializer or a Constant is expected")
        if not self.is_standard(found, "Constant"):
            at.refuse(f"'{value.name}' is computed by {found.op_type}; an initializer or a Constant is expected")
        return _constant_tensor(Place(value.scope, found))


def check(place: Place, free: Collection[str] = ()) -> None:
    """Refuse a node with inputs, outputs or attributes that onnx's schema, of the scope's version, does not have.

    An attribute at its default counts as absent; one at another value is refused unless it is `free`.
    """
    node, opset = place.node, place.scope.opset
    if opset not in OPSETS:
        place.refuse(f"opset {opset}, not {OPSETS[0]} to {OPSETS[-1]}")
    try:
        least, most, attributes = _signature(node.op_type, opset)
    except onnx.defs.SchemaError:
        place.refuse(f"{node.op_type}, which opset {opset} does not have")
    if not least <= len(node.input) <= most:
        place.refuse(f"{node.op_type} with {len(node.input)} inputs, not {least} to {most}")
    if len(node.output) != 1:
        place.refuse(f"{node.op_type} with {len(node.output)} outputs, not one")
    for written in node.attribute:
        name = written.name
        if name not in attributes:
            place.refuse(f"{node.op_type} with unknown attribute '{name}'")
        kind, default = attributes[name]
        if written.ref_attr_name:
            place.refuse(f"{node.op_type} with {name} taken from the function's attribute '{written.ref_attr_name}'")
        if written.type != kind:
            place.refuse(f"{node.op_type} with {name} of another type than {AttributeProto.AttributeType.Name(kind)}")
        if name in free:
            continue
        value = onnx.helper.get_attribute_value(written)
        if value != default:
            place.refuse(f"{node.op_type} with {name} {_text(value)}, not {_text(default)}")


def attribute(place: Place, name: str, absent: Any = None) -> Any:
    """Value of a checked node's attribute; one that is written twice must say the same twice."""
    values = [onnx.helper.get_attribute_value(a) for a in place.node.attribute if a.name == name]
    if any(value != values[0] for value in values):
        place.refuse(f"{place.node.op_type} with attribute '{name}' written twice")
    return values[0] if values else absent


def worth_a_walk(model: onnx.ModelProto, vendor: bool) -> bool:
    """Whether the model has a 4-bit tensor, or an operator that takes a nibble or an integer weight apart.

    Others are not walked.
    Codes that lie one an element need none: there a Gather is one, where a table of 16 floats is in the model.
    """
    signs = {"Mod", "BitwiseAnd", "DequantizeLinear", *(op for _, op in VENDOR_PRODUCTS if vendor)}
    waiting: list[Any] = [model.graph, *model.functions]
    gathers = tables = False
    while waiting:
        body = waiting.pop()
        if isinstance(body, GraphProto):
            tables = tables or any(map(_is_table, body.initializer))
            if any(tensor.data_type in FOUR_BITS for tensor in body.initializer):
                return True
        for node in body.node:
            if node.op_type in signs:
                return True
            gathers |= node.op_type in LOOKUPS
            for written in node.attribute:
                if written.type == AttributeProto.GRAPH:
                    waiting.append(written.g)
                elif node.op_type == "Constant":
                    if written.t.data_type in FOUR_BITS:
                        return True
                    tables |= _is_table(written.t) or len(written.floats) == LITERAL_ELEMENTS
    return gathers and tables


def _is_table(tensor: TensorProto) -> bool:
    return tensor.data_type in DTYPE_NAME and list(tensor.dims) == [LITERAL_ELEMENTS]


def type_name(number: int) -> str:
    """FLOAT, UINT8, ...: a type as ONNX names it."""
    return _TYPES.get(number, f"type {number}")


def _constant_tensor(place: Place) -> TensorProto:
    """The tensor that a Constant node holds, in any of the attributes that hold numbers."""
    for written in place.node.attribute:
        held = written.name in ("value", *_NUMBERS)
        place.require(held, "Constant with {}; value, value_int(s) or value_float(s) is expected", written.name)
    check(place, ("value", *_NUMBERS))
    place.require(len(place.node.attribute) == 1, "Constant with {} attributes, not one", len(place.node.attribute))
    written = place.node.attribute[0]
    if written.name == "value":
        return written.t
    member, kind = _NUMBERS[written.name]
    values = getattr(written, member)
    many = written.name.endswith("s")
    held = TensorProto(data_type=kind, dims=[len(values)] if many else [])
    (held.int64_data if kind == TensorProto.INT64 else held.float_data).extend(values if many else [values])
    return held


@functools.cache
def _signature(op: str, opset: int) -> tuple[int, int, dict[str, tuple[int, Any]]]:
    """Of an ONNX operator: the least and most inputs, and each attribute's type and default (None: it has none)."""
    schema = onnx.defs.get_schema(op, opset, "")
    attributes = {
        name: (
            int(known.type.value),  # type: ignore[attr-defined]
            onnx.helper.get_attribute_value(known.default_value) if known.default_value.type else None,
        )
        for name, known in schema.attributes.items()
    }
    return schema.min_input, schema.max_input, attributes


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _domain(domain: str) -> str:
    return "" if domain in STANDARD else domain
