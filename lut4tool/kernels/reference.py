"""The reference products: exact, on any device, in memory near the packed size; the fallback and the oracle of kernels.

On a CPU a panel of rows is decoded exactly into one buffer, multiplied in float64 and accumulated in float64, and the
sum is rounded once to float32 (and once more to a half). A product of two float32 values is exact in float64, so that
|y - exact| <= (2^-24 + K * 2^-53) * sum |x||w| for any data, cancelling data included.

On a GPU, which has no float64, 32 terms at a time are summed by a float32 product, and those sums by a compensated
tree: the error is that of MLX's product over 32 terms, at worst 2^-19 * sum |x||w| (measured: under 2^-22), and a sum
that passes float32's range on the way is Inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from lut4tool import native
from lut4tool.formats import FLOAT_DTYPES, Lookup4Weight, QmmWeight, pair_table
from lut4tool.kernels.transfer import copied, copied_floats

KERNELS = ("reference",)

#: Elements of a panel: 4 MB of float32, 8 MB of float64.
PANEL = 1 << 20
#: Terms that one float32 product sums on a GPU, and rows of x that it takes at a time.
TERMS, ROWS_AT_A_TIME = 32, 256

_MLX_FLOAT = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_NUMPY_FLOAT = {mlx: FLOAT_DTYPES[name] for name, mlx in _MLX_FLOAT.items()}

Panels = Iterator[tuple[int, int, np.ndarray]]


def available() -> bool:
    """It works wherever MLX does."""
    return True


def refuses(x: mx.array, weight: Lookup4Weight | QmmWeight) -> str | None:
    """It serves every product of a float type."""
    return None if x.dtype in _NUMPY_FLOAT else f"x is {x.dtype}; float32, float16 and bfloat16 are served"


def lookup4_matmul(x: mx.array, weight: Lookup4Weight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W, transposed by weight.perm -> [M, N] of x's type; the weight is rounded as it says."""
    along_k = tuple(weight.perm) == (0, 1)  # a panel of rows of W is then a slice of K, otherwise one of N
    if _on_gpu():
        return compensated_product(x, weight.shape[1], _lookup4_gpu_panels(weight), along_k)
    return _cpu_matmul(x, weight.shape[1], _lookup4_panels(weight), along_k)


def qmm(x: mx.array, weight: QmmWeight, kernel: str | None = None) -> mx.array:
    """Multiply x [M, K] by W [N, K] transposed -> [M, N] of x's type."""
    if _on_gpu():
        panels = ((start, stop, mx.array(panel)) for start, stop, panel in _qmm_panels(weight))
        return compensated_product(x, weight.N, panels, along_k=False)
    return _cpu_matmul(x, weight.N, _qmm_panels(weight), along_k=False)


def lookup4_decode(weight: Lookup4Weight) -> mx.array:
    """Decode W [rows, cols] to its weight_dtype, exactly; the one place where a dense weight is made, because asked."""
    elements = native.decode_elements(weight, 0, weight.rows * weight.cols)
    return mx.array(elements).reshape(weight.rows, weight.cols)


# -- CPU


def _cpu_matmul(x: mx.array, columns: int, panels: Panels, along_k: bool) -> mx.array:
    dtype = _NUMPY_FLOAT[x.dtype]
    values = _view(x).astype(np.float64)  # [M, K]
    total = np.zeros((len(values), columns), np.float64 if along_k else np.float32)
    buffer = np.empty(0)
    with np.errstate(all="ignore"):  # Inf and NaN go through as IEEE says
        for start, stop, panel in panels:
            buffer = buffer if buffer.size else np.empty(panel.shape)
            wide = buffer[: len(panel)]
            wide[:] = panel if dtype == np.float32 else panel.astype(dtype, copy=False)  # what MatMul sees: X's type
            if along_k:
                total += values[:, start:stop] @ wide
            else:
                total[:, start:stop] = values @ wide.T
        return mx.array(total.astype(np.float32, copy=False).astype(dtype, copy=False))


