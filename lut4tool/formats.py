"""The 4-bit weights that lut4tool knows: their facts, their operators' names and their exact decode in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from lut4tool.errors import Lut4Error

DOMAIN = "ai.lut4tool"
VERSION = 1
LOOKUP4_MATMUL = "Lookup4MatMul"
QMM = "QMM"

#: The float types a weight can have: name -> NumPy type, and name -> onnx.TensorProto.DataType number.
FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
ONNX_DTYPE: Mapping[str, int] = {"float32": 1, "float16": 10, "bfloat16": 16}
DTYPE_NAME: Mapping[int, str] = {number: name for name, number in ONNX_DTYPE.items()}

# bitsandbytes' NF4 (QLoRA, arXiv:2305.14314, appendix E) and FP4 tables, in code order.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=np.float32,
)  # fmt: skip
_FP4_MAGNITUDES = [0.0, 0.005208333333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25]
FP4 = np.array(_FP4_MAGNITUDES + [-value for value in _FP4_MAGNITUDES], dtype=np.float32)
CODEBOOKS: Mapping[str, np.ndarray] = {"nf4": NF4, "fp4": FP4}

#: Elements decoded at a time where a whole weight is streamed: the temporaries stay near 12 MB.
_CHUNK_ELEMENTS = 1 << 20


class FormatError(Lut4Error):
    """Arrays or attributes that do not describe a 4-bit weight."""


def dtype_name(dtype: Any) -> str:
    """Return "float32", "float16" or "bfloat16" for a NumPy type; raise FormatError for any other."""
    for name, known in FLOAT_DTYPES.items():
        if np.dtype(dtype) == known:
            return name
    raise FormatError(f"a 4-bit weight is float32, float16 or bfloat16, not {np.dtype(dtype)}")


@dataclass(frozen=True, eq=False)
class Lookup4Weight:
    """A weight W [rows, cols] of codebook entries times block scales (DESIGN: Lookup4MatMul).

    W.flat[i] = round_to_weight_dtype(float32(codebook[code(i)]) * float32(scales[i // block_size])), with code(i) a
    nibble of packed[i // 2]; the matrix that a MatMul multiplies by is W transposed by `perm`.

    packed: uint8 [bytes], at least ceil(rows * cols / 2) bytes and at most blocks * block_size / 2.
    scales: float32, float16 or bfloat16 [blocks], blocks = ceil(rows * cols / block_size).
    codebook: float32, float16 or bfloat16 [16].
    Raises FormatError where these do not hold.
    """

    packed: np.ndarray
    scales: np.ndarray
    codebook: np.ndarray
    rows: int
    cols: int
    block_size: int
    perm: tuple[int, int] = (0, 1)
    high_nibble_first: bool = True
    weight_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.cols <= 0:
            raise FormatError(f"rows and cols must be positive, not {self.rows} and {self.cols}")
        if self.block_size < 2 or self.block_size % 2:
            raise FormatError(f"block_size must be even and at least 2, not {self.block_size}")
        if tuple(self.perm) not in ((0, 1), (1, 0)):
            raise FormatError(f"perm must be [0, 1] or [1, 0], not {list(self.perm)}")
        if self.weight_dtype not in FLOAT_DTYPES:
            raise FormatError(f"weight_dtype must be one of {', '.join(FLOAT_DTYPES)}, not {self.weight_dtype}")
        if self.packed.dtype != np.uint8 or self.packed.ndim != 1:
            raise FormatError(f"packed must be uint8 of rank 1, not {self.packed.dtype} of rank {self.packed.ndim}")
        if self.scales.shape != (self.blocks,):
            raise FormatError(f"scales must have shape [{self.blocks}], not {list(self.scales.shape)}")
        if self.codebook.shape != (16,):
            raise FormatError(f"codebook must have shape [16], not {list(self.codebook.shape)}")
        dtype_name(self.scales.dtype), dtype_name(self.codebook.dtype)
        least, most = (self.rows * self.cols + 1) // 2, self.blocks * self.block_size // 2
        if not least <= self.packed.size <= most:
            raise FormatError(f"packed must have {least} to {most} bytes, not {self.packed.size}")

    @property
    def blocks(self) -> int:
        """Number of blocks over the flattened weight, the last one possibly cut."""
        return -(-self.rows * self.cols // self.block_size)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [K, N] of the matrix that a MatMul multiplies by, after `perm`."""
        return (self.rows, self.cols) if tuple(self.perm) == (0, 1) else (self.cols, self.rows)

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed, scales and codebook together."""
        return self.packed.nbytes + self.scales.nbytes + self.codebook.nbytes

    def check_span(self, start: int, stop: int) -> None:
        """Raise FormatError unless flat elements [start, stop) lie in W and `start` begins a block."""
        if start % self.block_size or not 0 <= start <= stop <= self.rows * self.cols:
            raise FormatError(f"elements {start} to {stop} do not begin at a block of this weight, or leave it")

    def attributes(self, dtype: str) -> dict[str, int | list[int]]:
        """Attributes of the Lookup4MatMul node for an X of type `dtype`, all of them, in the order they are written."""
        return lookup4_attributes(
            self.rows, self.cols, self.block_size, self.perm, self.high_nibble_first, self.weight_dtype, dtype
        )


def lookup4_attributes(
    rows: int, cols: int, block_size: int, perm: Sequence[int], high_nibble_first: bool, weight_dtype: str, dtype: str
) -> dict[str, int | list[int]]:
    """Attributes of a Lookup4MatMul node, from the facts of its weight and the type of its X."""
    return {
        "rows": rows,
        "cols": cols,
        "block_size": block_size,
        "perm": list(perm),
        "high_nibble_first": int(high_nibble_first),
        "weight_dtype": ONNX_DTYPE[weight_dtype],
        "dtype": ONNX_DTYPE[dtype],
    }


def pair_table(weight: Lookup4Weight) -> np.ndarray:
    """Return float32 [256, 2]: the two codebook entries of each byte, in element order."""
    codebook = weight.codebook.astype(np.float32)
    high, low = np.repeat(codebook, 16), np.tile(codebook, 16)
    return np.stack((high, low) if weight.high_nibble_first else (low, high), axis=1)


def decode_elements(weight: Lookup4Weight, start: int, stop: int) -> np.ndarray:
    """Decode flat elements [start, stop) of W into a new array of its weight_dtype; `start` must begin a block.

    Exact: one float32 product an element, then one rounding to weight_dtype. Temporaries are 12 bytes an element.
    """
    size = weight.block_size
    weight.check_span(start, stop)
    blocks = slice(start // size, -(-stop // size))
    pairs = pair_table(weight)[weight.packed[start // 2 : (stop + 1) // 2]].reshape(-1)[: stop - start]
    scales = np.repeat(weight.scales[blocks].astype(np.float32), size)[: stop - start]
    with np.errstate(all="ignore"):  # Inf * 0 and overflow are the producer's values, not faults
        return np.multiply(pairs, scales, out=pairs).astype(FLOAT_DTYPES[weight.weight_dtype], copy=False)


def decode_rows(weight: Lookup4Weight, start: int, stop: int) -> np.ndarray:
    """Decode rows [start, stop) of W to an array [stop - start, cols] of its weight_dtype (blocks may cross rows)."""
    first = start * weight.cols
    whole = first - first % weight.block_size
    return decode_elements(weight, whole, stop * weight.cols)[first - whole :].reshape(stop - start, weight.cols)


def decode(weight: Lookup4Weight) -> np.ndarray:
    """Decode the whole W [rows, cols] to its weight_dtype, streamed by whole blocks; `perm` is not applied."""
    total = weight.rows * weight.cols
    out = np.empty(total, FLOAT_DTYPES[weight.weight_dtype])
    step = max(1, _CHUNK_ELEMENTS // weight.block_size) * weight.block_size
    for start in range(0, total, step):
        stop = min(start + step, total)
        out[start:stop] = decode_elements(weight, start, stop)
    return out.reshape(weight.rows, weight.cols)


@dataclass(frozen=True, eq=False)
class QmmWeight:
    """A 4-bit affine weight W [N, K] (DESIGN: QMM), low nibble first along K, K padded to whole blocks.

    W[n, k] = Cast(code - zero_point, weight_dtype) * scale, the product rounded once to weight_dtype.

    packed: uint8 [N, K_blocks, block_size / 2]; scales: weight_dtype [N, K_blocks];
    zero_points: uint8 or weight_dtype, [N, K_blocks] or [1, 1] where one serves all.
    Raises FormatError where these do not hold.
    """

    packed: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray
    K: int
    N: int
    block_size: int
    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits != 4:
            raise FormatError(f"QMM takes 4 bits, not {self.bits}")
        if self.K <= 0 or self.N <= 0 or self.block_size < 2 or self.block_size % 2:
            raise FormatError(f"K {self.K}, N {self.N} or block_size {self.block_size} is not a QMM weight's")
        grid = (self.N, -(-self.K // self.block_size))
        if self.packed.dtype != np.uint8 or self.packed.shape != (*grid, self.block_size // 2):
            raise FormatError(f"packed must be uint8 {[*grid, self.block_size // 2]}, not {list(self.packed.shape)}")
        if self.scales.shape != grid:
            raise FormatError(f"scales must have shape {list(grid)}, not {list(self.scales.shape)}")
        if self.zero_points.shape not in (grid, (1, 1)):
            raise FormatError(f"zero_points must have shape {list(grid)} or [1, 1], not {list(self.zero_points.shape)}")
        if self.zero_points.dtype not in (np.dtype(np.uint8), self.scales.dtype):
            raise FormatError(f"zero_points must be uint8 or {self.scales.dtype}, not {self.zero_points.dtype}")
        dtype_name(self.scales.dtype)

    @property
    def weight_dtype(self) -> str:
        """The type that each product is rounded to: the scales'."""
        return dtype_name(self.scales.dtype)

    def attributes(self, dtype: str) -> dict[str, int]:
        """Attributes of the QMM node for an X of type `dtype`, all of them, in the order they are written."""
        return {
            "K": self.K,
            "N": self.N,
            "bits": self.bits,
            "block_size": self.block_size,
            "weight_dtype": ONNX_DTYPE[self.weight_dtype],
            "dtype": ONNX_DTYPE[dtype],
        }


def decode_qmm(weight: QmmWeight, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Decode rows [start, stop) of W to an array [stop - start, K] of its weight_dtype."""
    rows = slice(start, weight.N if stop is None else stop)
    packed = weight.packed[rows]
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:2], weight.block_size)
    zero_points = weight.zero_points if weight.zero_points.shape == (1, 1) else weight.zero_points[rows]
    with np.errstate(all="ignore"):
        steps = codes.astype(np.float32) - zero_points.astype(np.float32)[..., None]
        values = steps.astype(weight.scales.dtype) * weight.scales[rows][..., None]  # [rows, K_blocks, block_size]
    return values.reshape(packed.shape[0], -1)[:, : weight.K]
