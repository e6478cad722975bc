"""What `lut4tool run` does: feeds from files or at random, timed runs, and outputs saved or compared."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import time
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from lut4tool.runtime import backend
from lut4tool.runtime.dtypes import BY_NUMBER, type_of
from lut4tool.runtime.feeds import ValueInfo
from lut4tool.runtime.graph import RunError
from lut4tool.runtime.ops.sizes import memory
from lut4tool.runtime.session import Runtime
from lut4tool.storage import check_file, reason, size_text, write_atomic

#: What NumPy raises for files that are cut, damaged or lie about themselves.
_DAMAGED = (
    ValueError, OverflowError, MemoryError, EOFError, RuntimeError, SyntaxError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip

#: How files of arrays begin: .npy; .npz with arrays and without.
_ARRAY_FILES = (b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")

#: Random integers are drawn below this: small enough for an index into most tables.
_RANDOM_INTEGERS = 8


@dataclass(frozen=True)
class Comparison:
    """An output against what was expected; within: |y - e| <= atol + rtol * max |e| everywhere, NaN equal to NaN."""

    name: str
    within: bool
    why: str
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    nan: int = 0
    nan_expected: int = 0


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run gave and cost; times in milliseconds, memory in bytes."""

    outputs: Mapping[str, Any]
    load_milliseconds: float
    milliseconds: Sequence[float]
    device: str
    peak_bytes: int
    kernels: Sequence[Mapping[str, str]]
    expected: Sequence[Comparison]
    profile: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The document of `run --json`."""
        times = self.milliseconds
        return {
            "outputs": [_describe(name, value) for name, value in self.outputs.items()],
            "load_milliseconds": self.load_milliseconds,
            "milliseconds": {
                "count": len(times),
                "min": min(times),
                "median": statistics.median(times),
                "max": max(times),
            },
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "kernels": list(self.kernels),
            "expected": [asdict(row) for row in self.expected],
            "profile": list(self.profile),
        }


def run_model(
    runtime: Runtime,
    *,
    load_milliseconds: float,
    given: Sequence[str] = (),
    random_seed: int | None = None,
    dims: Sequence[str] = (),
    repeat: int = 1,
    warmup: int = 0,
    profile: Path | None = None,
    save: Path | None = None,
    expected: Path | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> RunResult:
    """Run a model `warmup + repeat` times on one set of feeds, then save and compare its outputs where asked.

    given: names of .npz files, "name=file.npy" or "name=number". Raises RunError where the feeds do not fit.
    """
    feeds = read_feeds(given, runtime.get_inputs())
    guessed = ""
    if random_seed is not None:
        sizes = _sizes(feeds, runtime.get_inputs()) | parse_dims(dims)
        guessed = _guessed([info for info in runtime.get_inputs() if info.name not in feeds], sizes)
        feeds = random_feeds(runtime.get_inputs(), sizes, random_seed) | feeds
    times, values = list[float](), list[Any]()
    try:
        for count in range(-warmup, repeat):
            start = time.perf_counter()
            values = runtime.run(None, feeds)
            if count >= 0:
                times.append((time.perf_counter() - start) * 1000)
    except RunError as error:
        raise RunError(f"{error}{guessed}") from error
    rows = runtime.profile(feeds, profile) if profile is not None else []
    outputs = {info.name: value for info, value in zip(runtime.get_outputs(), values, strict=True)}
    if save is not None:
        save_npz(save, outputs)
    compared = compare(outputs, load_npz(expected), rtol, atol) if expected is not None else []
    kernels = [{"node": node, "kernel": str(choice)} for node, choice in runtime.kernels.items()]
    return RunResult(
        outputs, load_milliseconds, times, backend.kind(runtime.device), _peak_bytes(), kernels, compared, rows
    )


# -- feeds


def read_feeds(given: Sequence[str], inputs: Sequence[ValueInfo]) -> dict[str, np.ndarray]:
    """Read .npz files, "name=file.npy" and "name=number" into feeds of the declared types."""
    feeds: dict[str, np.ndarray] = {}
    declared = {info.name: info for info in inputs}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            feeds |= load_npz(Path(text))
        elif value.endswith(".npy"):
            feeds[name] = _load(Path(value))
        else:
            feeds[name] = _typed(parse_literal(text), declared.get(name))
    return {name: _viewed(array, declared[name]) if name in declared else array for name, array in feeds.items()}


def _dtype(info: ValueInfo) -> np.dtype | None:
    """NumPy type of a declared tensor, None for what is no tensor."""
    kind = BY_NUMBER.get(info.proto.tensor_type.elem_type)
    return kind.numpy if kind is not None else None


def parse_literal(text: str) -> np.ndarray:
    """Read the number or JSON list of "name=value". Raises RunError."""
    try:
        return np.array(json.loads(text.partition("=")[2]))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{text[:60]}: a name ending in .npy, a number or a JSON list is expected") from error


def _typed(array: np.ndarray, info: ValueInfo | None) -> np.ndarray:
    """An array from the command line in the declared type, where that holds it."""
    dtype = _dtype(info) if info is not None else None
    if dtype is None or array.dtype.kind not in "biuf":
        return array
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    return cast if dtype.kind not in "biu" or np.array_equal(cast, array) else array


def _viewed(array: np.ndarray, info: ValueInfo) -> np.ndarray:
    """View raw bytes as the declared type: NumPy's files have no bfloat16, int4 or float8."""
    dtype = _dtype(info)
    if dtype is None or dtype.name not in ml_dtypes.__all__ or array.dtype.itemsize != dtype.itemsize:
        return array
    return array.view(dtype) if array.dtype.kind in "Vu" else array


