"""Control flow and constants: onnx/defs/controlflow, and Constant and Identity, which the plan resolves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx

from lut4tool.runtime.backend import mx
from lut4tool.runtime.dtypes import numpy_dtype, to_device, to_numpy
from lut4tool.runtime.ops import sizes
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op
from lut4tool.storage import size_text


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
    if carried < 0 or len(body.outputs) <= carried or max(len(node.given), 2) != len(body.inputs):
        counts = f"{len(body.inputs)} inputs and {len(body.outputs)} outputs"
        raise Unsupported(f"its body has {counts}, which its own {len(node.given)} inputs do not add up to")

    def run(trips: np.ndarray | None = None, cond: np.ndarray | None = None, *initial: Any) -> Any:
        limit = None if trips is None else _count(trips)
        go, state, rows, iteration = cond is None or _flag(cond), list(initial), Rows(body.types[1 + carried :]), 0
        with _telling(node, lambda: f"{iteration} of {'any number of' if limit is None else limit}"):
            while go and (limit is None or iteration < limit):
                after, *results = body(np.array(iteration, np.int64), np.array(True), *state)
                state = results[:carried]
                rows.add(results[carried:])
                _start(results)
                go = after is None or _flag(to_numpy(after))
                iteration += 1
        return (*state, *rows.stacked())

    return run


@op("Scan", since=9, planned=True)
def scan(node: Node) -> Callable[..., Any]:
    """Runs the body over slices of the scan inputs; directions and axes, per input and output, are 0 by default."""
    scanned, stacked = _scan_counts(node)
    axes, backwards = _each(node, "scan_input_axes", scanned), _each(node, "scan_input_directions", scanned)
    out_axes, out_backwards = _each(node, "scan_output_axes", stacked), _each(node, "scan_output_directions", stacked)

    def run(*values: Any) -> Any:
        sources = [_first(x, axis) for x, axis in zip(values[-scanned:], axes, strict=True)]
        state, rows = _scanned(node, list(values[:-scanned]), sources, backwards)
        return (*state, *rows.stacked(out_axes, out_backwards))

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
        found = Rows(body.types)
        for place, count in enumerate(counts):
            entry = [_at(value, place) for value in values]
            state, rows = _scanned(node, entry[:-scanned], [x[:count] for x in entry[-scanned:]], backwards)
            found.add((*state, *[_padded(column, longest - count) for column in rows.stacked()]))
        return tuple(found.stacked())

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


def _scanned(node: Node, state: list[Any], sources: Sequence[Any], backwards: Sequence[int]) -> tuple[list[Any], Rows]:
    """Run the body over the first axis of the sources; return the last state and the other results of each step."""
    lengths = {source.shape[0] for source in sources}
    if len(lengths) != 1:
        raise ValueError(f"the scan inputs have different lengths: {sorted(lengths)}")
    body, (length,), carried, step = node.attributes["body"], lengths, len(state), 0
    rows = Rows(body.types[carried:])
    with _telling(node, lambda: f"{step} of {length}"):
        for step in range(length):
            slices = [_at(x, length - 1 - step if back else step) for x, back in zip(sources, backwards, strict=True)]
            results = body(*state, *slices)
            state = results[:carried]
            rows.add(results[carried:])
            _start(results)
    return state, rows


@contextmanager
def _telling(node: Node, where: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C say how far a loop was."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(f"node '{node.name}' ({node.op_type}) had done {where()} iterations")
        raise


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
    return value[index] if isinstance(value, mx.array) else np.asarray(value[index], value.dtype)


class Rows:
    """What a body scans out, an iteration after the other.

    On the host a row is copied into an array that grows: it may be a part of a value that is otherwise not needed.
    kinds: the declared type of each output. Raises ValueError where half of the machine's memory does not hold them.
    """

    def __init__(self, kinds: Sequence[onnx.TypeProto]) -> None:
        self.kinds, self.count = kinds, 0
        self.columns: list[Any] = []  # an array of at least `count` rows, or on a device a list of them

    def add(self, values: Sequence[Any]) -> None:
        """Append a row to each output."""
        if not self.kinds:
            return
        if not self.count:
            self.columns = [[] if isinstance(value, mx.array) else _column(to_numpy(value)) for value in values]
        elif not self.count & (self.count - 1):
            self._grow()
        for column, value in zip(self.columns, values, strict=True):
            if isinstance(column, list):
                column.append(to_device(value))
            else:
                _write(column, self.count, to_numpy(value))
        self.count += 1

    def _grow(self) -> None:
        arrays = [column for column in self.columns if isinstance(column, np.ndarray)]
        lists = [column for column in self.columns if isinstance(column, list)]
        needed = 2 * sum(array.nbytes for array in arrays) + 2 * sum(row.nbytes for column in lists for row in column)
        if needed > sizes.memory() // 2:
            what = f"{size_text(needed)} after {2 * self.count} iterations, more than half of this machine's memory"
            raise ValueError(f"its scan outputs would take {what}")
        for array in arrays:
            array.resize((2 * self.count, *array.shape[1:]), refcheck=False)

    def stacked(self, axes: Sequence[int] = (), backwards: Sequence[int] = ()) -> list[Any]:
        """Each output as one array, the rows along an axis, the first where none is given; backwards: the last first.

        With no iteration, an empty one of the declared type.
        """
        turns = zip(axes or [0] * len(self.kinds), backwards or [0] * len(self.kinds), strict=True)
        if not self.count:
            return [_empty(kind, axis) for kind, (axis, _) in zip(self.kinds, turns, strict=True)]
        return [self._stacked(column, *turn) for column, turn in zip(self.columns, turns, strict=True)]

    def _stacked(self, column: Any, axis: int, back: int) -> Any:
        if isinstance(column, list):
            return mx.stack(column[::-1] if back else column, axis=axis)
        column.resize((self.count, *column.shape[1:]), refcheck=False)
        return np.moveaxis(column[::-1] if back else column, 0, axis)


def _column(row: np.ndarray) -> np.ndarray:
    return np.empty((1, *row.shape), row.dtype)


def _write(column: np.ndarray, place: int, row: np.ndarray) -> None:
    if row.shape != column.shape[1:] or row.dtype != column.dtype:
        first = f"{column.dtype} {list(column.shape[1:])}"
        raise ValueError(f"a scan output is {row.dtype} {list(row.shape)} in iteration {place}, {first} in the first")
    column[place, ...] = row  # else an array of no axes would be an element of an array of strings


def _empty(kind: onnx.TypeProto, axis: int) -> np.ndarray:
    tensor = kind.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]  # a symbolic size is 0: no iteration says what it is
    shape.insert(axis % (len(shape) + 1), 0)
    return np.zeros(shape, numpy_dtype(tensor.elem_type))
