"""The function bodies that ONNX gives for its own operators, for those that no row serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper
from onnx.defs import OpSchema

from lut4tool.runtime.registry import Unsupported


def schema_of(domain: str, name: str, version: int) -> OpSchema | None:
    """The schema in force at an opset version, None where the standard has none."""
    known = 0 <= version < 1 << 31 and onnx.defs.has(name, version, domain)  # onnx takes no other numbers
    return onnx.defs.get_schema(name, version, domain) if known else None


def is_random(schema: Any) -> bool:
    """Whether the operator draws random numbers: it gives another result at each call."""
    return bool(schema.non_deterministic)


# onnx's type stubs lack the schema's functions, hence Any.
def body_of(
    node: onnx.NodeProto, schema: Any, version: int, elements: Sequence[int | None]
) -> onnx.FunctionProto | None:
    """The body that the schema gives for this node, None where it gives none.

    elements: the element type of each input, 0 for one that is left out, which the body may depend on (None: not known,
    then such a body is not made). Raises Unsupported where onnx cannot make one of a malformed node.
    """
    usable = [at for at in schema.function_opset_versions if at <= version]
    if usable:
        return _parse(schema.get_function_with_opset_version(max(usable)))
    usable = [at for at in schema.context_dependent_function_opset_versions if at <= version]
    if not usable or None in elements:
        return None
    types = [helper.make_tensor_type_proto(element, None) if element else onnx.TypeProto() for element in elements]
    given, make = [kind.SerializeToString() for kind in types], schema.get_context_dependent_function_with_opset_version
    try:
        return _parse(make(max(usable), node.SerializeToString(), given))
    except (RuntimeError, ValueError, TypeError, IndexError, MemoryError) as error:  # what onnx's C++ throws
        raise Unsupported(f"the standard has no body for it as it is: {error}") from error


def _parse(body: bytes) -> onnx.FunctionProto | None:
    return onnx.FunctionProto.FromString(body) if body else None
