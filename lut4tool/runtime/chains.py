"""Chains of elementwise operators on a CPU, float32: as native stages, or one by one where those do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

import numpy as np

from lut4tool.runtime import convolution
from lut4tool.runtime.convolution import Stage
from lut4tool.runtime.graph import NodeError, Step, failure
from lut4tool.runtime.scope import Planned

#: An input of a link that is the chain's value, and one that is the value that the chain had before.
CURRENT, SAVED = object(), object()
_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Link:
    """A node of a chain: its stages, and what runs it alone on `sources`.

    A source is CURRENT, SAVED, the number of an operand, a constant or None. saves: the value is saved before it.
    ranks: the least and the most axes that the chain's first value may have. squeezes: how many axes it takes away.
    """

    step: Step
    run: Callable[..., Any]
    sources: tuple[Any, ...]
    stages: tuple[Stage, ...]
    ranks: tuple[int, int]
    saves: bool = False
    squeezes: int = 0


class Chain:
    """Links in their order."""

    def __init__(self, links: Sequence[Link], stages: Sequence[Stage] | None = None) -> None:
        self.links = tuple(links)
        self.stages = merged(links) if stages is None else tuple(stages)
        self._least = max((link.ranks[0] for link in links), default=0)
        self._most = min((link.ranks[1] for link in links), default=64)
        self._channels = _size(self.stages, "channel_affine")
        self._points = _size(self.stages, "point_affine")
        self._agree = all(len(_sizes(self.stages, name)) < 2 for name in ("channel_affine", "point_affine"))
        self._squeezes = tuple(link for link in links if link.squeezes)

    @cached_property
    def program(self) -> Any:
        """The native form of the stages."""
        return convolution.stages(self.stages)

    @property
    def points(self) -> int:
        """How many points a plane must have; 0 where that does not matter."""
        return self._points

    def view(self, shape: tuple[int, ...], operands: Sequence[np.ndarray]) -> tuple[int, int, int] | None:
        """A value of this shape as [N, channels, points] for the stages; None where they do not fit."""
        rank = len(shape)
        if not (self._agree and self._least <= rank <= self._most):
            return None
        others = {operand.shape for operand in operands} - {shape}
        if not self._channels and (self._points or others) and rank and others <= {(*shape[:-1], 1)}:
            return (1, prod(shape[:-1]), shape[-1]) if self._points in (0, shape[-1]) else None
        if self._points or (others and (rank < 3 or others != {(*shape[:2], *[1] * (rank - 2))})):
            return None
        if not self._channels and not others:
            return 1, 1, prod(shape)
        if self._channels not in (0, shape[1]):
            return None
        return shape[0], shape[1], prod(shape[2:])

    def squeezed(self, y: np.ndarray) -> Any:
        """The result of the stages without the axes that the chain takes away. Raises NodeError."""
        for link in self._squeezes:
            try:
                y = link.run(y, *link.sources[1:])
            except Exception as error:
                raise failure(link.step, error) from error
        return y

    def alone(self, value: Any, operands: Sequence[np.ndarray]) -> Any:
        """Run the nodes one by one. Raises NodeError for the one that fails."""
        saved = None
        for link in self.links:
            saved = value if link.saves else saved
            inputs = [_source(source, value, saved, operands) for source in link.sources]
            try:
                result = link.run(*inputs)
            except NodeError:
                raise
            except Exception as error:
                raise failure(link.step, error) from error
            value = result[0] if isinstance(result, tuple) else result
        return value

    def __call__(self, x: np.ndarray, *operands: np.ndarray) -> Any:
        """The chain on a value that stays as it is."""
        view = self.view(x.shape, operands) if x.size else None
        if view is None:
            return self.alone(x, operands)
        return self.squeezed(convolution.apply(self.program, x, operands, view))


@dataclass(frozen=True, eq=False)
class After:
    """A product and the chain on its result, a new array that is written over."""

    product: Callable[..., Any]
    inputs: int
    chain: Chain

    def __call__(self, *values: Any) -> Any:
        """The product's inputs come first, then the operands."""
        y, operands = self.product(*values[: self.inputs]), values[self.inputs :]
        view = self.chain.view(y.shape, operands) if y.size else None
        if view is None or y.dtype != np.float32:
            return self.chain.alone(y, operands)
        if not (y.flags.c_contiguous and y.flags.writeable):
            return self.chain.squeezed(convolution.apply(self.chain.program, y, operands, view))
        convolution.apply_inplace(self.chain.program, y, operands, view)
        return self.chain.squeezed(y)


