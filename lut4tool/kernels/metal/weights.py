"""A weight on the device: its arrays copied once, and what the kernels' texts need to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
import numpy as np

from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels.transfer import copied

MLX_FLOAT = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

#: A kernel sees an array of fewer elements in another address space: all weights' arrays have as many at least.
LEAST_ELEMENTS = 8
#: Bytes that one load takes, and their codes; packed data is padded to whole loads.
LOAD_BYTES, LOAD_CODES = 16, 32


@dataclass(frozen=True, eq=False)
class Arrays:
    """What several weights may share, such as a projection and its adjoint.

    packed: uint32, padded to whole loads; scales: [blocks]; levels: the codebook [16], or zero points
    [blocks] or one.
    """

    packed: mx.array
    scales: mx.array
    levels: mx.array


@dataclass(frozen=True)
class DeviceWeight:
    """A weight as the kernels take it: lines of `pitch` codes, `along_k` where a line is one k (else one n).

    dims: uint32 [N, pitch].
    """

    arrays: Arrays
    dims: mx.array
    K: int
    N: int
    pitch: int
    block_size: int
    weight_dtype: mx.Dtype
    along_k: bool
    affine: bool
    high_nibble_first: bool
    one_zero: bool

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.K if self.along_k else self.N

    @property
    def aligned(self) -> bool:
        """Whether every load of 16 bytes stays in one line, and every word of 8 codes in one block."""
        return is_aligned(self.pitch, self.N if self.along_k else self.K, self.block_size)

    @property
    def inputs(self) -> list[mx.array]:
        """What every kernel takes after x."""
        return [self.arrays.packed, self.arrays.scales, self.arrays.levels, self.dims]

    @property
    def template(self) -> list[tuple[str, Any]]:
        """Facts that the texts are compiled for; none of them depends on x or on the weight's size."""
        return [
            ("W", self.weight_dtype),
            ("AFFINE", self.affine),
            ("HIGH_FIRST", self.high_nibble_first),
            ("ONE_ZERO", self.one_zero),
            ("ALIGNED", self.aligned),
            ("BLOCK", self.block_size),
        ]


def is_aligned(pitch: int, length: int, block_size: int) -> bool:
    """Whether loads stay in one line of `length` codes, `pitch` apart, and words in one block."""
    return pitch % LOAD_CODES == 0 and length % LOAD_CODES == 0 and block_size % 8 == 0


INPUTS = ("packed", "scales", "levels", "dims")

#: By where the host's arrays lie, which stay as long as a weight that uses them.
_ARRAYS: WeakValueDictionary[tuple[tuple[int, int, str], ...], Arrays] = WeakValueDictionary()
_ON_DEVICE: WeakKeyDictionary[Lookup4Weight | QmmWeight, DeviceWeight] = WeakKeyDictionary()


def on_device(weight: Lookup4Weight | QmmWeight) -> DeviceWeight:
    """Return the weight's form on the device, made at its first use and gone with it."""
    if weight not in _ON_DEVICE:
        _ON_DEVICE[weight] = _lookup4(weight) if isinstance(weight, Lookup4Weight) else _qmm(weight)
    return _ON_DEVICE[weight]


def _arrays(packed: np.ndarray, scales: np.ndarray, levels: np.ndarray) -> Arrays:
    hosts = (packed, scales, levels)
    key = tuple((host.__array_interface__["data"][0], host.nbytes, str(host.dtype)) for host in hosts)
    made = _ARRAYS.get(key)
    if made is None:
        made = _ARRAYS[key] = Arrays(_words(packed), _values(scales), _values(levels))
    return made


def _lookup4(weight: Lookup4Weight) -> DeviceWeight:
    K, N = weight.shape
    return DeviceWeight(
        arrays=_arrays(weight.packed, weight.scales, weight.codebook),
        dims=mx.array([N, weight.cols], mx.uint32),
        K=K,
        N=N,
        pitch=weight.cols,
        block_size=weight.block_size,
        weight_dtype=MLX_FLOAT[weight.weight_dtype],
        along_k=tuple(weight.perm) == (0, 1),
        affine=False,
        high_nibble_first=weight.high_nibble_first,
        one_zero=False,
    )


def _qmm(weight: QmmWeight) -> DeviceWeight:
    points = weight.zero_points
    pitch = weight.scales.shape[1] * weight.block_size
    return DeviceWeight(
        arrays=_arrays(weight.packed, weight.scales, points),
        dims=mx.array([weight.N, pitch], mx.uint32),
        K=weight.K,
        N=weight.N,
        pitch=pitch,
        block_size=weight.block_size,
        weight_dtype=MLX_FLOAT[weight.weight_dtype],
        along_k=False,
        affine=True,
        high_nibble_first=False,
        one_zero=points.shape == (1, 1) and weight.scales.size > 1,
    )


def _words(packed: np.ndarray) -> mx.array:
    """Bytes as little-endian words, in whole loads."""
    flat = np.ascontiguousarray(packed).reshape(-1)
    whole = flat.size // 4 * 4
    body = copied(flat[:whole].view(np.uint32), mx.uint32)
    missing = max(-flat.size % LOAD_BYTES, 4 * LEAST_ELEMENTS - flat.size)
    if not missing:
        return body
    tail = np.concatenate([flat[whole:], np.zeros(missing, np.uint8)])
    return mx.concatenate([body, mx.array(tail.view(np.uint32))])


def _values(array: np.ndarray) -> mx.array:
    """Values flat in their own type (zero points may be bytes), LEAST_ELEMENTS or more."""
    flat = array.reshape(-1)
    if missing := max(0, LEAST_ELEMENTS - flat.size):
        flat = np.concatenate([flat, np.zeros(missing, flat.dtype)])
    flat = np.ascontiguousarray(flat)
    kinds = {np.dtype(np.uint8): mx.uint8, np.dtype(np.float32): mx.float32, np.dtype(np.float16): mx.float16}
    kind = kinds.get(flat.dtype)
    return copied(flat, kind) if kind else copied(flat.view(np.uint16), mx.uint16).view(mx.bfloat16)
