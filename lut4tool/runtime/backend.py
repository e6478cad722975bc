"""The one import of mlx.core, made ready first: exact float32, a fast BLAS, no compiler at run time on a CPU.

Everything else in the package takes `mx` from here. Importing this module raises BackendError where MLX does not start.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lut4tool.errors import Lut4Error
from lut4tool.runtime.blas import Loading, load

__all__ = [
    "DEVICES",
    "BackendError",
    "Blas",
    "blas",
    "can_compile_unfused",
    "compiles",
    "describe",
    "device",
    "kind",
    "mx",
    "set_fusing",
]

DEVICES = ("auto", "metal", "cuda", "cpu")

#: Of mlx/compile.h, CompileMode.
_NO_FUSE, _FUSE = 2, 3
_FUSING, _HOLDS = threading.Lock(), list[int]()

_EXTRAS = "pip install 'lut4tool[cpu]' (with an NVIDIA GPU, 'lut4tool[cuda12]' or 'lut4tool[cuda13]')"


class BackendError(Lut4Error):
    """MLX, or a device, that is not to be had here."""


# MLX and its libraries read these once, when they start. What the user has set stays.
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 means float32
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the cores from other runtimes

_MLX_CAME_FIRST = "mlx.core" in sys.modules
_LOADING = Loading(None, "mlx.core was imported before lut4tool's runtime") if _MLX_CAME_FIRST else load()

try:
    import mlx.core as mx
except ModuleNotFoundError as error:
    raise BackendError(f"running a model needs MLX, which is not installed: {_EXTRAS}") from error
except ImportError as error:
    raise BackendError(
        f"MLX is installed but does not start ({error}); on Linux it needs an extra: {_EXTRAS}"
    ) from error

_HAS_GPU = mx.is_available(mx.Device(mx.gpu))
if not _HAS_GPU:
    # On a CPU mx.compile calls g++ at run time, about a second a kernel, and gains nothing; read at the first compile.
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")


def kind(device: mx.Device) -> str:
    """Return "metal", "cuda" or "cpu" for a device."""
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


@functools.cache
def device(name: str = "auto") -> mx.Device:
    """Return the device of that name, proved by a tiny computation; "auto" is a GPU where one works, else the CPU.

    Raises BackendError for a name that is not in DEVICES and for a device that is not there or does not compute.
    """
    if name not in DEVICES:
        raise BackendError(f"there is no device {name!r}; use {', '.join(DEVICES)}")
    cpu, gpu = mx.Device(mx.cpu), mx.Device(mx.gpu)
    if name == "cpu" or (name == "auto" and not _HAS_GPU):
        return cpu
    if not _HAS_GPU or name not in ("auto", kind(gpu)):
        here = f"this machine has {kind(gpu) if _HAS_GPU else 'only cpu'} with the MLX installed"
        raise BackendError(f"device {name!r} is not available: {here}")
    try:
        mx.eval(mx.add(mx.array([1.0, 2.0]), 1.0, stream=gpu))
    except (RuntimeError, ValueError) as error:
        if name != "auto":
            raise BackendError(f"device {name!r} is there but does not compute: {error}") from error
        warnings.warn(f"the {kind(gpu)} device does not compute, so the CPU is used: {error}", stacklevel=2)
        return cpu
    return gpu


def compiles() -> bool:
    """Whether mx.compile traces what it is given: it may have been turned off, by MLX_DISABLE_COMPILE or a call."""
    traced = []

    def trace(x: mx.array) -> mx.array:
        try:
            mx.eval(x)
        except ValueError:  # a placeholder has no value
            traced.append(True)
        return x

    mx.compile(trace)(mx.zeros(1))
    return bool(traced)


@functools.cache
def _set_compile_mode() -> Any:
    """MLX's set_compile_mode(CompileMode) of C++, which its Python lacks; None where the library does not export it."""
    for library in sorted((Path(mx.__file__).parent / "lib").glob("libmlx.*")):
        try:
            return ctypes.CDLL(str(library))._ZN3mlx4core16set_compile_modeENS0_11CompileModeE
        except (OSError, AttributeError):
            continue
    return None


def can_compile_unfused() -> bool:
    """Whether `set_fusing` works with the MLX installed."""
    return _set_compile_mode() is not None


def set_fusing(on: bool) -> None:
    """Keep mx.compile from fusing operations into kernels until as many calls with True as with False were made.

    On CUDA a fused kernel takes 4 to 8 seconds to build (measured on an H200) and rounds a product and sum once.
    """
    with _FUSING:
        _HOLDS.pop() if on else _HOLDS.append(1)
        _set_compile_mode()(_NO_FUSE if _HOLDS else _FUSE)


@dataclass(frozen=True)
class Blas:
    """What serves dense float32 products on the CPU.

    name, threads: of the library in front of MLX, threads None where it does not say; reason: why it is that one.
    dense_products_through_numpy: MLX's own product is slow here, so callers should make it with NumPy on views.
    """

    name: str
    threads: int | None
    reason: str
    dense_products_through_numpy: bool


@functools.cache
def blas() -> Blas:
    """Say what serves dense float32 products on the CPU; the first call may time a small one."""
    library = _LOADING.library
    if library is None:
        return Blas("MLX's own", None, _LOADING.reason, dense_products_through_numpy=sys.platform == "linux")
    return Blas(library.config or library.path, library.threads, _LOADING.reason, _is_slow())


def _is_slow() -> bool:
    """Whether MLX's 256 x 256 x 256 product is as slow as the reference BLAS: over 3 ms and 5 times NumPy's.

    A busy machine makes single times long, so one quick time is enough to say no, and NumPy must do better there too.
    """
    a, b = np.ones((2, 256, 256), np.float32)
    x, y, cpu = mx.array(a), mx.array(b), mx.Device(mx.cpu)
    mx.eval(x, y)
    ours, numpys = [], []
    for _ in range(8):
        ours.append(_milliseconds(lambda: mx.eval(mx.matmul(x, y, stream=cpu))))
        if min(ours) < 3:
            return False
        numpys.append(_milliseconds(lambda: a @ b))
    return min(ours) > 5 * min(numpys)


def _milliseconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def describe(device: mx.Device) -> dict[str, Any]:
    """What a profile says: MLX's version, the device, the BLAS of CPU products, the switches in force."""
    import lut4tool.native

    facts: dict[str, Any] = {"mlx": version("mlx"), "device": kind(device), "native": lut4tool.native.describe()}
    if kind(device) == "cpu":
        serves = blas()
        facts["blas"] = "numpy" if serves.dense_products_through_numpy else serves.name
        facts["blas_reason"] = serves.reason
        facts["blas_threads"] = serves.threads
    switches = (
        "MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE", "LUT4TOOL_COMPILE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "OMP_WAIT_POLICY",
    )  # fmt: skip
    facts["environment"] = {name: os.environ[name] for name in switches if name in os.environ}
    return facts