def _load(path: Path) -> Any:
    check_file(path, "an .npy or .npz file")
    try:
        with path.open("rb") as file:
            if not file.read(6).startswith(_ARRAY_FILES):
                raise RunError(f"{path} is no .npz or .npy file")
        return np.load(path, allow_pickle=False)
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error
    except _DAMAGED as error:
        raise RunError(f"{path} is not an .npy or .npz file of plain arrays: {_damage(error)}") from error


def _damage(error: Exception) -> str:
    """What is wrong with a file of arrays; NumPy advises to unpickle objects, which runs what the file says."""
    return "it holds objects, which are not read" if "pickle" in str(error) else str(error)


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Read an .npz file of plain arrays, without pickle."""
    loaded = _load(path)
    if isinstance(loaded, np.ndarray):
        raise RunError(f"{path} holds one array; an .npz file of arrays by name is expected")
    with loaded:
        size = sum(entry.file_size for entry in loaded.zip.infolist())
        if size > memory():
            raise RunError(f"{path} takes {size_text(size)} once unpacked, more than this machine's memory")
        try:
            return {name: loaded[name] for name in loaded.files}
        except (*_DAMAGED, OSError) as error:
            raise RunError(f"{path} is damaged or cut short, or holds objects: {_damage(error)}") from error


def save_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name, atomically; types that NumPy's files lack as unsigned integers of their width."""
    plain: dict[str, Any] = {}
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray) or value.dtype == np.object_:
            raise RunError(f"output '{name}' is not an array of numbers and cannot be written to {path}")
        raw = value.dtype.kind == "V" or value.dtype.name in ml_dtypes.__all__
        plain[name] = value.view(f"u{value.dtype.itemsize}") if raw else value
    write_atomic(path, lambda file: _write_npz(file, plain))


