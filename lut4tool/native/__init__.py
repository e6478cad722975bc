"""The compiled decode of 4-bit weights and products with them, for the instruction set of this machine.

Where the package was installed without a compiler NumPy decodes, to the same bytes (a NaN is a NaN), and there are no
products; `describe()` says what works here. LUT4TOOL_CPU_ISA=amx|avx512|avx2|neon|portable forces an instruction set.
"""

from __future__ import annotations

import os
import weakref

import numpy as np

from lut4tool import formats
from lut4tool.formats import FLOAT_DTYPES, FormatError, Lookup4Weight, QmmWeight

try:
    import lut4tool.native._native as _native
except ModuleNotFoundError:  # a pure wheel; a module that is there and does not load is an error
    _native = None  # type: ignore[assignment]

INSTRUCTION_SET = "LUT4TOOL_CPU_ISA"

if _native is not None and (_asked := os.environ.get(INSTRUCTION_SET, "").strip().lower()):
    try:
        _native.use_instruction_set(_asked)
    except ValueError as error:
        raise FormatError(f"{INSTRUCTION_SET}: {error}") from error


def compiled() -> bool:
    """Whether the compiled module is there."""
    return _native is not None


def describe() -> str:
    """What decodes weights here: "native (avx512)", "native (avx2)", "native (portable)" or "numpy"."""
    return f"native ({_native.instruction_set()})" if compiled() else "numpy"


def product_instruction_set() -> str:
    """The instruction set that products use: "amx", "avx512", "avx2", "neon", "portable"; "" if not compiled."""
    return str(_native.product_instruction_set()) if compiled() else ""


