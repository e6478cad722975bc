"""Layers of LSTM and GRU on a CPU in the native library: weights prepared once, all steps in one call.

A hidden size is divided into blocks of 16 units. Weights, biases and sums lie as [blocks, gates, 16], so that a block's
gates are computed together; what is padded is 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lut4tool import native
from lut4tool.runtime import int8

_NATIVE: Any = importlib.import_module("lut4tool.native._native") if native.compiled() else None
_THREADS = native.thread_count()
_UNITS = 16
#: A packed weight, and what its products are times, a column each.
ByteWeight = tuple[int8.Bytes, np.ndarray]
_GATES = {"lstm": 4, "gru": 3, "gru_reset_after": 3}


def available() -> bool:
    """Whether the native library serves."""
    return _NATIVE is not None


@dataclass(frozen=True)
class Layer:
    """One or two directions of an LSTM or a GRU with sigmoid and tanh."""

    directions: list[Any]
    hidden: int
    depth: int
    has_cell: bool

    def serves(self, x: np.ndarray) -> bool:
        """Whether x [T, B, I] is what the native library takes: float32, and not empty."""
        return x.dtype == np.float32 and x.size > 0 and x.ndim == 3 and x.shape[2] == self.depth

    def __call__(
        self, x: np.ndarray, h: np.ndarray | None, c: np.ndarray | None, lengths: np.ndarray | None, backward: bool
    ) -> tuple[np.ndarray, ...]:
        """Return y [T, D, B, H] and the last h (and c) [D, B, H] of x [T, B, I]; lengths [B]: past them y is 0."""
        steps, batch, _ = x.shape
        shape = (len(self.directions), batch, self.hidden)
        y, h = np.empty((steps, *shape), np.float32), _state(h, shape)
        c = _state(c, shape) if self.has_cell else None
        ends = None if lengths is None else np.ascontiguousarray(lengths, np.int32)
        _NATIVE.run_cells(self.directions, np.ascontiguousarray(x), y, h, c, ends, backward, _THREADS)
        return (y, h) if c is None else (y, h, c)


def _state(given: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """A state that may be written to."""
    if given is None:
        return np.zeros(shape, np.float32)
    if given.shape != shape:
        raise ValueError(f"an initial state has shape {list(given.shape)}, not {list(shape)}")
    return np.array(given, np.float32, order="C")


def layer(kind: str, w: np.ndarray, r: np.ndarray, b: np.ndarray | None) -> Layer | None:
    """Prepare w [D, gates * H, I], r [D, gates * H, H] and b [D, 2 * gates * H]; None where the native library is not.

    kind: "lstm", "gru", or "gru_reset_after", where the reset gate multiplies the state's product.
    """
    gates = _GATES[kind]
    if _NATIVE is None or w.dtype != np.float32 or r.dtype != np.float32 or not (w.size and r.size):
        return None
    directions, rows, hidden = r.shape
    if w.shape[:2] != (directions, rows) or rows != gates * hidden or directions > 2:
        return None
    made = []
    for d in range(directions):
        state, late = r[d], None
        if kind == "gru":
            state, late = r[d, : 2 * hidden], _panels(r[d, 2 * hidden :], 1)
        weights = _panels(w[d], gates), _panels(state, len(state) // hidden), late
        made.append(_direction(kind, hidden, w.shape[2], *weights, None if b is None else b[d]))
    return Layer(made, hidden, w.shape[2], kind == "lstm")


def byte_layer(
    w: Sequence[ByteWeight | None], r: Sequence[ByteWeight | None], b: np.ndarray | None, hidden: int
) -> Layer | None:
    """The same of an LSTM with the weights that `byte_panels` gave for each direction; None where it gave none."""
    made = []
    depth = 0
    for d, (input_, state) in enumerate(zip(w, r, strict=True)):
        if input_ is None or state is None:
            return None
        depth = input_[0].depth
        both = (input_[0].native, input_[1]), (state[0].native, state[1])
        made.append(_direction("lstm", hidden, depth, *both, None, None if b is None else b[d]))
    return Layer(made, hidden, depth, True)


def byte_panels(q: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> ByteWeight | None:
    """Pack an LSTM's q [I or H, 4 * H] with one zero point and scale, or one a column; None without the library."""
    width = q.shape[1]
    columns = [np.broadcast_to(values.reshape(-1), width) for values in (zero, scale)]
    gates = _GATES["lstm"]
    packed = int8.pack(_blocks(q, gates), _blocks(columns[0], gates))
    factors = np.ascontiguousarray(_blocks(columns[1], gates), np.float32)
    return None if packed is None else (packed, factors)


def _direction(kind: str, hidden: int, depth: int, input_: Any, state: Any, late: Any, b: np.ndarray | None) -> Any:
    """A direction; all biases but a GRU's recurrent one of h are added once."""
    gates = _GATES[kind]
    both = np.zeros((2, gates * hidden), np.float32) if b is None else b.astype(np.float32).reshape(2, -1)
    early, last = both[1].copy(), np.zeros(hidden, np.float32)
    if kind != "lstm":
        early[2 * hidden :], last = 0, both[1, 2 * hidden :]
    biases = [np.ascontiguousarray(_blocks(part, n)) for part, n in ((both[0] + early, gates), (last, 1))]
    return _NATIVE.Direction(kind, hidden, depth, input_, state, late, *biases)


def _blocks(values: np.ndarray, gates: int) -> np.ndarray:
    """[..., gates * H] as [..., blocks * gates * 16], what is padded 0."""
    *rest, width = values.shape
    hidden = width // gates
    padded = np.zeros((*rest, gates, -(-hidden // _UNITS) * _UNITS), values.dtype)
    padded[..., :hidden] = values.reshape(*rest, gates, hidden)
    blocks = padded.reshape(*rest, gates, -1, _UNITS)
    return np.swapaxes(blocks, -2, -3).reshape(*rest, -1)


def _panels(matrix: np.ndarray, gates: int) -> np.ndarray:
    """A weight [gates * H, depth] as panels [blocks, gates, depth, 16], flat."""
    columns = _blocks(matrix.T, gates)
    return native.aligned(columns.reshape(columns.shape[0], -1, _UNITS).transpose(1, 0, 2)).reshape(-1)