def _source(source: Any, value: Any, saved: Any, operands: Sequence[np.ndarray]) -> Any:
    if source is CURRENT:
        return value
    if source is SAVED:
        return saved
    return operands[source] if isinstance(source, int) else source


def _size(stages: Sequence[Stage], name: str) -> int:
    return next(iter(_sizes(stages, name)), 0)


def _sizes(stages: Sequence[Stage], name: str) -> set[int]:
    return {stage.scale.size for stage in stages if stage.name == name and stage.scale is not None}


# -- stages


def merged(links: Sequence[Link]) -> tuple[Stage, ...]:
    """The stages of links, each run of factors and summands as one, multiplied out in float64."""
    result: list[Stage] = []
    for link in links:
        for stage in ((Stage("save"),) if link.saves else ()) + link.stages:
            one = _joined(result[-1], stage) if result else None
            if one is None:
                result.append(stage)
            else:
                result[-1] = one
    return tuple(result)


def _joined(first: Stage, second: Stage) -> Stage | None:
    """Two affine stages as one; None where they are not, or where float32 could not hold it."""
    names = {first.name, second.name}
    if not names <= {"affine", "channel_affine", "point_affine"} or len(names - {"affine"}) > 1:
        return None
    (a, b), (c, d) = _factors(first), _factors(second)
    if a.size != c.size and names != {"affine"} and len(names) == 1:
        return None  # one of them broadcasts: such a chain has no stages
    shift = np.where(b == 0, d, b * c + d)  # -0.0 stays what adds nothing
    return affine(a * c, shift, (names - {"affine"} or {"affine"}).pop())


def _factors(stage: Stage) -> tuple[Any, Any]:
    if stage.scale is None or stage.shift is None:
        return np.float64(stage.a), np.float64(stage.b)
    return stage.scale.astype(np.float64), stage.shift.astype(np.float64)


def affine(scale: Any, shift: Any, name: str = "affine") -> Stage | None:
    """V * scale + shift for numbers, or for vectors of a value a channel or a point; None where float32 overflows."""
    if not (np.abs(scale) <= _MOST).all() or not (np.abs(shift) <= _MOST).all():
        return None
    if name == "affine":
        return Stage(name, float(scale), float(shift))
    scale, shift = np.broadcast_arrays(scale, shift)
    return Stage(name, 0.0, 0.0, scale.astype(np.float32).ravel(), shift.astype(np.float32).ravel())


def folded(links: Sequence[Link], w: np.ndarray, bias: np.ndarray | None) -> tuple[Sequence[Link], np.ndarray, Any]:
    """Multiply the first links that can be into weights [M, ...] and a bias [M]: what is left, and these then."""
    count = 0
    while count < len(links) and (links[count].squeezes or _folds(links[count], w)):
        count += 1
    stages, left = merged(links[:count]), [*[link for link in links[:count] if link.squeezes], *links[count:]]
    if len(stages) != 1:
        return (links if stages else left), w, bias
    scale, shift = _factors(stages[0])
    with np.errstate(all="ignore"):
        wide = w * scale.reshape(-1, *[1] * (w.ndim - 1))
        offset = np.broadcast_to((0 if bias is None else bias.astype(np.float64)) * scale + shift, w.shape[0])
        narrow, sums = wide.astype(np.float32), offset.astype(np.float32)
    if not (np.isfinite(narrow).all() and np.isfinite(sums).all()):
        return links, w, bias
    return left, narrow, sums


