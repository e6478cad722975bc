"""com.microsoft's operators that are two or three of the standard's in one: activations, products, convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lut4tool.runtime.ops import prepared
from lut4tool.runtime.ops.compute import computed, finish, widened, working
from lut4tool.runtime.ops.conv import conv
from lut4tool.runtime.ops.math import gelu, selu
from lut4tool.runtime.ops.products import gemm
from lut4tool.runtime.ops.rnn import ACTIVATIONS
from lut4tool.runtime.ops.window import Ints
from lut4tool.runtime.plan import Node
from lut4tool.runtime.registry import Unsupported, op

MICROSOFT = "com.microsoft"

# -- activations


@op("Gelu", domain=MICROSOFT, prepare=prepared.gelu)
def exact_gelu(x: Any) -> Any:
    """The standard's Gelu without an approximation."""
    return gelu(x)


@op("BiasGelu", domain=MICROSOFT)
def bias_gelu(a: Any, b: Any) -> Any:
    """Gelu of a + b, b along the last axis."""
    return finish(exact_gelu(widened(a) + widened(b)), a)


@op("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Any, bias: Any = None) -> Any:
    """Gelu by tanh of x + bias."""
    return finish(gelu(widened(x) if bias is None else widened(x) + widened(bias), approximate="tanh"), x)


@op("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Any, *, alpha: float = 1.7020000219345093) -> Any:
    """Return x * sigmoid(alpha * x), the standard's Swish from 24 on."""
    return computed(lambda xp, x: x / (1 + xp.exp(-alpha * x)), x)


# -- products


@op("FusedMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Any, b: Any, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
) -> Any:
    """Return alpha * a' @ b'; transBatch* first takes the first axis to the place before the last."""
    xp, left, right = working(a, b)
    left, right = _transposed(xp, left, transA, transBatchA), _transposed(xp, right, transB, transBatchB)
    return finish(alpha * xp.matmul(left, right), a)


@op("TransposeMatMul", domain=MICROSOFT)
def transpose_matmul(a: Any, b: Any, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Any:
    """FusedMatMul under its first name."""
    return fused_matmul(a, b, alpha=alpha, transA=transA, transB=transB)


def _transposed(xp: Any, x: Any, matrix: int, batch: int) -> Any:
    if x.ndim < 2:
        return x
    x = xp.moveaxis(x, 0, -2) if batch else x
    return xp.swapaxes(x, -1, -2) if matrix else x


# -- with an activation at their end


def _activated(
    y: Any, name: str | None, alpha: float | None, beta: float | None, gamma: float | None, like: Any
) -> Any:
    """An activation, by the name of its operator, of a product of float32; rounded once to the type of `like`."""
    if not name:
        return finish(y, like)
    if name == "Clip":
        return computed(lambda xp, y: xp.clip(y, alpha, beta), y).astype(like.dtype)
    if name == "Selu":
        given = {key: value for key, value in (("alpha", alpha), ("gamma", gamma)) if value is not None}
        return finish(selu(y, **given), like)
    first, second, function = ACTIVATIONS[name.lower()]
    a, b = (first if alpha is None else alpha), (second if beta is None else beta)
    return finish(computed(lambda xp, y: function(xp, y, a, b), y), like)


#: How many numbers activation_params holds.
_PARAMETERS = {"LeakyRelu": 1, "HardSigmoid": 2, "Clip": 2}


def _known(*names: str) -> Callable[[Node], None]:
    def check(node: Node) -> None:
        name, parameters = node.attributes.get("activation", ""), node.attributes.get("activation_params", ())
        if len(parameters) != _PARAMETERS.get(name, 0) and node.op_type == "FusedConv":
            raise Unsupported(f"{name or 'no activation'} takes {_PARAMETERS.get(name, 0)} activation_params")
        if name and name not in names:
            raise Unsupported(f"activation must be one of {', '.join(names)}, not {name}")

    check.__doc__ = f"Refuse activations other than {', '.join(names)}."
    return check


@op("FusedConv", domain=MICROSOFT, check=_known("Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Clip"))
def fused_conv(
    x: Any, w: Any, b: Any = None, z: Any = None, *, activation: str | None = None,
    activation_params: Sequence[float] | None = None, auto_pad: str = "NOTSET", dilations: Ints = None,
    group: int = 1, kernel_shape: Ints = None, pads: Ints = None, strides: Ints = None,
) -> Any:  # fmt: skip
    """An activation of Conv + z; its parameters are alpha (LeakyRelu), alpha and beta (HardSigmoid), bounds (Clip)."""
    inputs = [None if value is None else widened(value) for value in (x, w, b)]
    y = conv(*inputs, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)
    alpha, beta = (*(activation_params or ()), None, None)[:2]
    return _activated(y if z is None else y + widened(z), activation, alpha, beta, None, x)


@op(
    "FusedGemm",
    domain=MICROSOFT,
    check=_known(
        "Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Selu", "Softplus", "Softsign", "ThresholdedRelu"
    ),
)
def fused_gemm(
    a: Any, b: Any, c: Any = None, *, activation: str | None = None, activation_alpha: float | None = None,
    activation_beta: float | None = None, activation_gamma: float | None = None, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0,
) -> Any:  # fmt: skip
    """An activation of Gemm."""
    inputs = [None if value is None else widened(value) for value in (a, b, c)]
    y = gemm(*inputs, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activated(y, activation, activation_alpha, activation_beta, activation_gamma, a)
