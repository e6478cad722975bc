"""One step of an optimizer (onnx/defs/training, domain ai.onnx.preview.training): the tensors come in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lut4tool.runtime.registry import op

DOMAIN = "ai.onnx.preview.training"


def _groups(tensors: Sequence[Any], kinds: int) -> list[tuple[Any, ...]]:
    """All X, then all G and so on, as one tuple a variable."""
    count = len(tensors) // kinds
    return list(zip(*(tensors[kind * count : (kind + 1) * count] for kind in range(kinds)), strict=True))


def _flat(results: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(value for kind in zip(*results, strict=True) for value in kind)


@op("Adagrad", domain=DOMAIN)
def adagrad(
    xp: Any, r: Any, t: Any, *inputs: Any, norm_coefficient: float = 0.0, decay_factor: float = 0.0,
    epsilon: float = 1e-6,
) -> Any:  # fmt: skip
    """X and H anew from X, G, H: the step shrinks with the sum of squared gradients."""
    rate = r / (1 + t.astype(r.dtype) * decay_factor)

    def step(x: Any, g: Any, h: Any) -> tuple[Any, Any]:
        g = norm_coefficient * x + g
        h = h + g * g
        return x - rate * g / (xp.sqrt(h) + epsilon), h

    return _flat([step(*group) for group in _groups(inputs, 3)])


@op("Adam", domain=DOMAIN)
def adam(
    xp: Any, r: Any, t: Any, *inputs: Any, alpha: float = 0.9, beta: float = 0.999, epsilon: float = 1e-6,
    norm_coefficient: float = 0.0, norm_coefficient_post: float = 0.0,
) -> Any:  # fmt: skip
    """X, V and H anew from X, G, V, H; the averages are corrected for their start where t > 0."""
    steps = t.astype(r.dtype)
    rate = xp.where(t > 0, r * xp.sqrt(1 - xp.power(beta, steps)) / (1 - xp.power(alpha, steps)), r)

    def step(x: Any, g: Any, v: Any, h: Any) -> tuple[Any, Any, Any]:
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * g * g
        return (1 - norm_coefficient_post) * (x - rate * v / (xp.sqrt(h) + epsilon)), v, h

    return _flat([step(*group) for group in _groups(inputs, 4)])


@op("Momentum", domain=DOMAIN)
def momentum(
    xp: Any, r: Any, t: Any, *inputs: Any, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> Any:
    """X and V anew from X, G, V, standard or Nesterov; beta is 1 at the first step."""
    share = xp.where(t > 0, beta, 1.0).astype(r.dtype)

    def step(x: Any, g: Any, v: Any) -> tuple[Any, Any]:
        g = norm_coefficient * x + g
        v = alpha * v + share * g
        return x - r * (g + alpha * v if mode == "nesterov" else v), v

    return _flat([step(*group) for group in _groups(inputs, 3)])
