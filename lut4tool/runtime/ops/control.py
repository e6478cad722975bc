"""Control flow and constants: onnx/defs/controlflow, and Constant and Identity, which the plan resolves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import numpy_dtype, to_numpy
from lut4tool.runtime.graph import Graph
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op


@op("Constant")
def constant(
    *,
    value: Any = None,
    sparse_value: Any = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_string: str | None = None,
    value_strings: Sequence[str] | None = None,
) -> Any:
    """Exactly one of the attributes gives the value; a sparse one comes dense."""
    floats, integers, strings = (value_float, value_floats), (value_int, value_ints), (value_string, value_strings)
    forms: list[tuple[Any, Any]] = [(value, None), (sparse_value, None)]
    forms += [(form, np.float32) for form in floats] + [(form, np.int64) for form in integers]
    forms += [(form, object) for form in strings]
    given = [np.asarray(form, dtype) for form, dtype in forms if form is not None]
    if len(given) != 1:
        raise ValueError(f"one value is wanted, not {len(given)}")
    return given[0]


@op("Identity")
def identity(xp: Any, x: Any) -> Any:
    """Any value, sequences and optionals too."""
    return x


@op("If", host=(0,), planned=True)
def if_(node: Node) -> Callable[..., Any]:
    """The branches take no inputs: what they need, they capture."""
    then_branch, else_branch = node.attributes["then_branch"], node.attributes["else_branch"]

    def run(cond: np.ndarray) -> Any:
        return tuple((then_branch if _flag(cond) else else_branch)())

    return run


@op("Loop", host=(0, 1), planned=True)
def loop(node: Node) -> Callable[..., Any]:
    """Runs while the trip count M, where given, is not reached and the condition, where given, holds.

    The body takes (iteration, condition, state...) and gives (condition, state..., scan outputs...), which are stacked.
    """
    body = node.attributes["body"]
    carried = len(body.inputs) - 2

    def run(trips: np.ndarray | None, cond: np.ndarray | None = None, *initial: Any) -> Any:
        limit = None if trips is None else _count(trips)
        go, state, rows, iteration = cond is None or _flag(cond), list(initial), [], 0
        while go and (limit is None or iteration < limit):
            after, *results = body(np.array(iteration, np.int64), np.array(True), *state)
            state = results[:carried]
            rows.append(results[carried:])
            _start([*state, *rows[-1]])
            go = after is None or _flag(to_numpy(after))
            iteration += 1
        types = body.types[1 + carried :]
        return (*state, *[_stack([row[k] for row in rows], kind, 0) for k, kind in enumerate(types)])

    return run


@op("Scan", since=9, planned=True)
def scan(node: Node) -> Callable[..., Any]:
    """Runs the body over slices of the scan inputs; directions and axes, per input and output, are 0 by default."""
    scanned, stacked = _scan_counts(node)
    axes, backwards = _each(node, "scan_input_axes", scanned), _each(node, "scan_input_directions", scanned)
    out_axes, out_backwards = _each(node, "scan_output_axes", stacked), _each(node, "scan_output_directions", stacked)

    def run(*values: Any) -> Any:
        sources = [_first(x, axis) for x, axis in zip(values[-scanned:], axes, strict=True)]
        state, rows = _scanned(node.attributes["body"], list(values[:-scanned]), sources, backwards)
        columns = [[row[k] for row in (rows[::-1] if out_backwards[k] else rows)] for k in range(stacked)]
        kinds = node.attributes["body"].types[len(state) :]
        return (*state, *[_stack(*column) for column in zip(columns, kinds, out_axes, strict=True)])

    return run


@op("Scan", until=8, host=(0,), planned=True)
def scan_batches(node: Node) -> Callable[..., Any]:
    """One scan for each entry of the first axis, over the second as far as its length says; zeros fill the rest."""
    body = node.attributes["body"]
    scanned, _ = _scan_counts(node)
    backwards = _each(node, "directions", scanned)

    def run(lengths: np.ndarray | None, *values: Any) -> Any:
        batch, longest = values[-1].shape[:2]
        counts = [longest] * batch if lengths is None else lengths.reshape(-1).tolist()
        if len(counts) != batch or not all(0 <= count <= longest for count in counts):
            raise ValueError(f"sequence_lens is {counts}: {batch} lengths of at most {longest} are wanted")
        found = []
        for place, count in enumerate(counts):
            entry = [_at(value, place) for value in values]
            state, rows = _scanned(body, entry[:-scanned], [x[:count] for x in entry[-scanned:]], backwards)
            columns = [_stack([row[k] for row in rows], kind, 0) for k, kind in enumerate(body.types[len(state) :])]
            found.append((*state, *[_padded(column, longest - count) for column in columns]))
        return tuple(_stack([row[k] for row in found], kind, 0) for k, kind in enumerate(body.types))

    return run


def _scan_counts(node: Node) -> tuple[int, int]:
    """How many scan inputs and scan outputs there are."""
    body, scanned = node.attributes["body"], node.attributes.get("num_scan_inputs", 0)
    stacked = len(body.outputs) - (len(body.inputs) - scanned)
    if not 0 < scanned <= len(body.inputs) or stacked < 0:
        counts = f"{len(body.inputs)} inputs and {len(body.outputs)} outputs"
        raise Unsupported(f"its body has {counts}, which num_scan_inputs, {scanned}, and the state do not add up to")
    given = len(node.given) - (node.version < 9)
    if given != len(body.inputs):
        raise Unsupported(f"its body takes {len(body.inputs)} states and scan inputs; it is given {given}")
    return scanned, stacked


def _each(node: Node, name: str, count: int) -> Sequence[int]:
    """An attribute with one entry for each of `count` inputs or outputs, 0 by default."""
    values: Sequence[int] = node.attributes.get(name) or [0] * count
    if len(values) != count:
        raise Unsupported(f"{name} must have {count} entries, not {len(values)}")
    return values


def _scanned(
    body: Graph, state: list[Any], sources: Sequence[Any], backwards: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Run the body over the first axis of the sources; return the last state and the other results of each step."""
    lengths = {source.shape[0] for source in sources}
    if len(lengths) != 1:
        raise ValueError(f"the scan inputs have different lengths: {sorted(lengths)}")
    rows, (length,), carried = [], lengths, len(state)
    for step in range(length):
        slices = [_at(x, length - 1 - step if back else step) for x, back in zip(sources, backwards, strict=True)]
        results = body(*state, *slices)
        state = results[:carried]
        rows.append(results[carried:])
        _start(results)
    return state, rows


