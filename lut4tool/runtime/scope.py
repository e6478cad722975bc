"""What the planner knows while it plans: the names, constants and slots of a graph under construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from lut4tool.runtime.binding import Frame
from lut4tool.runtime.dtypes import type_of
from lut4tool.runtime.graph import ABSENT, DROPPED, Graph, Step
from lut4tool.runtime.quantized import Quantized

#: Constants of at most this many elements are host values, so that shape arithmetic stays on the host.
SMALL = 64


class Constant:
    """An initializer, a Constant node's value or a folded result: a NumPy array, and the slots of its two forms.

    stored: the bytes of the file that it is made from. quantized: the bytes of a float matrix, whose floats are made
    when they are first asked for.
    """

    def __init__(self, value: Any, stored: int | None = None, quantized: Quantized | None = None) -> None:
        self._value = np.asarray(value) if isinstance(value, np.ndarray) else value
        self.slots: dict[str, int] = {}
        self.quantized = quantized
        self.stored = _stored(self._value) if stored is None else stored

    @property
    def value(self) -> Any:
        """The array."""
        if self._value is None and self.quantized is not None:
            self._value = self.quantized.array()
        return self._value

    @property
    def size(self) -> int:
        """Number of elements."""
        if self.quantized is not None:
            return self.quantized.matrix.size
        return self.value.size if isinstance(self.value, np.ndarray) else 0


class Arrays(Sequence[Any]):
    """The arrays of constants, each made when it is first asked for; None for what is no constant."""

    def __init__(self, constants: Sequence[Constant | None]) -> None:
        self.constants = constants

    def __len__(self) -> int:
        return len(self.constants)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[index] for index in range(len(self))[place])
        constant = self.constants[place]
        return None if constant is None else constant.value


def _stored(value: Any) -> int:
    """Bytes of an array in a file, where several elements of 4 or 2 bits share one."""
    if not isinstance(value, np.ndarray):
        return 0
    narrow = {"int4": 2, "uint4": 2, "float4_e2m1fn": 2, "int2": 4, "uint2": 4}
    return value.nbytes // narrow.get(value.dtype.name, 1)


@dataclass(eq=False)
class Value:
    """What a name stands for: a slot that steps write, a constant, or neither: an absent input.

    host: known to be a host value; unknown: what defines it has a problem of its own; kind: its type as ONNX writes it,
    None where that is not known.
    """

    slot: int = ABSENT
    constant: Constant | None = None
    host: bool = False
    unknown: bool = False
    kind: str | None = None

    @property
    def absent(self) -> bool:
        """Whether it is an input that the node leaves out."""
        return self.slot == ABSENT and self.constant is None

    @property
    def type(self) -> str | None:
        """The type as ONNX writes it, None where it is not known."""
        if self.constant is None:
            return self.kind
        if self.constant.quantized is not None:
            return "tensor(float)"
        element = type_of(self.constant.value)
        return f"tensor({element.name})" if element else None

    @property
    def small(self) -> bool:
        """Whether it is a constant that is a host value."""
        return self.constant is not None and self.constant.size <= SMALL

    @property
    def on_host(self) -> bool:
        """Whether it is known to be no mx.array when a step reads it."""
        return self.host or self.small or self.absent


class Scope:
    """The names that the nodes of one graph or function body see; a subgraph sees its parent's too."""

    def __init__(self, path: str = "", parent: Scope | None = None, depth: int = 0) -> None:
        self.path, self.parent, self.depth = path, parent, depth
        self.values: dict[str, Value] = {}

    def find(self, name: str) -> Value | None:
        """What a name stands for here, None where nothing defines it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        return None


@dataclass(frozen=True)
class Planned:
    """What the planner knew of a step: what runs it, inputs, attributes, and whether its first result is float32."""

    run: Callable[..., Any]
    inputs: Sequence[Value]
    attributes: Mapping[str, Any]
    float32: bool


@dataclass
class Block:
    """A graph under construction: its steps, all the slots each reads (by its subgraphs too), and the slots it owns.

    planned: what was known of each step, None for one that fusion has made.
    """

    steps: list[Step] = field(default_factory=list)
    reads: list[set[int]] = field(default_factory=list)
    planned: list[Planned | None] = field(default_factory=list)
    own: set[int] = field(default_factory=set)

    def add(self, step: Step, subgraphs: Sequence[Graph], planned: Planned) -> None:
        """Append a step; what its subgraphs capture, it reads."""
        self.steps.append(step)
        self.reads.append(set(step.inputs).union(*(graph.captured for graph in subgraphs)))
        self.planned.append(planned)

    def finish(
        self, frame: Frame, inputs: Sequence[int], outputs: Sequence[int], types: Sequence[onnx.TypeProto]
    ) -> Graph:
        """Find for each step the slots that nobody reads after it."""
        needed, steps = set(outputs), []
        for step, reads in zip(reversed(self.steps), reversed(self.reads), strict=True):
            last = ((reads | set(step.outputs)) & self.own) - needed
            needed |= reads
            steps.append(replace(step, free=tuple(sorted(last | ({DROPPED} & set(step.outputs))))))
        return Graph(frame, inputs, outputs, steps[::-1], self.own, needed - self.own - {ABSENT}, types)


@dataclass(frozen=True)
class Body:
    """What the nodes of one body share.

    Its scope, the block they are planned into, opset versions by domain, and the attributes that a function was called
    with, as Python values.
    """

    scope: Scope
    block: Block
    versions: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """One node to plan: its name with its path, its domain and version, its attributes and inputs resolved."""

    node: onnx.NodeProto
    name: str
    domain: str
    version: int
    attributes: Mapping[str, Any]
    inputs: Sequence[Value]
    body: Body

    @property
    def outputs(self) -> list[str]:
        """The outputs without the empty names at the end, which ask for nothing."""
        names = list(self.node.output)
        while names and not names[-1]:
            names.pop()
        return names

    @property
    def subgraphs(self) -> list[Graph]:
        """The graphs among the attributes."""
        return [value for value in self.attributes.values() if isinstance(value, Graph)]
