"""Products with 4-bit weights: the backends that can make them, and the choice of one for each weight.

A backend is a module or folder here named after the device that it serves (`metal`, `cuda`, `cpu`), found by itself;
`reference` serves any device and refuses nothing. Each has

    KERNELS                                    the names that LUT4TOOL_KERNEL may force in it
    available() -> bool                        whether it can work on this machine
    refuses(x, weight) -> str | None           why it does not serve this product, None where it does
    lookup4_matmul(x, weight, kernel=None)     x [M, K] times a Lookup4Weight -> [M, N] of x's type
    lookup4_decode(weight)                     W [rows, cols] of its weight_dtype
    qmm(x, weight, kernel=None)                x [M, K] times a QmmWeight -> [M, N] of x's type
    probe(weight, dtype)                       optional: makes tiny products, RuntimeError where a kernel fails

Where a backend writes a weight out dense for a product, decoded.dense_of shares it with the other users of the weight.
A backend may also have describe() -> str, what of it serves here, for the plan: such as its instruction set.

x and results are mx.arrays, on a CPU also NumPy's; the weight's arrays stay NumPy (views of the file's map), to be
read where they lie or copied once. M is a run-time value. `kernel` is the forced name, None to pick by M.

LUT4TOOL_KERNEL=gemv|tile|decode|reference forces a kernel, LUT4TOOL_DISABLE=metal,cuda,cpu turns backends off.
mlx.core is imported here: lut4tool.runtime.backend comes first, so that the BLAS does.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from lut4tool.errors import Lut4Error
from lut4tool.formats import Lookup4Weight, QmmWeight
from lut4tool.kernels import decoded

FORCED, DISABLED = "LUT4TOOL_KERNEL", "LUT4TOOL_DISABLE"
KERNEL_NAMES = ("gemv", "tile", "decode", "reference")
#: Characters of a compiler's message that a refusal repeats.
MOST_OF_A_REASON = 400
DEVICE_BACKENDS = ("metal", "cuda", "cpu")
#: Backends whose kernels failed and why, each said once.
_WARNED: set[tuple[str, str]] = set()

MLX_FLOAT: Mapping[str, mx.Dtype] = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class KernelError(Lut4Error):
    """No kernel serves a product as it was asked for."""


def named(name: str, module: Any) -> str:
    """A backend or a kernel of it by the name that users meet: with the instruction set, such as "cpu amx"."""
    describe = getattr(module, "describe", None)
    return f"{name} {describe()}" if describe else name


@dataclass(frozen=True, repr=False)
class Choice:
    """The backend that serves a weight, the kernel forced in it (None: it picks by M), and why the others do not."""

    backend: str
    kernel: str | None
    module: Any
    refusals: Mapping[str, str]

    @property
    def name(self) -> str:
        """Such as "reference", "cuda", "cuda/tile" or "cpu/gemv avx512"."""
        name = f"{self.backend}/{self.kernel}" if self.kernel and self.kernel != self.backend else self.backend
        return named(name, self.module)

    def __str__(self) -> str:
        return "; ".join([self.name, *(f"not {backend}: {why}" for backend, why in self.refusals.items())])

    __repr__ = __str__

    @property
    def takes_numpy(self) -> bool:
        """Whether x may be a NumPy array, which gives another."""
        return self.backend == "cpu"

    def matmul(self, x: Any, weight: Lookup4Weight | QmmWeight) -> Any:
        """Multiply x [M, K] by the weight's matrix [K, N]."""
        product = self.module.lookup4_matmul if isinstance(weight, Lookup4Weight) else self.module.qmm
        return product(x, weight, self.kernel)


@cache
def backends() -> Mapping[str, Any]:
    """The backend modules in this folder, by name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return {
        name: importlib.import_module(f"{__name__}.{name}") for name in (*DEVICE_BACKENDS, "reference") if name in names
    }


def choose(weight: Lookup4Weight | QmmWeight, dtype: str, device: str, m: int = 1) -> Choice:
    """Choose the backend for products of x [m, K] of type `dtype` with this weight on "metal", "cuda" or "cpu".

    Raises KernelError for switches that name nothing, and where the forced kernel does not serve.
    """
    forced, disabled = _forced(), _disabled()
    depth = weight.shape[0] if isinstance(weight, Lookup4Weight) else weight.K
    x = mx.zeros((m, depth), MLX_FLOAT[dtype])  # lazy: only its shape and type are looked at
    refusals: dict[str, str] = {}
    for name in (device, "reference"):
        module = backends().get(name)
        why = _refusal(module, name, forced, disabled, x, weight)
        if why is None:
            why = _probe(module, name, weight, dtype)
        if why is None:
            decoded.planned(weight)
            return Choice(name, forced, module, refusals)
        refusals[name] = why
    raise KernelError("; ".join(f"{name}: {why}" for name, why in refusals.items()))


def _refusal(
    module: Any, name: str, forced: str | None, disabled: set[str], x: mx.array, weight: Lookup4Weight | QmmWeight
) -> str | None:
    if module is None:
        return "this version of lut4tool has no kernels of its own for this device"
    if name in disabled:
        return f"turned off by {DISABLED}"
    if forced and forced not in module.KERNELS:
        return f"it has no kernel '{forced}', which {FORCED} asks for"
    if not module.available():
        missing = getattr(module, "missing", lambda: "it does not work on this machine")
        return str(missing())
    why: str | None = module.refuses(x, weight)
    return why


def _probe(module: Any, name: str, weight: Lookup4Weight | QmmWeight, dtype: str) -> str | None:
    """Say why a kernel of a GPU fails in a tiny product: MLX is lazy, it would otherwise fail at the end of a run."""
    probe = getattr(module, "probe", None)
    if probe is None:
        return None
    try:
        probe(weight, dtype)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:MOST_OF_A_REASON] or "no reason given"
        if (name, reason) not in _WARNED:
            _WARNED.add((name, reason))
            warnings.warn(f"the {name} kernels fail ({reason}); the reference serves instead", stacklevel=2)
        return f"its kernels fail: {reason}"
    return None


def _forced() -> str | None:
    name = os.environ.get(FORCED, "").strip().lower()
    if name and name not in KERNEL_NAMES:
        raise KernelError(f"{FORCED} is '{name}'; it takes {', '.join(KERNEL_NAMES)}")
    return name or None


def _disabled() -> set[str]:
    names = {name.strip().lower() for name in os.environ.get(DISABLED, "").split(",")} - {""}
    if unknown := sorted(names - set(DEVICE_BACKENDS)):
        raise KernelError(f"{DISABLED} has '{unknown[0]}'; it takes {', '.join(DEVICE_BACKENDS)}, separated by commas")
    return names
