"""The operators of domain ai.lut4tool: products with 4-bit weights that stay packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np

from lut4tool import kernels
from lut4tool.formats import DOMAIN, DTYPE_NAME, LOOKUP4_MATMUL, QMM, Lookup4Weight, QmmWeight
from lut4tool.runtime import backend
from lut4tool.runtime.dtypes import to_device, to_mx
from lut4tool.runtime.ops.compute import numpy_type
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op

Weight = Lookup4Weight | QmmWeight


@op(LOOKUP4_MATMUL, domain=DOMAIN, host=(1, 2, 3), planned=True)
def lookup4_matmul(node: Node) -> Callable[..., Any]:
    """X [..., K] @ W, with W decoded from packed, scales and codebook as formats.Lookup4Weight says."""
    a = _attributes(node, "rows", "cols", "block_size", "perm", "high_nibble_first")

    def weight(packed: np.ndarray, scales: np.ndarray, codebook: np.ndarray) -> Lookup4Weight:
        perm, high_first = tuple(a["perm"]), bool(a["high_nibble_first"])
        sizes = (a["rows"], a["cols"], a["block_size"])
        return Lookup4Weight(packed, scales, codebook, *sizes, perm, high_first, a["weight_dtype"])

    return planned_product(node, weight, a["dtype"])


@op(QMM, domain=DOMAIN, host=(1, 2, 3), planned=True)
def qmm(node: Node) -> Callable[..., Any]:
    """X [..., K] @ W.T, with W decoded from packed, scales and zero_points as formats.QmmWeight says."""
    a = _attributes(node, "K", "N", "bits", "block_size")

    def weight(packed: np.ndarray, scales: np.ndarray, zero_points: np.ndarray) -> QmmWeight:
        made = QmmWeight(packed, scales, zero_points, a["K"], a["N"], a["block_size"], a["bits"])
        if made.weight_dtype != a["weight_dtype"]:
            raise Unsupported(f"its scales are {made.weight_dtype}, its weight_dtype says {a['weight_dtype']}")
        return made

    return planned_product(node, weight, a["dtype"])


def _attributes(node: Node, *names: str) -> dict[str, Any]:
    """The node's attributes, all of which are always written; weight_dtype and dtype as names."""
    wanted = (*names, "weight_dtype", "dtype")
    if missing := [name for name in wanted if name not in node.attributes]:
        raise Unsupported(f"it needs the attributes {', '.join(missing)}")
    if unknown := sorted(set(node.attributes) - set(wanted)):
        raise Unsupported(f"it has no attributes {', '.join(unknown)}")
    if node.given != (True,) * 4:
        raise Unsupported(f"it needs 4 inputs, not {sum(node.given)}")
    values = dict(node.attributes)
    for name, value in values.items():
        kind, numbers = ("a list of integers", value) if name == "perm" else ("an integer", [value])
        if not isinstance(numbers, list) or any(not isinstance(number, int) for number in numbers):
            raise Unsupported(f"{name} must be {kind}, not {value!r}")
    for name in ("weight_dtype", "dtype"):
        if values[name] not in DTYPE_NAME:
            raise Unsupported(f"{name} must be one of {', '.join(DTYPE_NAME.values())}, not type {values[name]}")
        values[name] = DTYPE_NAME[values[name]]
    return values


def planned_product(node: Node, make: Callable[..., Weight], dtype: str | None = None) -> Callable[..., Any]:
    """What multiplies x by the weight that `make` builds from the inputs after it: all that it takes, on the host.

    The weight is made and its kernel chosen now where those are constant, else in each run. dtype: x's type, by
    default that of the weight.
    """
    device = backend.kind(node.device)

    def prepared(leaves: Sequence[np.ndarray | None]) -> tuple[Weight, str, kernels.Choice]:
        weight = make(*leaves)
        kind = dtype or weight.weight_dtype
        return weight, kind, kernels.choose(weight, kind, device)

    leaves = slice(1, 1 + len(signature(make).parameters))
    constants = zip(node.constants[leaves], node.given[leaves], strict=True)
    if all(constant is not None or not given for constant, given in constants):
        weight, kind, choice = prepared(node.constants[leaves])
        node.note(choice)

        def run(x: Any, *leaves: Any) -> Any:
            return _matmul(x, kind, weight, choice)

        return run

    def run_any(x: Any, *leaves: Any) -> Any:
        weight, kind, choice = prepared(leaves)
        return _matmul(x, kind, weight, choice)

    return run_any


def _matmul(x: Any, dtype: str, weight: Weight, choice: kernels.Choice) -> Any:
    """MatMul's shapes: the leading dimensions of X are rows; an X of rank 1 is one row, which Y does not keep."""
    if numpy_type(x).name != dtype:
        raise TypeError(f"X is {numpy_type(x).name}, the node wants {dtype}")
    depth, columns = weight.shape if isinstance(weight, Lookup4Weight) else (weight.K, weight.N)
    if x.ndim == 0 or x.shape[-1] != depth:
        raise ValueError(f"X of shape {list(x.shape)} does not end in K = {depth}")
    leading = x.shape[:-1]
    rows = 1
    for size in leading:
        rows *= size
    return multiplied(x.reshape(rows, depth), weight, choice).reshape(*leading, columns)


def multiplied(x: Any, weight: Weight, choice: kernels.Choice) -> Any:
    """The product of x [M, K] by a kernel; those of a GPU, and the reference, take and give MLX arrays."""
    return to_device(choice.matmul(x if choice.takes_numpy else to_mx(x), weight))
