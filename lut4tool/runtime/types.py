"""What the standard's schemas say of types: which an operator takes, and which its results have.

A type is a text as ONNX writes it: "tensor(float)", "seq(tensor(int64))"; None is one that is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto

from lut4tool.runtime.backend import mx
from lut4tool.runtime.choices import CHOICES
from lut4tool.runtime.dtypes import BY_NUMBER, TYPES
from lut4tool.runtime.functions import schema_of
from lut4tool.runtime.graph import Graph
from lut4tool.runtime.registry import Operator
from lut4tool.runtime.scope import Site

#: The standard's domains.
STANDARD = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
#: Attributes that name the type of a result that no input tells.
_NAMING = ("to", "dtype", "output_dtype")
#: Attributes that are numbers of types; 0 says no type in the last two.
_NUMBERS = {"to", "dtype", "stash_type", "softmax_precision", "output_dtype", "precision"}
_OPTIONAL = {"output_dtype", "precision"}
#: Where the results of a control operator begin among those of its body.
_BODIES = {"If": 0, "Loop": 1, "Scan": 0}


#: What an attribute's value is, by its type; others are passed on as they are.
_VALUES: dict[str, Any] = {"INT": int, "FLOAT": float, "STRING": str, "TENSOR": np.ndarray, "GRAPH": Graph}

_BY_TEXT = {f"tensor({row.name})": row for row in TYPES}
#: The types below a byte that MLX converts (ops/codes.py).
_CODES = {
    "int4", "uint4", "int2", "uint2", "float4e2m1", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True)
class Formal:
    """A formal input or output; variable: shared by all that must have one type, "" where it may have any."""

    name: str
    variable: str
    types: frozenset[str]
    variadic: bool


@dataclass(frozen=True)
class Signature:
    """An operator's formal inputs and outputs at one version, its attributes' types, and which must be there."""

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, str]
    required: frozenset[str]


@cache
def signature(domain: str, name: str, version: int) -> Signature | None:
    """The schema in force at a version, None where the standard has none."""
    schema: Any = schema_of(domain, name, version)
    if schema is None:
        return None
    variables = {constraint.type_param_str for constraint in schema.type_constraints}

    def formal(entry: Any) -> Formal:
        variadic = entry.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        shared = entry.type_str in variables and (entry.is_homogeneous or not variadic)
        return Formal(entry.name, entry.type_str if shared else "", frozenset(entry.types), variadic)

    attributes = {name: entry.type.name for name, entry in schema.attributes.items()}
    required = frozenset(name for name, entry in schema.attributes.items() if entry.required)
    return Signature(tuple(map(formal, schema.inputs)), tuple(map(formal, schema.outputs)), attributes, required)


@cache
def signatures(row: Operator) -> tuple[Signature, ...]:
    """Those of every version that a row serves, the newest first."""
    found, version = [], row.until
    while version >= row.since:
        schema, known = schema_of(row.domain, row.name, version), signature(row.domain, row.name, version)
        if schema is None or known is None:
            break
        found.append(known)
        version = schema.since_version - 1
    return tuple(found)


def first_version(row: Operator) -> int:
    """The oldest version that a row serves and the standard has."""
    version, newest = row.since, schema_of(row.domain, row.name, row.until)
    while newest is not None and schema_of(row.domain, row.name, version) is None and version < newest.since_version:
        version += 1
    return version


@cache
def taken(row: Operator) -> tuple[frozenset[str], ...]:
    """The types that each input of a row may have at some version of its range: its function is the same for all."""
    columns: list[frozenset[str]] = []
    for known in signatures(row):
        for index, formal in enumerate(known.inputs):
            columns[index:] = [
                formal.types | (columns[index] if index < len(columns) else frozenset()),
                *columns[index + 1 :],
            ]
    return tuple(columns)


def exists(domain: str, name: str, version: int) -> bool:
    """Whether the standard, where it is about this operator, has it at this version."""
    return not onnx.defs.has(name, domain) or schema_of(domain, name, version) is not None


def _spread(formals: Sequence[Formal], count: int) -> list[Formal]:
    """One formal for each of `count` actual values."""
    if not formals:
        return []
    more = count - len(formals) if formals[-1].variadic else 0
    return [*formals, *[formals[-1]] * more][:count]


def faults(row: Operator, site: Site) -> Iterator[str]:
    """What of a node its schema does not allow: attributes, outputs, types of inputs; a type that is not known fits."""
    known = signature(row.domain, row.name, site.version)
    if known is None:
        return
    yield from _attribute_faults(row, site, known)
    if len(site.outputs) > len(known.outputs) and not (known.outputs and known.outputs[-1].variadic):
        yield f"has at most {len(known.outputs)} outputs, not {len(site.outputs)}"
    yield from _type_faults(row, [value.type for value in site.inputs])


def _attribute_faults(row: Operator, site: Site, known: Signature) -> Iterator[str]:
    for name in sorted(known.required - site.attributes.keys()):
        yield f"needs the attribute '{name}'"
    mistyped = set()
    for attribute in site.node.attribute:
        found, wanted = AttributeProto.AttributeType.Name(attribute.type), known.attributes.get(attribute.name)
        if wanted not in (None, found):
            mistyped.add(attribute.name)
            yield f"has an attribute '{attribute.name}' of type {found}, not {wanted}"
    for name, given in site.attributes.items():
        if name in mistyped or row.domain not in STANDARD:
            continue
        if not _is(given, known.attributes.get(name, "")):
            yield f"has an attribute '{name}' that its function's caller gives as {type(given).__name__}"
            continue
        words = CHOICES.get((row.name, name), ())
        if words and (not isinstance(given, str) or given not in words):
            yield f"has {name} '{given}', which is none of {', '.join(words)}"
        named = isinstance(given, int) and (given in BY_NUMBER or (given == 0 and name in _OPTIONAL))
        if name in _NUMBERS and not named:  # a reference to a function's attribute may be of any type
            yield f"has {name} {given}, which is the number of no type that is served"


def _is(value: Any, wanted: str) -> bool:
    """Whether a value is of an attribute's type: a reference to a function's attribute may be of any."""
    if wanted.endswith("S"):
        return isinstance(value, list) and all(_is(part, wanted[:-1]) for part in value)
    kind = _VALUES.get(wanted)
    return kind is None or (isinstance(value, kind) and type(value) is not bool)


def _type_faults(row: Operator, given: Sequence[str | None]) -> Iterator[str]:
    formals, allowed = signatures(row)[0].inputs, taken(row)
    bound: dict[str, tuple[str, str]] = {}
    for index, (formal, kind) in enumerate(zip(_spread(formals, len(given)), given, strict=False)):
        if kind is None:
            continue
        types = allowed[min(index, len(formals) - 1)]
        if kind not in types:
            yield f"takes no {kind} as its input '{formal.name}', only {listed(types)}"
            continue
        name, first = bound.setdefault(formal.variable, (formal.name, kind)) if formal.variable else ("", kind)
        if first != kind:
            yield f"wants one type for its inputs '{name}' and '{formal.name}', not {first} and {kind}"


def results(
    row: Operator, version: int, given: Sequence[str | None], attributes: Mapping[str, Any], count: int
) -> list[str | None]:
    """The types of a node's `count` outputs, as far as its schema and its bodies tell."""
    if row.name in _BODIES and not row.domain:
        body = attributes.get("body") or attributes.get("then_branch")
        types = [type_text(proto) for proto in getattr(body, "types", ())][_BODIES[row.name] :]
        return [*types, *[None] * count][:count]
    known = signature(row.domain, row.name, version)
    if known is None:
        return [None] * count
    bound: dict[str, str] = {}
    for formal, kind in zip(_spread(known.inputs, len(given)), given, strict=False):
        if kind is not None and formal.variable:
            bound.setdefault(formal.variable, kind)
    numbers = [attributes.get(name) for name in _NAMING]
    named = next((number for number in numbers if isinstance(number, int) and number in BY_NUMBER), None)
    found = [_result(formal, bound, named) for formal in _spread(known.outputs, count)]
    return [*found, *[None] * (count - len(found))]


