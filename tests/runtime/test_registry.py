"""The registry against onnx.defs: a row's function has the inputs and attributes of every version that it claims."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper
from onnx.defs import OpSchema
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from lut4tool.formats import DOMAIN
from lut4tool.runtime import registry
from lut4tool.runtime.registry import NEWEST, Operator

registry.load()

#: Versions below this are not promised: their broadcasting and test modes are attributes of their own (ops/early.py).
OLDEST = 7
STANDARD = {"", "ai.onnx.ml", "ai.onnx.preview.training"}

#: onnxruntime's own operators: those of com.microsoft, and one that it puts in the standard's domain.
MICROSOFT = {s.name: s for s in get_all_operator_schema() if s.domain == "com.microsoft"}
STRANGERS = {s.name: s for s in get_all_operator_schema() if s.name == "SimplifiedLayerNormalization"}

#: Attributes that a row leaves out, so that the plan refuses a node that has them.
REFUSED = {}

ROWS = [row for row in registry.operators() if row.name not in STRANGERS]
CONTRIB = [row for row in registry.operators() if row.domain == "com.microsoft" or row.name in STRANGERS]
Option = OpSchema.FormalParameterOption


def row_id(row: Operator) -> str:
    return f"{row.domain}::{row.name}-{row.since}"


def schemas_in(row: Operator) -> list[OpSchema]:
    """Every schema in force at some version of the row's range, oldest first, from OLDEST on where it goes so far."""
    history = [s for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == (row.domain, row.name)]
    history.sort(key=lambda schema: schema.since_version)
    start = max(row.since, OLDEST) if row.domain == "" and row.until >= OLDEST else row.since
    nexts = [schema.since_version for schema in history[1:]] + [NEWEST + 1]
    return [s for s, after in zip(history, nexts, strict=True) if s.since_version <= row.until and after > start]