def _folds(link: Link, w: np.ndarray) -> bool:
    """Whether a link only multiplies and adds a constant, one a channel of what w [M, ...] makes or one for all."""
    if link.saves or not link.ranks[0] <= w.ndim <= link.ranks[1]:
        return False
    sizes = [1 if stage.scale is None else stage.scale.size for stage in link.stages]
    return {stage.name for stage in link.stages} <= {"affine", "channel_affine"} and set(sizes) <= {1, w.shape[0]}


# -- the operators


def elementwise(step: Step) -> bool:
    """Whether a step's operator may be a link."""
    return (step.operator.name in _MAKERS or step.operator.name == "Squeeze") and step.operator.domain == ""


def link_of(step: Step, planned: Planned, sources: Sequence[Any], dropped: int = 0) -> Link | None:
    """A step as a link; None where it is no elementwise operator on float32 that the stages serve.

    dropped: how many axes the links before it have taken away.
    """
    if step.operator.name == "Squeeze":
        return _squeeze(step, planned, sources)
    serves = planned.float32 and elementwise(step)
    made = _MAKERS[step.operator.name](planned.attributes, list(sources)) if serves else None
    if made is None:
        return None
    stages, (least, most) = made
    if dropped and (any(isinstance(source, int) for source in sources) or _size(stages, "point_affine")):
        return None
    return Link(step, planned.run, tuple(sources), stages, (least + dropped, most + dropped))


def _squeeze(step: Step, planned: Planned, sources: Sequence[Any]) -> Link | None:
    """Constant axes after the channels' are taken away: what lies where stays."""
    axes = sources[1] if len(sources) > 1 else planned.attributes.get("axes")
    if axes is None or isinstance(axes, int) or sources[0] is not CURRENT or not planned.float32:
        return None
    axes = np.asarray(axes).ravel()
    if not axes.size or (axes < 2).any():
        return None
    return Link(step, planned.run, tuple(sources), (), _ANY, squeezes=axes.size)


_Made = tuple[tuple[Stage, ...], tuple[int, int]]
_ANY = (0, 64)


def _unary(*stages: Stage) -> Callable[[Mapping[str, Any], list[Any]], _Made | None]:
    return lambda attributes, sources: (stages, _ANY) if len(sources) == 1 else None


def _leaky(attributes: Mapping[str, Any], sources: list[Any]) -> _Made:
    return (Stage("leaky", attributes.get("alpha", 0.01)),), _ANY


def _hard_sigmoid(attributes: Mapping[str, Any], sources: list[Any]) -> _Made:
    line = Stage("affine", attributes.get("alpha", 0.2), attributes.get("beta", 0.5))
    return (line, Stage("clip", 0, 1)), _ANY


def _clip(attributes: Mapping[str, Any], sources: list[Any]) -> _Made | None:
    bounds = []
    for name, source, default in zip(("min", "max"), [*sources[1:], None, None][:2], (-inf, inf), strict=True):
        if isinstance(source, np.ndarray) and source.size == 1 and not np.isnan(source).any():
            bounds.append(float(source.reshape(())))
        elif source is None:
            bounds.append(float(attributes.get(name, default)))
        else:
            return None
    return ((Stage("clip", bounds[0], bounds[1]),), _ANY) if sources[0] is CURRENT else None


def _dropout(attributes: Mapping[str, Any], sources: list[Any]) -> _Made | None:
    training = sources[2] if len(sources) > 2 else None
    constant = training is None or (isinstance(training, np.ndarray) and not training.any())
    return ((), _ANY) if constant and sources[0] is CURRENT and not attributes.get("training_mode") else None