def _write_npz(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """What np.savez writes, which cannot take an array that is called `file` or `allow_pickle`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Read "name=number" pairs."""
    dims = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not (name and re.fullmatch("[0-9]{1,18}", number)):
            raise RunError(f"{text[:60]}: name=number is expected")
        dims[name] = int(number)
    return dims


def _sizes(feeds: Mapping[str, Any], inputs: Sequence[ValueInfo]) -> dict[str, int]:
    """The symbolic dimensions that given feeds have the size of."""
    return {
        dim: size
        for info in inputs
        if info.name in feeds
        for dim, size in zip(info.shape or (), np.shape(feeds[info.name]), strict=False)
        if isinstance(dim, str)
    }


def random_feeds(inputs: Sequence[ValueInfo], dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draw every input: floats normal, integers in [0, 8), booleans fair; a symbolic dimension not in `dims` is 1."""
    known = {dim for info in inputs for dim in info.shape or () if isinstance(dim, str)}
    if unknown := sorted(set(dims) - known):
        named = ", ".join(map(repr, sorted(known))) or "none"
        raise RunError(f"--dim {unknown[0]}: no input has a dimension of that name; there is {named}")
    generator = np.random.default_rng(seed)
    feeds = {}
    for info in inputs:
        dtype = _dtype(info)
        if dtype is None or dtype.kind == "O":
            raise RunError(f"input '{info.name}' has type {info.type} and cannot be drawn at random")
        shape = [dim if isinstance(dim, int) else dims.get(dim or "", 1) for dim in info.shape or ()]
        try:
            feeds[info.name] = _drawn(generator, dtype, shape)
        except (ValueError, OverflowError, MemoryError) as error:
            raise RunError(f"input '{info.name}' of shape {shape} is too large to be drawn at random") from error
    return feeds


def _guessed(drawn: Sequence[ValueInfo], dims: Mapping[str, int]) -> str:
    """What to say where a run of inputs drawn at random fails: the dimensions whose size nobody gave."""
    wanted = dict.fromkeys(dim for info in drawn for dim in info.shape or () if not isinstance(dim, int))
    named = [dim for dim in wanted if dim is not None and dim not in dims]
    if named:
        return f" ({', '.join(named)} of the model {_were(named)} taken as 1: --dim NAME=N)"
    nameless = [info.name for info in drawn if None in (info.shape or ())]
    if nameless:
        return f" (dimensions without a name of {', '.join(nameless)} were taken as 1: give these inputs)"
    return ""


def _were(things: Sequence[str]) -> str:
    return "was" if len(things) == 1 else "were"


def _drawn(generator: np.random.Generator, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    if dtype.kind == "b":
        return generator.random(shape) < 0.5
    if dtype.kind in "iu":
        return generator.integers(0, _RANDOM_INTEGERS, shape).astype(dtype)
    return generator.standard_normal(shape, np.float32).astype(dtype)


# -- outputs


def compare(
    outputs: Mapping[str, Any], expected: Mapping[str, np.ndarray], rtol: float, atol: float
) -> list[Comparison]:
    """Compare every expected array with the output of its name. Raises RunError where there is no such output."""
    unknown = sorted(set(expected) - set(outputs))
    if unknown:
        raise RunError(f"the model has no output '{unknown[0]}'; its outputs are {', '.join(map(repr, outputs))}")
    return [_compare(name, outputs[name], wanted, rtol, atol) for name, wanted in expected.items()]


def _compare(name: str, value: Any, wanted: np.ndarray, rtol: float, atol: float) -> Comparison:
    if not isinstance(value, np.ndarray):
        return Comparison(name, False, "is not an array")
    if wanted.dtype.kind == "V" or (value.dtype != wanted.dtype and value.dtype.name in ml_dtypes.__all__):
        wanted = wanted.view(value.dtype) if wanted.dtype.itemsize == value.dtype.itemsize else wanted
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        why = f"is {value.dtype} {list(value.shape)}, not {wanted.dtype} {list(wanted.shape)}"
        return Comparison(name, False, why)
    if value.dtype.kind in "OUS":
        same = bool(np.array_equal(value, wanted))
        return Comparison(name, same, "" if same else "strings differ")
    here, there = value.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    nan, nan_expected = int(np.isnan(here).sum()), int(np.isnan(there).sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        same = (here == there) | (np.isnan(here) & np.isnan(there))
        gap = np.where(same, 0.0, np.abs(here - there))
        finite = np.abs(there[np.isfinite(there)])
        scale = float(finite.max()) if finite.size else 0.0
        norm = math.sqrt(float(here @ here)) * math.sqrt(float(there @ there))
        cosine = float(here @ there) / norm if norm > 0 and math.isfinite(norm) else None
        relative = gap / np.maximum(np.abs(there), np.finfo(np.float32).tiny)
    bound = atol + rtol * scale
    outside = int((~(gap <= bound)).sum())
    why = f"{outside} of {gap.size} elements are over {bound:.3g}" if outside else ""
    largest = [_finite(figure.max()) if figure.size else 0.0 for figure in (gap, relative)]
    return Comparison(name, not outside, why, largest[0], largest[1], cosine, nan, nan_expected)


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _describe(name: str, value: Any) -> dict[str, Any]:
    kind = type_of(value)
    row: dict[str, Any] = {"name": name, "type": kind.name if kind else type(value).__name__, "shape": None}
    row |= {"min": None, "mean": None, "max": None}
    if isinstance(value, np.ndarray):
        row["shape"] = list(value.shape)
        if value.size and value.dtype.kind not in "OUSc":
            numbers = value.astype(np.float64)
            row |= {"min": _finite(numbers.min()), "mean": _finite(numbers.mean()), "max": _finite(numbers.max())}
    return row


def _peak_bytes() -> int:
    """Largest resident size of this process so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
