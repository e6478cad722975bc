"""Weights written out dense for one run: made once for all nodes that multiply by them, gone after the last one.

A projection and its adjoint multiply by the same matrix, one of them transposed; where M is so large that a backend
decodes, it asks `dense_of` for the matrix. Nothing is kept from run to run, nor where a weight has one user, and no
more than MOST_BYTES wait for their other users: a model whose adjoints all come last would hold all weights dense.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from lut4tool.formats import FLOAT_DTYPES, Lookup4Weight, QmmWeight

#: Bytes of matrices that one run keeps.
MOST_BYTES = 2 << 30

Weight = Lookup4Weight | QmmWeight


@dataclass
class _Kept:
    """A dense matrix, its bytes, and how many more of its users are expected in this run."""

    matrix: Any
    nbytes: int
    users: int


_RUN: ContextVar[dict[Hashable, _Kept] | None] = ContextVar("matrices of the run under way", default=None)

#: The weights that products were planned for: one each node, so that as many share a matrix.
_PLANNED: dict[Hashable, WeakSet[Weight]] = {}


def key_of(weight: Weight) -> Hashable:
    """What two weights have in common that decode to the same matrix: where their data lie, not perm, not a name."""
    if isinstance(weight, QmmWeight):
        return (_place(weight.packed), _place(weight.scales), _place(weight.zero_points), weight.N, weight.K)
    facts = weight.rows, weight.cols, weight.block_size, weight.high_nibble_first, weight.weight_dtype
    codebook = weight.codebook.dtype.str, weight.codebook.tobytes()
    return (_place(weight.packed), _place(weight.scales), codebook, *facts)


def planned(weight: Weight) -> None:
    """Count a node that will multiply by this weight, for as long as the weight lives."""
    _PLANNED.setdefault(key_of(weight), WeakSet()).add(weight)
    for key in [key for key, weights in _PLANNED.items() if not weights]:
        del _PLANNED[key]


@contextmanager
def one_run() -> Iterator[None]:
    """Share matrices in this block, and with no other: a run, or a part of one whose arrays must stay in it."""
    token = _RUN.set({})
    try:
        yield
    finally:
        _RUN.reset(token)


def dense_of(weight: Weight, make: Callable[[], Any]) -> Any:
    """Return the matrix that `make` makes, or the one that another user of the same bytes had made in this run."""
    run, key = _RUN.get(), key_of(weight)
    users = len(_PLANNED.get(key, ()))
    if run is None or users < 2:
        return make()
    kept = run.get(key)
    if kept is None:
        matrix, nbytes = make(), _dense_bytes(weight)
        if nbytes + sum(other.nbytes for other in run.values()) > MOST_BYTES:
            return matrix
        kept = run[key] = _Kept(matrix, nbytes, users)
    kept.users -= 1
    if kept.users == 0:
        del run[key]
    return kept.matrix


def _dense_bytes(weight: Weight) -> int:
    rows, cols = (weight.N, weight.K) if isinstance(weight, QmmWeight) else (weight.rows, weight.cols)
    return rows * cols * FLOAT_DTYPES[weight.weight_dtype].itemsize


def _place(array: np.ndarray) -> tuple[int, int, str, tuple[int, ...]]:
    return (array.__array_interface__["data"][0], array.nbytes, array.dtype.str, array.shape)