def _result(formal: Formal, bound: Mapping[str, str], named: int | None) -> str | None:
    if formal.variable in bound:
        return bound[formal.variable]
    if len(formal.types) == 1:
        return next(iter(formal.types))
    text = f"tensor({BY_NUMBER[named].name})" if named is not None else ""
    return text if text in formal.types else None


def on_host(row: Operator, outputs: int, kinds: Iterable[str | None], device: Any) -> bool:
    """Whether an operator on values of these types runs on the host, whatever the device: `host` in a plan."""
    return 0 < row.on_host <= outputs or any(kind is not None and _hosted(kind, row.codes, device) for kind in kinds)


def _hosted(kind: str, codes: bool, device: Any) -> bool:
    element = _BY_TEXT.get(kind)
    if element is None:  # a sequence, an optional or a map
        return True
    if element.mlx is None:
        return not codes or element.name not in _CODES
    return element.name == "double" and device.type == mx.gpu


def type_text(proto: onnx.TypeProto) -> str | None:
    """A type as ONNX writes it, None where it is not whole."""
    kind = proto.WhichOneof("value")
    if kind in ("optional_type", "sequence_type"):
        inner = type_text(getattr(proto, kind).elem_type)
        return inner and f"{'optional' if kind == 'optional_type' else 'seq'}({inner})"
    if kind == "map_type":
        inner = type_text(proto.map_type.value_type)
        key = BY_NUMBER.get(proto.map_type.key_type)
        return f"map({key.name},{inner})" if inner and key else None
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return None
    element = BY_NUMBER.get(getattr(proto, kind).elem_type)
    start = "tensor" if kind == "tensor_type" else "sparse_tensor"
    return f"{start}({element.name})" if element else None


def number(kind: str | None) -> int | None:
    """The number of a tensor's element type, None where it is not known or no tensor's."""
    return _BY_TEXT[kind].number if kind in _BY_TEXT else None


def listed(types: Iterable[str]) -> str:
    """Types in the order of the standard's numbers, tensors by their element type alone."""
    wanted = set(types)
    tensors = [row.name for row in TYPES if f"tensor({row.name})" in wanted]
    others = sorted(text for text in wanted if not text.startswith("tensor("))
    return ", ".join(tensors + others)