def _padded(value: Any, count: int) -> Any:
    """`count` more rows, of zeros."""
    if not count:
        return value
    xp = mx if isinstance(value, mx.array) else np
    return xp.concatenate([value, xp.zeros((count, *value.shape[1:]), dtype=value.dtype)])


def _count(trips: np.ndarray) -> int:
    if trips.size != 1 or trips.reshape(-1)[0] < 0:
        raise ValueError(f"the trip count must be one number that is not negative, not {trips.tolist()}")
    return int(trips.reshape(-1)[0])


def _flag(cond: np.ndarray) -> bool:
    if cond.size != 1:
        raise ValueError(f"the condition must be one boolean, not of shape {list(cond.shape)}")
    return bool(cond.reshape(-1)[0])


def _start(values: Sequence[Any]) -> None:
    """Start computing an iteration, so that a long loop does not build one long lazy graph."""
    mx.async_eval(*[value for value in values if isinstance(value, mx.array)])


def _first(value: Any, axis: int) -> Any:
    xp = mx if isinstance(value, mx.array) else np
    return value if axis == 0 else xp.moveaxis(value, axis, 0)


def _at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, mx.array) else np.asarray(value[index])


def _stack(rows: Sequence[Any], kind: Any, axis: int) -> Any:
    """One array of the iterations' values along a new axis; with no iteration, an empty one of the declared type."""
    if rows and all(isinstance(row, mx.array) for row in rows):
        return mx.stack(list(rows), axis=axis)
    if rows:
        return np.stack([to_numpy(row) for row in rows], axis=axis)
    tensor = kind.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]  # a symbolic size is 0: no iteration says what it is
    rank = len(shape) + 1
    shape.insert(axis % rank, 0)
    return np.zeros(shape, numpy_dtype(tensor.elem_type))
