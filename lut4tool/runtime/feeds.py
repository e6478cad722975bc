"""What a model's inputs and outputs are declared to be, and whether a value fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from lut4tool.runtime.backend import mx
from lut4tool.runtime.cache import Cache
from lut4tool.runtime.dtypes import BY_NUMBER, to_device, type_of
from lut4tool.runtime.graph import RunError

#: What each symbolic dimension is, and the input that said so.
Sizes = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class ValueInfo:
    """An input or output: its name, shape (None: any rank; a None in it: any size) and type as ONNX writes it."""

    name: str
    shape: list[int | str | None] | None
    type: str
    proto: onnx.TypeProto

    @property
    def optional(self) -> bool:
        """Whether None is a value of it."""
        return self.proto.WhichOneof("value") == "optional_type"

    def __str__(self) -> str:
        return self.type if self.shape is None else f"{self.type} of shape [{', '.join(map(str, self.shape))}]"

    def accept(self, value: Any, sizes: Sizes) -> Any:
        """The value where the device has its values. Raises RunError where it does not fit."""
        return self._accept(value, self.proto, sizes)

    def check_type(self, value: Any, what: str) -> None:
        """Raise RunError where a result is not of the declared element type."""
        if isinstance(value, Cache):  # of the type that it started with
            return
        declared = self.proto.tensor_type.elem_type if self.proto.WhichOneof("value") == "tensor_type" else 0
        actual = type_of(value)
        if declared and (actual is None or actual.number != declared):
            found = f"tensor({actual.name})" if actual else type(value).__name__
            raise RunError(f"{what} '{self.name}' came as {found}; the model declares {self.type}")

    def _accept(self, value: Any, proto: onnx.TypeProto, sizes: Sizes) -> Any:
        kind = proto.WhichOneof("value")
        if kind == "optional_type":
            return None if value is None else self._accept(value, proto.optional_type.elem_type, sizes)
        if kind == "sequence_type":
            if not isinstance(value, list | tuple):
                raise RunError(f"input '{self.name}' is {self}: a list is wanted, not {type(value).__name__}")
            return [self._accept(part, proto.sequence_type.elem_type, {}) for part in value]
        if kind == "map_type":
            return self._accept_map(value, proto.map_type)
        return self._accept_tensor(value, proto.tensor_type, sizes) if kind == "tensor_type" else value

    def _accept_map(self, value: Any, proto: onnx.TypeProto.Map) -> dict[Any, Any]:
        """A dict whose values are NumPy's of the declared type, or Python's."""
        if not isinstance(value, Mapping):
            raise RunError(f"input '{self.name}' is {self}: a dict is wanted, not {type(value).__name__}")
        word = str if proto.key_type == onnx.TensorProto.STRING else int
        kind = BY_NUMBER.get(proto.value_type.tensor_type.elem_type)
        if kind is None:
            raise RunError(f"input '{self.name}' is {self}, whose values have no type that is served")
        dtype = kind.numpy
        try:
            return {word(key): np.asarray(part).astype(dtype)[()] for key, part in value.items()}
        except (TypeError, ValueError) as error:
            raise RunError(f"input '{self.name}' is {self}: {error}") from error

    def _accept_tensor(self, value: Any, proto: onnx.TypeProto.Tensor, sizes: Sizes) -> Any:
        if isinstance(value, Cache):
            return value
        if not isinstance(value, np.ndarray | np.generic | mx.array):
            raise RunError(f"input '{self.name}' is {self}: a NumPy or MLX array is wanted, not {type(value).__name__}")
        if not isinstance(value, mx.array):
            value = np.asarray(value)
            value = _viewed(value, proto.elem_type)
        actual = type_of(value)
        if proto.elem_type and (actual is None or actual.number != proto.elem_type):
            found = f"tensor({actual.name})" if actual else str(value.dtype)
            raise RunError(f"input '{self.name}' is {self}, not {found}")
        if self.shape is not None:
            self._check_shape(value.shape, self.shape, sizes)
        return to_device(value)

    def _check_shape(self, shape: tuple[int, ...], declared: Sequence[int | str | None], sizes: Sizes) -> None:
        if len(shape) != len(declared):
            raise RunError(f"input '{self.name}' is {self}, not of shape {list(shape)}: its rank is {len(declared)}")
        for axis, (size, wanted) in enumerate(zip(shape, declared, strict=True)):
            if (
                wanted is None or wanted == size or wanted == "?"
            ):  # what Paddle's exporter writes where it does not know
                continue
            why = f"dimension {axis} must be {wanted}"
            if isinstance(wanted, str):
                known, source = sizes.setdefault(wanted, (size, self.name))
                if known == size:
                    continue
                why = f"dimension {axis}, '{wanted}', is {known} in input '{source}'"
            raise RunError(f"input '{self.name}' is {self}, not of shape {list(shape)}: {why}")


def describe(value: onnx.ValueInfoProto) -> ValueInfo:
    """Describe a graph input or output."""
    proto = value.type
    while proto.WhichOneof("value") in ("optional_type", "sequence_type"):
        proto = proto.optional_type.elem_type if proto.HasField("optional_type") else proto.sequence_type.elem_type
    shape: list[int | str | None] | None = None
    if proto.HasField("tensor_type") and proto.tensor_type.HasField("shape"):
        dims = proto.tensor_type.shape.dim
        shape = [dim.dim_value if _is_size(dim) else dim.dim_param or None for dim in dims]
    return ValueInfo(value.name, shape, type_text(value.type), value.type)


def _is_size(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether a dimension is a number; some exporters write -1 for one that is not known."""
    return bool(dim.HasField("dim_value")) and dim.dim_value >= 0


def type_text(proto: onnx.TypeProto) -> str:
    """A type as ONNX writes it: tensor(float), seq(tensor(int64)), optional(...), map(key, value)."""
    kind = proto.WhichOneof("value")
    if kind == "optional_type":
        return f"optional({type_text(proto.optional_type.elem_type)})"
    if kind == "sequence_type":
        return f"seq({type_text(proto.sequence_type.elem_type)})"
    if kind == "map_type":
        return f"map({_element(proto.map_type.key_type)},{type_text(proto.map_type.value_type)})"
    return f"tensor({_element(proto.tensor_type.elem_type)})"


def _element(number: int) -> str:
    return BY_NUMBER[number].name if number in BY_NUMBER else "undefined"


def _viewed(value: np.ndarray, number: int) -> np.ndarray:
    """Strings as str objects; raw bytes, as a npz file keeps bfloat16 and float8, viewed as the declared type."""
    if value.dtype.kind in "US":
        return value.astype(str).astype(object)
    declared = BY_NUMBER.get(number)
    if value.dtype.kind == "V" and type_of(value) is None and declared and declared.numpy.itemsize == value.itemsize:
        return value.view(declared.numpy)
    return value