def thread_count() -> int:
    """Threads that native code uses when not told: OMP_NUM_THREADS, at most the processors this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(int(asked), allowed) if asked.isdecimal() and int(asked) else allowed


def decode_elements(
    weight: Lookup4Weight, start: int, stop: int, out: np.ndarray | None = None, threads: int = 0
) -> np.ndarray:
    """Decode flat elements [start, stop) of W to its weight_dtype, into `out` where given; `start` must begin a block.

    The same bytes as formats.decode_elements. out: [stop - start], C-contiguous, of the weight's dtype.
    threads: at most so many; 0 means thread_count(). Raises FormatError for a span or an `out` that does not fit.
    """
    weight.check_span(start, stop)
    out = _output((stop - start,), FLOAT_DTYPES[weight.weight_dtype], out)
    if not compiled():
        out[:] = formats.decode_elements(weight, start, stop)
        return out
    size = weight.block_size
    _native.decode_elements(
        _buffer(weight.packed[start // 2 : (stop + 1) // 2]),
        _buffer(weight.scales[start // size : -(-stop // size)]),
        _buffer(weight.codebook),
        size,
        weight.high_nibble_first,
        _buffer(out),
        threads or thread_count(),
    )
    return out


def decode_qmm(
    weight: QmmWeight, start: int = 0, stop: int | None = None, out: np.ndarray | None = None, threads: int = 0
) -> np.ndarray:
    """Decode rows [start, stop) of W to an array [stop - start, K] of its weight_dtype, into `out` where given.

    The same bytes as formats.decode_qmm; `out` and `threads` as in decode_elements.
    """
    rows = range(weight.N)[start:stop]
    out = _output((len(rows), weight.K), FLOAT_DTYPES[weight.weight_dtype], out)
    if not compiled():
        out[:] = formats.decode_qmm(weight, start, stop)
        return out
    shared = weight.zero_points.shape == (1, 1)
    _native.decode_qmm(
        _buffer(weight.packed[start:stop]),
        _buffer(weight.scales[start:stop]),
        _buffer(weight.zero_points if shared else weight.zero_points[start:stop]),
        len(rows),
        weight.K,
        weight.block_size,
        _buffer(out),
        threads or thread_count(),
    )
    return out


class Matrix:
    """The matrix [K, N] of a weight whose packed data the compiled products read where they lie (a map included).

    Scales or zero points that are not aligned for their type are copied, once.
    """

    def __init__(self, weight: Lookup4Weight | QmmWeight) -> None:
        if isinstance(weight, Lookup4Weight):
            arrays = _buffer(weight.packed), _buffer(weight.scales), _buffer(weight.codebook)
            sizes = weight.rows, weight.cols, weight.block_size
            along_k = tuple(weight.perm) == (1, 0)
            rounding = weight.weight_dtype
            self._matrix = _native.lookup4_matrix(*arrays, *sizes, along_k, weight.high_nibble_first, rounding)
        else:
            arrays = _buffer(weight.packed), _buffer(weight.scales), _buffer(weight.zero_points)
            self._matrix = _native.qmm_matrix(*arrays, weight.N, weight.K, weight.block_size)

    @property
    def serves_gemv(self) -> bool:
        """Whether rows and blocks begin at multiples of 32 elements, which gemv needs."""
        return bool(self._matrix.serves_gemv())

    @property
    def serves_bf16(self) -> bool:
        """Whether multiply_bf16 is for this machine and weight: rounded to bfloat16, and served by gemv."""
        return bool(self._matrix.serves_bf16())

    def multiply_bf16(self, x: np.ndarray, out: np.ndarray, threads: int = 0) -> bool:
        """Write x [M, K] times the matrix into out [M, N], both bfloat16 and C-contiguous, as product_bf16.cpp says.

        threads: at most so many; 0 means thread_count(). Returns whether out was made: not where serves_bf16 is false,
        nor where a value may be too small for the unit, nor where a result is not finite though its row of x is.
        """
        bits = np.ascontiguousarray(x).view(np.uint16)
        return bool(self._matrix.multiply_bf16(bits, out.view(np.uint16), threads or thread_count()))

    def kernel(self, rows: int) -> str:
        """Return "gemv" or "tile", the kernel that multiplies so many rows of x unless told otherwise."""
        return str(self._matrix.kernel(rows))

    def multiply(self, x: np.ndarray, out: np.ndarray, kernel: str = "", threads: int = 0) -> str:
        """Write x [M, K] times the matrix into out [M, N], both float32 and C-contiguous, as exact as product.h says.

        kernel: "gemv", "tile", "digits" or "" for what `kernel` says. threads: at most so many; 0 means thread_count().
        Returns the kernel that made it: "tile" also for "digits" where machine, weight or x is nothing for them.
        """
        return str(self._matrix.multiply(np.ascontiguousarray(x), out, kernel, threads or thread_count()))


class Watch:
    """A map of a file that may be cut while it is read: its pages become zeros then, where the process would die.

    Without the compiled module nothing is watched.
    """

    def __init__(self, mapped: np.memmap) -> None:
        self._number = _native.watch_pages(mapped) if compiled() else 0
        if self._number:
            weakref.finalize(mapped._mmap, _native.forget_pages, self._number).atexit = False  # type: ignore[attr-defined]

    @property
    def lost(self) -> bool:
        """Whether a page could not be read: the file was cut, or its disk failed."""
        return bool(self._number) and _native.lost_pages(self._number)


def aligned(array: np.ndarray) -> np.ndarray:
    """A C-contiguous copy that begins at a cache line, so that no vector of it crosses one."""
    line = 64
    room = np.empty(array.nbytes + line, np.uint8)
    start = -room.ctypes.data % line
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _output(shape: tuple[int, ...], dtype: np.dtype, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        raise FormatError(f"out must be a writable C-contiguous {dtype} array of shape {list(shape)}")
    return out


def _buffer(array: np.ndarray) -> np.ndarray:
    """Return the array flat, contiguous and aligned (a view where it is), bfloat16 as uint16."""
    flat = np.require(array, requirements=("C", "A")).reshape(-1)
    return flat.view(np.uint16) if flat.dtype == FLOAT_DTYPES["bfloat16"] else flat
