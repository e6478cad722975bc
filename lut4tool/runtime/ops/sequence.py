"""Sequences and optionals: onnx/defs/sequence and onnx/defs/optional. A sequence is a list, never changed in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import to_device, to_numpy
from lut4tool.runtime.ops.sizes import check_size
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import op

#: Bytes that an array takes besides its data; one of no elements may have 2^31 parts.
_PART = 128


@op("SequenceConstruct", since=11, on_host=True)
def sequence_construct(*inputs: Any) -> list[Any]:
    """The inputs, in order."""
    return list(inputs)


@op("SequenceEmpty", since=11, on_host=True)
def sequence_empty(*, dtype: int | None = None) -> list[Any]:
    """An empty list needs no type."""
    return []


@op("SequenceLength", since=11, on_host=True)
def sequence_length(sequence: list[Any]) -> np.ndarray:
    """An int64 scalar."""
    return np.array(len(sequence), np.int64)


@op("SequenceAt", since=11, host=(1,), on_host=True)
def sequence_at(sequence: list[Any], position: np.ndarray) -> Any:
    """A negative position counts from the end."""
    return sequence[_position(position, len(sequence))]


@op("SequenceErase", since=11, host=(1,), on_host=True)
def sequence_erase(sequence: list[Any], position: np.ndarray | None = None) -> list[Any]:
    """Without a position, the last one goes."""
    at = _position(np.array(-1) if position is None else position, len(sequence))
    return sequence[:at] + sequence[at + 1 :]


@op("SequenceInsert", since=11, host=(2,), on_host=True)
def sequence_insert(sequence: list[Any], tensor: Any, position: np.ndarray | None = None) -> list[Any]:
    """Without a position, at the end; the position may be the length."""
    length = len(sequence)
    at = length if position is None else _position(position, length, length)
    return [*sequence[:at], tensor, *sequence[at:]]


def _position(position: np.ndarray, length: int, last: int | None = None) -> int:
    at = int(position.reshape(-1)[0])
    if not -length <= at <= (length - 1 if last is None else last):
        raise IndexError(f"position {at} is not in a sequence of {length}")
    return at + length if at < 0 else at


@op("SplitToSequence", since=11, host=(1,), on_host=True)
def split_to_sequence(
    xp: Any, x: Any, split: np.ndarray | None = None, *, axis: int = 0, keepdims: int = 1
) -> list[Any]:
    """A scalar `split` is the size of the parts, the last one smaller; without one, each slice is a part."""
    size = x.shape[axis]
    if split is None:
        parts = _split(xp, x, range(1, size), axis) if size else []
        return [xp.squeeze(part, axis=axis) for part in parts] if not keepdims else parts
    if split.ndim == 0:
        step = int(split)
        if step <= 0:
            raise ValueError(f"the size of the parts must be positive, not {step}")
        return _split(xp, x, range(step, size, step), axis)
    if int(split.sum()) != size or (split < 0).any():
        raise ValueError(f"parts of {split.tolist()} do not make up the {size} of axis {axis}")
    return _split(xp, x, np.cumsum(split)[:-1].tolist(), axis)


def _split(xp: Any, x: Any, at: Sequence[int], axis: int) -> list[Any]:
    check_size([len(at) + 1], _PART)
    return list(xp.split(x, list(at), axis=axis))


@op("ConcatFromSequence", since=11, on_host=True)
def concat_from_sequence(sequence: list[Any], *, axis: int, new_axis: int = 0) -> Any:
    """Joined along an axis, or stacked along a new one."""
    on_device = any(isinstance(part, mx.array) for part in sequence)
    xp: Any = mx if on_device else np
    parts = [to_device(part) if on_device else to_numpy(part) for part in sequence]
    return xp.stack(parts, axis=axis) if new_axis else xp.concatenate(parts, axis=axis)


@op("SequenceMap", since=17, planned=True, on_host=True)
def sequence_map(node: Node) -> Callable[..., Any]:
    """The body runs on the elements at each position of the sequences; a tensor is the same at every position."""
    body = node.attributes["body"]

    def run(first: list[Any], *others: Any) -> Any:
        rows = [
            body(element, *[other[at] if isinstance(other, list) else other for other in others])
            for at, element in enumerate(first)
        ]
        return tuple([row[k] for row in rows] for k in range(len(body.outputs)))

    return run


@op("Optional", since=15, on_host=True)
def optional(value: Any = None, *, type: Any = None) -> Any:
    """The value, or none of that type."""
    return value


@op("OptionalHasElement", since=15, on_host=True)
def optional_has_element(value: Any = None) -> np.ndarray:
    """A boolean scalar."""
    return np.array(value is not None)


@op("OptionalGetElement", since=15, on_host=True)
def optional_get_element(value: Any) -> Any:
    """From version 18 a value that is no optional passes as it is."""
    if value is None:
        raise ValueError("the optional is empty")
    return value
