"""The function bodies that ONNX gives for its own operators, for those that no row serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx.defs import OpSchema

from lut4tool.storage import subgraphs

#: Initializers above this many bytes lose their data in the copy that types are inferred on.
_DATA_BYTES = 1024


def schema_of(domain: str, name: str, version: int) -> OpSchema | None:
    """The schema in force at an opset version, None where the standard has none."""
    known = 0 <= version < 1 << 31 and onnx.defs.has(name, version, domain)  # onnx takes no other numbers
    return onnx.defs.get_schema(name, version, domain) if known else None


def is_random(schema: Any) -> bool:
    """Whether the operator draws random numbers: it gives another result at each call."""
    return bool(schema.non_deterministic)


# onnx's type stubs lack the schema's functions, hence Any.
def body_of(
    node: onnx.NodeProto, schema: Any, version: int, type_of: Callable[[str], onnx.TypeProto | None]
) -> onnx.FunctionProto | None:
    """The body that the schema gives for this node, None where it gives none.

    type_of: the type of a value, which the body may depend on (None: not known, then such a body is not made).
    """
    usable = [at for at in schema.function_opset_versions if at <= version]
    if usable:
        return _parse(schema.get_function_with_opset_version(max(usable)))
    usable = [at for at in schema.context_dependent_function_opset_versions if at <= version]
    types = [type_of(name) if name else None for name in node.input] if usable else []
    if not usable or any(kind is None and name for kind, name in zip(types, node.input, strict=True)):
        return None
    given = [(kind or onnx.TypeProto()).SerializeToString() for kind in types]
    return _parse(
        schema.get_context_dependent_function_with_opset_version(max(usable), node.SerializeToString(), given)
    )


def _parse(body: bytes) -> onnx.FunctionProto | None:
    return onnx.FunctionProto.FromString(body) if body else None


def infer_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The type of every value that shape inference knows, subgraphs included, without copying the weights."""
    stripped = onnx.ModelProto(ir_version=model.ir_version)
    stripped.opset_import.extend(model.opset_import)
    stripped.functions.extend(model.functions)
    graph = stripped.graph
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        if tensor.ByteSize() <= _DATA_BYTES:
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    inferred = onnx.shape_inference.infer_shapes(stripped)
    return {value.name: value.type for graph in _graphs(inferred.graph) for value in _typed(graph)}


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _typed(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    for tensor in graph.initializer:
        yield onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