def default_of(attribute: OpSchema.Attribute) -> Any:
    """The attribute's default as a signature has it: empty where required, None where there is none."""
    if attribute.required:
        return inspect.Parameter.empty
    if attribute.default_value.type == AttributeProto.UNDEFINED:
        return None
    value = helper.get_attribute_value(attribute.default_value)
    if isinstance(value, list):
        return [part.decode() if isinstance(part, bytes) else part for part in value]
    return value.decode() if isinstance(value, bytes) else value


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float) and isinstance(ours, float | int):
        return bool(np.float32(ours) == np.float32(theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def input_faults(row: Operator, schema: OpSchema, newest: bool) -> Iterator[str]:
    ours, theirs = row.inputs, schema.inputs
    if len(ours) < len(theirs) or (newest and len(ours) > len(theirs)):
        yield f"has {len(ours)} inputs, version {schema.since_version} has {len(theirs)}"
    for parameter, formal in zip(ours, theirs, strict=False):
        variadic = parameter.kind is parameter.VAR_POSITIONAL
        optional = not variadic and parameter.default is None
        if variadic != (formal.option == Option.Variadic):
            yield f"input {parameter.name}: variadic is {variadic}, not so in version {schema.since_version}"
        if not variadic and optional != (formal.option == Option.Optional) and (newest or not optional):
            yield f"input {parameter.name}: optional is {optional}, not so in version {schema.since_version}"
    for parameter in ours[len(theirs) :]:
        if parameter.default is parameter.empty:
            yield f"input {parameter.name} is required, and absent in version {schema.since_version}"


def attribute_faults(row: Operator, schema: OpSchema, newest: bool) -> Iterator[str]:
    ours = {name: parameter.default for name, parameter in row.attributes.items()}
    theirs = {name: default_of(attribute) for name, attribute in schema.attributes.items()}
    for name in theirs.keys() - ours.keys():
        yield f"lacks the attribute {name} of version {schema.since_version}"
    for name in ours.keys() & theirs.keys():
        relaxed = not newest and theirs[name] is inspect.Parameter.empty and ours[name] is None
        if ours[name] is not theirs[name] and not relaxed and not same(ours[name], theirs[name]):
            yield f"attribute {name} has the default {ours[name]!r}, in version {schema.since_version} {theirs[name]!r}"


@pytest.mark.parametrize("row", [row for row in ROWS if row.domain in STANDARD], ids=row_id)
def test_a_row_fits_every_schema_of_its_range(row: Operator) -> None:
    """Inputs are the newest's and attributes those of all; an older one may lack some, which are optional here."""
    schemas = schemas_in(row)
    assert schemas, f"the standard has no {row.name} at versions {row.since} to {row.until}"
    most = max(schema.max_input for schema in schemas)
    faults = [f"host position {position} is no input" for position in row.host if position >= most]
    if not row.planned:
        unknown = row.attributes.keys() - {name for schema in schemas for name in schema.attributes}
        faults += [f"has the attribute {name}, which no version in its range has" for name in unknown]
    for schema in schemas:
        if not row.planned:
            faults += input_faults(row, schema, newest=schema is schemas[-1])
            faults += attribute_faults(row, schema, newest=schema is schemas[-1])
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("key", "rows"),
    [(key, list(rows)) for key, rows in groupby(ROWS, key=lambda row: (row.domain, row.name)) if key[0] in STANDARD],
    ids=lambda value: "::".join(value) if isinstance(value, tuple) else "",
)
def test_an_operator_is_served_from_its_first_version_to_the_newest(key: tuple[str, str], rows: list[Operator]) -> None:
    history = [s for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == key]
    living = [s.since_version for s in history if not s.deprecated]
    assert living, f"the standard has no {key[1]}"
    first = max(min(living), OLDEST if key[0] == "" else 1)
    removed = [s.since_version for s in history if s.deprecated]
    last = max(removed) - 1 if removed and max(removed) > max(living) else NEWEST
    assert rows[0].since <= first, f"versions {first} to {rows[0].since - 1} are missing"
    for before, after in pairwise(rows):
        assert after.since == before.until + 1, f"versions {before.until + 1} to {after.since - 1} are missing"
    assert rows[-1].until >= last


@pytest.mark.parametrize("row", CONTRIB, ids=row_id)
def test_a_row_of_com_microsoft_fits_onnxruntimes_schema(row: Operator) -> None:
    """Version 1 is the only one there is; a planned operator checks its attributes by itself."""
    schema = (MICROSOFT if row.domain else STRANGERS)[row.name]
    theirs = {name: contrib_default(attribute) for name, attribute in schema.attributes.items()}
    refused = REFUSED.get(row.name, set())
    assert refused <= theirs.keys()
    if row.planned:
        return
    assert [str(fault) for fault in contrib_input_faults(row, schema)] == []
    ours = {name: parameter.default for name, parameter in row.attributes.items()}
    assert ours.keys() == theirs.keys() - refused
    different = [n for n, value in ours.items() if value is not theirs[n] and not same(value, theirs[n])]
    assert not different, [(name, ours[name], theirs[name]) for name in different]


def contrib_default(attribute: Any) -> Any:
    """The default in a schema that onnxruntime describes: an AttributeProto's bytes, none where there is none."""
    if attribute.required:
        return inspect.Parameter.empty
    proto = AttributeProto.FromString(attribute._default_value)
    if proto.type == AttributeProto.UNDEFINED:
        return None
    value = helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


def contrib_input_faults(row: Operator, schema: Any) -> Iterator[str]:
    if len(row.inputs) > len(schema.inputs):
        yield f"has {len(row.inputs)} inputs, not {len(schema.inputs)}"
    for parameter, formal in zip(row.inputs, schema.inputs, strict=False):
        option = str(formal.option).rsplit(".", 1)[-1]
        variadic = parameter.kind is parameter.VAR_POSITIONAL
        if variadic != (option == "Variadic"):
            yield f"input {parameter.name}: variadic is {variadic}"
        elif not variadic and (parameter.default is None) != (option == "Optional"):
            yield f"input {parameter.name}: it is {option.lower()}"
    for formal in schema.inputs[len(row.inputs) :]:
        if str(formal.option).rsplit(".", 1)[-1] != "Optional":
            yield f"lacks the input {formal.name}"


def test_the_standard_is_served_but_for_what_is_refused_with_a_reason() -> None:
    unserved = {
        (schema.domain, schema.name)
        for schema in onnx.defs.get_all_schemas()
        if not (schema.deprecated or schema.has_function or schema.has_context_dependent_function)
        and registry.find(schema.domain, schema.name, NEWEST) is None
    }
    assert unserved == set(registry.REFUSED)


def test_a_check_says_what_it_refuses() -> None:
    assert [row.name for row in ROWS if row.check is not None and not row.refused.startswith("Refuse")] == []


def test_no_row_is_of_an_unknown_domain() -> None:
    assert {row.domain for row in ROWS} <= {*STANDARD, "com.microsoft", DOMAIN}


def test_overlapping_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        registry.op("Constant", since=5, until=6)(lambda: None)
