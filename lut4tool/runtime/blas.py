"""Loads a fast BLAS in front of MLX: its Linux CPU build brings the reference BLAS, 13 to 80 times slower.

MLX binds its BLAS symbols while mlx.core is imported, to whatever global library has them then. So a library with
cblas_sgemm is loaded first, globally. LUT4TOOL_BLAS=none leaves MLX as shipped; a path there picks that library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import lut4tool.native
from lut4tool.errors import Lut4Error

SHIM = Path(lut4tool.native.__file__).with_name("blas_shim.so")

#: Libraries that Linux systems have, under the names that the loader finds: Debian's OpenBLAS, Intel's MKL.
_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libmkl_rt.so.2", "libmkl_rt.so")


class BlasError(Lut4Error):
    """A LUT4TOOL_BLAS that cannot serve."""


@dataclass(frozen=True)
class Library:
    """A BLAS that was loaded: its file, what it says of itself, and its threads (None where it does not say)."""

    path: str
    config: str
    threads: int | None


@dataclass(frozen=True)
class Loading:
    """What `load` did: the library (None: MLX keeps its own), and one sentence on why."""

    library: Library | None
    reason: str


def load() -> Loading:
    """Load the first BLAS that serves, for all libraries loaded from now on.

    Raises BlasError where LUT4TOOL_BLAS names a file that cannot be loaded or has no cblas_sgemm.
    """
    asked = os.environ.get("LUT4TOOL_BLAS", "")
    if asked == "none":
        return Loading(None, "LUT4TOOL_BLAS=none")
    if asked:
        try:
            return Loading(_load(asked), f"LUT4TOOL_BLAS={asked}")
        except OSError as error:
            raise BlasError(f"LUT4TOOL_BLAS={asked} cannot serve MLX: {error}") from error
    if sys.platform != "linux":
        return Loading(None, "only MLX's Linux build needs one")
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return Loading(Library("the process's cblas_sgemm", "", None), "loaded globally before lut4tool's runtime")
    failures = []
    for path in _candidates():
        try:
            return Loading(_load(path), "found before mlx.core was imported")
        except OSError as error:
            failures.append(str(error))
    return Loading(None, "no BLAS found; pip install scipy-openblas32 brings one (" + "; ".join(failures) + ")")


def _candidates() -> list[str]:
    """Where a BLAS may lie: PyPI's scipy-openblas32 and mkl, then the system's."""
    found = []
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        found += sorted(str(file) for file in folder.glob("libscipy_openblas*.so"))
    found += sorted(str(file) for file in Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    return [*found, *_SYSTEM_LIBRARIES]


def _load(path: str) -> Library:
    """Load one library globally, and the shim over it where its names are prefixed; raise OSError where it is no BLAS.

    It is looked at privately first: a library that cannot serve must not put its names in front of others.
    """
    private = ctypes.CDLL(path)
    prefix = "scipy_" if hasattr(private, "scipy_cblas_sgemm") else ""
    if not hasattr(private, f"{prefix}cblas_sgemm"):
        raise OSError(f"{path} has no cblas_sgemm")
    if prefix and not SHIM.exists():
        raise OSError(f"{path} needs lut4tool's blas_shim.so, which an install without a compiler lacks")
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    if prefix:
        ctypes.CDLL(str(SHIM), ctypes.RTLD_GLOBAL)
    return Library(path, *_describe(library, prefix))


def _describe(library: ctypes.CDLL, prefix: str) -> tuple[str, int | None]:
    if not hasattr(library, f"{prefix}openblas_get_config"):
        return "", None
    config = getattr(library, f"{prefix}openblas_get_config")
    config.restype = ctypes.c_char_p
    return config().decode().strip(), int(getattr(library, f"{prefix}openblas_get_num_threads")())