def _lookup4_panels(weight: Lookup4Weight) -> Panels:
    """Rows [start, stop) of W, decoded into one buffer; a panel's first block may begin in the row before."""
    cols, size = weight.cols, weight.block_size
    rows = max(1, min(weight.rows, PANEL // cols))
    buffer = np.empty(min(rows * cols + size, weight.rows * cols), FLOAT_DTYPES[weight.weight_dtype])
    for start in range(0, weight.rows, rows):
        stop = min(start + rows, weight.rows)
        first, last = start * cols, stop * cols
        whole = first - first % size
        elements = native.decode_elements(weight, whole, last, buffer[: last - whole])
        yield start, stop, elements[first - whole :].reshape(-1, cols)


def _qmm_panels(weight: QmmWeight) -> Panels:
    """Rows [start, stop) of W [N, K], decoded into one buffer."""
    rows = max(1, min(weight.N, PANEL // weight.K))
    buffer = np.empty((rows, weight.K), FLOAT_DTYPES[weight.weight_dtype])
    for start in range(0, weight.N, rows):
        stop = min(start + rows, weight.N)
        yield start, stop, native.decode_qmm(weight, start, stop, buffer[: stop - start])


def _view(x: mx.array) -> np.ndarray:
    if x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16), copy=False).view(FLOAT_DTYPES["bfloat16"])
    return np.array(x, copy=False)


# -- GPU

GpuPanels = Iterator[tuple[int, int, mx.array]]

#: Bytes that MLX has in one dimension: more stay where they are, and are copied a panel at a time in every run.
MOST_BYTES = 2**31 - 1

#: Packed bytes, scales and pair table of a weight on the device: copied once, gone with the weight.
_ON_DEVICE: WeakKeyDictionary[Lookup4Weight, tuple[mx.array | np.ndarray, mx.array, mx.array]] = WeakKeyDictionary()


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _lookup4_gpu_panels(weight: Lookup4Weight) -> GpuPanels:
    if weight not in _ON_DEVICE:
        packed = copied(weight.packed, mx.uint8) if weight.packed.size <= MOST_BYTES else weight.packed
        _ON_DEVICE[weight] = (packed, copied_floats(weight.scales), mx.array(pair_table(weight)))
    packed, scales, pairs = _ON_DEVICE[weight]
    cols, size = weight.cols, weight.block_size
    rows = max(1, min(weight.rows, PANEL // cols))
    for start in range(0, weight.rows, rows):
        stop = min(start + rows, weight.rows)
        first, last = start * cols, stop * cols
        whole = first - first % size
        codes = mx.array(packed[whole // 2 : (last + 1) // 2]).astype(mx.uint32)
        entries = pairs[codes].reshape(-1)[: last - whole]
        scale = mx.repeat(scales[whole // size : -(-last // size)], size)[: last - whole]
        elements = (entries * scale)[first - whole :].reshape(stop - start, cols)
        yield start, stop, elements.astype(_MLX_FLOAT[weight.weight_dtype])


def compensated_product(x: mx.array, columns: int, panels: GpuPanels, along_k: bool) -> mx.array:
    """Kahan-style sums over K in float32: `high` is the sum, `low` what its roundings lost."""
    count, wide = x.shape[0], x.astype(mx.float32)
    high, low, done = mx.zeros((count, columns)), mx.zeros((count, columns)), []
    for start, stop, panel in panels:
        weight = panel.astype(x.dtype).astype(mx.float32)
        if along_k:
            part, lost = _by_rows(wide[:, start:stop], weight)
            high, error = _two_sum(high, part)
            low = low + lost + error
            mx.eval(high, low)
        else:
            part, lost = _by_rows(wide, weight.T)
            done.append(_joined(part, lost))
            mx.eval(done[-1])
    result = _joined(high, low) if along_k else mx.concatenate(done, axis=1)
    return result.astype(x.dtype)


def _by_rows(x: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """The product and its lost part, a bounded number of rows of x at a time."""
    if x.shape[0] <= ROWS_AT_A_TIME:
        return _product(x, weight)
    parts = [_product(x[at : at + ROWS_AT_A_TIME], weight) for at in range(0, x.shape[0], ROWS_AT_A_TIME)]
    return mx.concatenate([part for part, _ in parts]), mx.concatenate([lost for _, lost in parts])


def _product(x: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Multiply x [M, K] by weight [K, N], TERMS terms at a time, and sum in a tree; K is padded with zeros."""
    depth = x.shape[1]
    groups = 1 << max(0, (-(-depth // TERMS) - 1).bit_length())
    padding = groups * TERMS - depth
    left = mx.pad(x, [(0, 0), (0, padding)]).reshape(-1, groups, TERMS).transpose(1, 0, 2)
    right = mx.pad(weight, [(0, padding), (0, 0)]).reshape(groups, TERMS, -1)
    sums = left @ right  # [groups, M, N]
    lost = mx.zeros_like(sums[0])
    while sums.shape[0] > 1:
        half = sums.shape[0] // 2
        sums, error = _two_sum(sums[:half], sums[half:])
        lost = lost + error.sum(axis=0)
    return sums[0], lost


def _two_sum(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """The rounded sum and its exact error (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _joined(high: mx.array, low: mx.array) -> mx.array:
    """Add what was lost where it is a number: with Inf in the sum it is NaN, which says nothing."""
    return mx.where(mx.isfinite(low), high + low, high)
