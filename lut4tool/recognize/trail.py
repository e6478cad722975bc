"""One walk from a product's weight to its constants: each node checked and remembered, each literal read."""

from __future__ import annotations

import math
import struct
from typing import NoReturn

import onnx
from onnx import NodeProto, TensorProto

from lut4tool.recognize.walk import LITERAL_ELEMENTS, STANDARD, Argument, Literal, Place, Value, Walk, check, type_name
from lut4tool.storage import StorageError

#: A walk passes at most so many nodes: nodes that read one another in a circle have no end.
LONGEST_WALK = 1000
#: How a tensor stores the integers that literals are: in raw data, and in its own field.
_STORED: dict[int, tuple[str, str]] = {
    TensorProto.BOOL: ("B", "int32_data"),
    TensorProto.INT8: ("b", "int32_data"),
    TensorProto.UINT8: ("B", "int32_data"),
    TensorProto.INT16: ("h", "int32_data"),
    TensorProto.UINT16: ("H", "int32_data"),
    TensorProto.INT32: ("i", "int32_data"),
    TensorProto.UINT32: ("I", "uint64_data"),
    TensorProto.INT64: ("q", "int64_data"),
    TensorProto.UINT64: ("Q", "uint64_data"),
}


class Trail:
    """One walk from a product's weight to its constants, which remembers the nodes it passes."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.passed: list[Place] = []
        self.literals: dict[str, TensorProto] = {}
        self._steps = 0

    def input(self, place: Place, index: int) -> Value:
        """The value behind a node's input, its Identity nodes passed."""
        value = self.walk.find(place.scope, place.node.input[index], place)
        end = self.walk.source(value, place)
        while value != end:
            assert isinstance(value.definition, NodeProto)
            self.passed.append(Place(value.scope, value.definition))
            value = self.walk.find(value.scope, value.definition.input[0], place)
        return end

    def op_type(self, value: Value) -> str:
        """What makes a value: an operator's name, "initializer" or "input"."""
        found = value.definition
        if isinstance(found, NodeProto):
            return found.op_type
        return "input" if isinstance(found, Argument) else "initializer"

    def node(self, value: Value, op: str, at: Place, *free: str) -> Place:
        """The node that makes a value, checked: the ONNX operator `op`, each attribute at its default or `free`.

        free: attributes whose value the chain reads itself.
        """
        found = value.definition
        if not isinstance(found, NodeProto) or not self.walk.is_standard(found, op):
            self.refuse(value, at, op)
        place = Place(value.scope, found)
        self._steps += 1
        if self._steps > LONGEST_WALK:
            place.refuse(f"a walk of over {LONGEST_WALK} nodes, as in a cycle; a chain has fewer")
        check(place, free)
        self.passed.append(place)
        return place

    def refuse(self, value: Value, at: Place, expected: str) -> NoReturn:
        """Stop at what makes a value where something else is expected: at the node, or where an initializer is read."""
        found = value.definition
        if isinstance(found, NodeProto):
            Place(value.scope, found).refuse(f"{_described(found)}, not {expected}")
        at.refuse(f"{self.op_type(value)} '{value.name}', not the output of {expected}")

    def literal(
        self,
        place: Place,
        index: int,
        absent: tuple[int, ...] | None = None,
        kind: int = TensorProto.INT64,
        most: int = LITERAL_ELEMENTS,
    ) -> Literal:
        """A literal of one integer type; `absent` is what a missing optional input means, a list."""
        if absent is not None and (len(place.node.input) <= index or not place.node.input[index]):
            return Literal(absent, (len(absent),))
        tensor, value = self._small(place, index, most)
        if tensor.data_type != kind:
            place.refuse(f"literal '{value.name}' is {type_name(tensor.data_type)}, not {type_name(kind)}")
        size = math.prod(tensor.dims)
        if tensor.HasField("segment"):
            place.refuse(f"literal '{value.name}' is stored in segments, which ONNX runtimes do not read")
        raw, (letter, stored) = tensor.raw_data, _STORED[kind]
        width = struct.calcsize(f"<{letter}")
        values = (
            struct.unpack(f"<{len(raw) // width}{letter}", raw[: len(raw) // width * width])
            if tensor.HasField("raw_data")
            else tuple(getattr(tensor, stored))
        )
        if len(values) != size or len(raw) % width:
            place.refuse(f"literal '{value.name}' holds {len(raw) or len(values)} bytes or values, not {size} values")
        self._remember(value, tensor)
        return Literal(values, tuple(tensor.dims))

    def hold(self, place: Place, index: int) -> tuple[int, ...]:
        """Remember a small constant whose value does not matter; its shape."""
        tensor, value = self._small(place, index, LITERAL_ELEMENTS)
        self._remember(value, tensor)
        return tuple(tensor.dims)

    def _small(self, place: Place, index: int, most: int) -> tuple[TensorProto, Value]:
        """A constant of at most so many elements."""
        value = self.input(place, index)
        if isinstance(value.definition, Argument):
            place.refuse(f"literal '{value.name}' is an input; an initializer or a Constant is expected")
        tensor = self.walk.constant(value, place).tensors[0]
        size = math.prod(tensor.dims)
        if size > most:
            place.refuse(f"literal '{value.name}' has {size} elements, more than {most}")
        external = tensor.data_location == TensorProto.EXTERNAL
        return self._inside(tensor, value, place) if external else tensor, value

    def _remember(self, value: Value, tensor: TensorProto) -> None:
        if isinstance(value.definition, NodeProto):
            self.passed.append(Place(value.scope, value.definition))
        else:
            self.literals[value.name] = tensor

    def _inside(self, tensor: TensorProto, value: Value, place: Place) -> TensorProto:
        """A literal whose data is in a file, with that data."""
        if self.walk.tensors is None:
            place.refuse(f"literal '{value.name}' is external data, and no folder is given to read it from")
        try:
            return onnx.numpy_helper.from_array(self.walk.tensors.array(tensor), value.name)
        except StorageError as error:
            place.refuse(f"literal '{value.name}' cannot be read: {error}")

    def nodes(self) -> tuple[NodeProto, ...]:
        """The nodes passed, each once, in topological order: a node's last visit comes before its inputs' last."""
        last = {id(place.node): place.node for place in reversed(self.passed)}
        return tuple(last.values())


def _described(node: NodeProto) -> str:
    return node.op_type if node.domain in STANDARD else f"{node.domain}::{node.op_type}"
