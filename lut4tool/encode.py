"""Codes and scales: a float weight to the 4-bit numbers of its chain, by the nearest codebook entry.

The numbers are bitsandbytes': one scale a block of the flattened [rows, cols] weight, as the model holds it.
"""

from __future__ import annotations

import json
import os
import tokenize
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lut4tool.errors import Lut4Error
from lut4tool.formats import CODEBOOKS, Lookup4Weight

_CHUNK_ELEMENTS = 1 << 20
_SUFFIXES = (".npy", ".json", ".txt")


class ProduceError(Lut4Error):
    """A codebook, an option or a model that cannot be quantized as asked."""


def load_codebook(codebook: str | os.PathLike[str] | np.ndarray) -> np.ndarray:
    """Return a codebook as float32 [16]: "nf4", "fp4", a .npy, .json or .txt file of 16 numbers, or an array of them.

    Raises ProduceError where it is not 16 finite numbers with one that is not zero.
    """
    if isinstance(codebook, str) and codebook in CODEBOOKS:
        return CODEBOOKS[codebook]
    values, what = (codebook, "the codebook") if isinstance(codebook, np.ndarray) else _read_codebook(Path(codebook))
    try:
        with np.errstate(over="ignore"):  # it is not finite then, and that is said below
            table = np.asarray(values).astype(np.float32, casting="same_kind" if np.iscomplexobj(values) else "unsafe")
    except (TypeError, ValueError):
        raise ProduceError(f"{what} is not a list of numbers") from None
    if table.shape != (16,):
        raise ProduceError(f"{what} has shape {list(table.shape)}; a codebook is 16 numbers")
    if not np.isfinite(table).all() or not table.any():
        raise ProduceError(f"{what} must be finite in float32, and not all zero")
    return table


def _read_codebook(path: Path) -> tuple[Any, str]:
    """Read the numbers of a codebook file; also return what an error calls it."""
    what = f"codebook file {path}"
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe waits
        raise ProduceError(f"{what} is not a regular file")
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False), what
        if path.suffix == ".json":
            return json.loads(path.read_text()), what
        if path.suffix == ".txt":
            return [float(word) for word in path.read_text().replace(",", " ").split()], what
    except OSError as error:
        text = error.strerror or str(error)
        raise ProduceError(f"cannot read {what}: {text[:1].lower()}{text[1:]}") from error
    except (
        ValueError,
        EOFError,
        MemoryError,
        RecursionError,
        SyntaxError,
        tokenize.TokenError,
    ) as error:
        said = "it holds objects, which are not read" if "pickle" in str(error) else error  # NumPy advises to unpickle
        raise ProduceError(f"{what} is not a list of 16 numbers: {said}") from error
    raise _neither(path)


def check_codebook(codebook: str) -> None:
    """Raise ProduceError for a name that no codebook has and no file of one can have; no file is read."""
    path = Path(codebook)
    if codebook not in CODEBOOKS and path.suffix not in _SUFFIXES and (path.is_file() or not path.exists()):
        raise _neither(path)


def _neither(path: Path) -> ProduceError:
    return ProduceError(f"codebook {str(path)!r} is neither {', '.join(CODEBOOKS)} nor a .npy, .json or .txt file")


def _boundaries(codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 boundaries [n - 1] and uint8 codes [n], by value: a number takes codes[boundaries < number].

    A boundary is the largest float64 that still belongs to the lower of two neighbours. Computed in fractions, so the
    choice is exact; a tie goes to the lower code, and of equal values (0.0 and -0.0) the lower code is used.
    """
    order = sorted(range(16), key=lambda code: (float(codebook[code]), code))
    codes = [order[0], *(high for low, high in pairwise(order) if codebook[low] != codebook[high])]
    boundaries = []
    for low, high in pairwise(codes):
        middle = (Fraction(float(codebook[low])) + Fraction(float(codebook[high]))) / 2
        boundary = float(middle)
        if Fraction(boundary) > middle or (Fraction(boundary) == middle and high < low):
            boundary = float(np.nextafter(boundary, -np.inf))
        boundaries.append(boundary)
    return np.array(boundaries), np.array(codes, np.uint8)


def encode(
    weight: np.ndarray, codebook: np.ndarray, block_size: int, weight_dtype: str = "float32"
) -> tuple[Lookup4Weight, float, float]:
    """Quantize a finite float weight [rows, cols]: return it packed, with its largest and its rms error.

    scales = float32(absmax / max|codebook|) a block of the flattened weight (bitsandbytes' absmax, where the codebook
    reaches 1), and each code is that of the entry nearest to weight / scale in float64; a tie takes the lower code. The
    last block is filled up with zeros. Streams: temporaries are about 40 MB. Errors are relative to the block's absmax.
    Raises ProduceError for NaN, Inf or a scale that float32 cannot hold.
    """
    rows, cols = weight.shape
    flat = weight.reshape(-1)
    blocks = -(-flat.size // block_size)
    packed = np.empty(blocks * block_size // 2, np.uint8)
    scales = np.empty(blocks, np.float32)
    boundaries, codes = _boundaries(codebook)
    table = codebook.astype(np.float64)
    peak = float(np.abs(table).max())
    largest, squares = 0.0, 0.0
    step = max(1, _CHUNK_ELEMENTS // block_size)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        piece = flat[first * block_size : last * block_size].astype(np.float64)
        values = np.zeros((last - first, block_size))
        values.reshape(-1)[: piece.size] = piece
        absmax = np.abs(values).max(axis=1)
        if not np.isfinite(absmax).all():
            raise ProduceError("it holds NaN or Inf, which no codebook has")
        with np.errstate(over="ignore"):
            scales[first:last] = absmax / peak
        if not np.isfinite(scales[first:last]).all():
            raise ProduceError("a scale of it is too large for float32")
        divisors = scales[first:last].astype(np.float64)
        divisors[divisors == 0] = 1.0
        values /= divisors[:, None]
        nibbles = codes[np.searchsorted(boundaries, values.reshape(-1))]
        packed[first * block_size // 2 : last * block_size // 2] = nibbles[::2] << 4 | nibbles[1::2]
        errors = (table[nibbles].reshape(values.shape) - values) * (scales[first:last, None] > 0) / peak
        errors = errors.reshape(-1)[: piece.size]
        largest = max(largest, float(np.abs(errors).max()))
        squares += float(np.square(errors).sum())
    result = Lookup4Weight(packed, scales, codebook, rows, cols, block_size, weight_dtype=weight_dtype)
    return result, largest, (squares / flat.size) ** 0.5