def _batch_normalization(attributes: Mapping[str, Any], sources: list[Any]) -> _Made | None:
    vectors = sources[1:]
    if sources[0] is not CURRENT or not all(isinstance(v, np.ndarray) and v.ndim == 1 for v in vectors):
        return None
    if attributes.get("training_mode", 0) or not attributes.get("spatial", 1):
        return None
    factor, summand, mean, variance = (vector.astype(np.float64) for vector in vectors)
    with np.errstate(all="ignore"):
        scale = factor / np.sqrt(variance + attributes.get("epsilon", 1e-5))
        stage = affine(scale, summand - mean * scale, "channel_affine")
    return None if stage is None else ((stage,), (2, 64))


def _binary(kind: str) -> Callable[[Mapping[str, Any], list[Any]], _Made | None]:
    def make(attributes: Mapping[str, Any], sources: list[Any]) -> _Made | None:
        if len(sources) != 2 or sources[0] is sources[1]:
            return None
        first = sources[0] is CURRENT
        other = sources[1] if first else sources[0]
        if isinstance(other, np.ndarray):
            return _constant(kind, other, first)
        if other is None:
            return None
        suffix = "saved" if other is SAVED else "operand"
        if kind in ("add", "mul"):
            return (Stage(f"{kind}_{suffix}"),), _ANY
        if kind == "sub":
            negate = Stage("affine", -1.0)
            return (negate, Stage(f"add_{suffix}"), *([negate] if first else [])), _ANY
        return None

    return make


def _constant(kind: str, other: np.ndarray, first: bool) -> _Made | None:
    """The value and a constant: a number, one a channel (shape [C, 1, ...]) or one a point of the last axis."""
    if not other.size or other.dtype != np.float32:
        return None
    ranks: tuple[int, int]
    value: Any
    if other.size == 1:
        name, ranks, value = "affine", (other.ndim, 64), np.float64(other.reshape(()))
    elif other.shape[-1] == other.size:
        name, ranks, value = "point_affine", (other.ndim, 64), other.astype(np.float64).ravel()
    else:
        axis = next(axis for axis, length in enumerate(other.shape) if length > 1)
        rank = other.ndim - axis + 1
        if other.shape[axis] != other.size or other.ndim > rank:
            return None
        name, ranks, value = "channel_affine", (rank, rank), other.astype(np.float64).ravel()
    if kind in ("max", "min"):
        if name != "affine" or np.isnan(value):
            return None
        bounds = (float(value), inf) if kind == "max" else (-inf, float(value))
        return (Stage("clip", *bounds),), ranks
    with np.errstate(all="ignore"):  # x + -0.0 is x, where x + 0.0 would lose the sign of -0.0
        pair = {
            "add": (1.0 + 0 * value, value), "mul": (value, -0.0 * abs(value)), "div": (1 / value, -0.0 * abs(value)),
            "sub": (1.0 + 0 * value, -value) if first else (-1.0 + 0 * value, value),
        }[kind]  # fmt: skip
        stage = affine(*pair, name) if first or kind != "div" else None
    return None if stage is None else ((stage,), ranks)


_MAKERS: dict[str, Callable[[Mapping[str, Any], list[Any]], _Made | None]] = {
    "Relu": _unary(Stage("clip", 0.0, inf)),
    "Sigmoid": _unary(Stage("sigmoid")),
    "Tanh": _unary(Stage("tanh")),
    "Erf": _unary(Stage("erf")),
    "Neg": _unary(Stage("affine", -1.0, -0.0)),
    "HardSwish": _unary(Stage("save"), Stage("affine", 1 / 6, 0.5), Stage("clip", 0, 1), Stage("mul_saved")),
    "LeakyRelu": _leaky,
    "HardSigmoid": _hard_sigmoid,
    "Clip": _clip,
    "Dropout": _dropout,
    "BatchNormalization": _batch_normalization,
    "Add": _binary("add"),
    "Sum": _binary("add"),
    "Sub": _binary("sub"),
    "Mul": _binary("mul"),
    "Div": _binary("div"),
    "Max": _binary("max"),
    "Min": _binary("min"),
}
