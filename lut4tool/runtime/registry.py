"""The table of operators: which function runs (domain, operator, version), and how it wants its inputs.

An operator is one function. Positional parameters are the ONNX inputs in order (None for an absent one: an optional
input has the default None, a required one after it REQUIRED; `*name` for a variadic one); keyword-only parameters are
the attributes under their ONNX names with the schema's defaults (an optional attribute without one: None; a required
one has no default). Attributes come as int, float, str, list or, for tensors, NumPy arrays. It returns one value, or a
tuple where the operator has several outputs (extra trailing values are dropped). Reserved parameters, given by the plan
where they appear:

    xp           first positional: numpy where every input is a host value, else mlx.core
    outputs      keyword-only: how many outputs the node asks for (trailing ones may be left out)

A value is an mx.array, or a NumPy array on the host ("host value": shapes, small constants, and the types that MLX does
not have), or a list of values for a sequence. Without `xp` and outside `host`, a NumPy array becomes an mx.array before
the call, unless MLX lacks its type; with `xp`, all become mx.arrays where any is one. `host=(1,)` names the inputs
wanted as NumPy arrays. `planned=True` marks a function that is called once, while planning, with a `Node`, and returns
the callable that runs, which takes the inputs as any operator does: for control flow and prepared weights. `check` is
called with that Node too, and raises Unsupported for attributes and inputs that a function takes but does not serve;
its docstring says what those are. `prepare` is called on a CPU, where values are NumPy arrays, with that Node and the
function with its attributes and `xp` bound; it returns what runs there in its place, or None: what can be decided,
looked up or packed once is so. Where that has an attribute `reads`, it is given only the inputs at those places: others
are constants that it has packed, and that need not stay in memory.
`on_host=True` marks a function that computes on the host on any device: what its result holds decides its shape, or it
works on strings, sequences, images, tables (2: only where a node asks for two outputs). So does any function on values
of types that MLX lacks, but for one marked `codes=True`, which has MLX convert the types of a byte and less.
`shape=True` marks one whose result says how large something is, always a host value.

A function may raise Unsupported while planning (planned ones) and any exception while running: the run names the node.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lut4tool.errors import Lut4Error

NEWEST = 10_000
REQUIRED: Any = object()  #: the default of a required input after an optional one


class Unsupported(Lut4Error):  # noqa: N818 - the sentence that a user reads begins with it
    """Operators, versions, attributes or types that the runtime does not serve; found while planning, all at once."""


@dataclass(frozen=True)
class Operator:
    """One row: `run` serves versions since..until of domain::name."""

    domain: str
    name: str
    since: int
    until: int
    run: Callable[..., Any]
    host: tuple[int, ...] = ()
    planned: bool = False
    check: Callable[[Any], None] | None = None
    prepare: Callable[[Any, Callable[..., Any]], Callable[..., Any] | None] | None = None
    on_host: int = 0
    shape: bool = False
    codes: bool = False

    @property
    def refused(self) -> str:
        """What its check refuses, in a sentence; empty where it serves all that its schema allows."""
        return (inspect.getdoc(self.check) or "").split("\n\n")[0].replace("\n", " ") if self.check else ""

    @cached_property
    def inputs(self) -> tuple[inspect.Parameter, ...]:
        """The positional parameters that stand for ONNX inputs."""
        parameters = inspect.signature(self.run).parameters.values()
        found = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        found = [p.replace(default=p.empty) if p.default is REQUIRED else p for p in found]
        return tuple(found[1:] if self.takes_xp else found)

    @cached_property
    def attributes(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters that stand for attributes, by name."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "outputs"}

    @cached_property
    def variadic(self) -> bool:
        """Whether the last input stands for any number of them."""
        return any(p.kind is p.VAR_POSITIONAL for p in self.inputs)

    @cached_property
    def takes_xp(self) -> bool:
        """Whether the function serves NumPy and MLX alike, given the module to use."""
        return next(iter(inspect.signature(self.run).parameters), "") == "xp"

    @cached_property
    def takes_outputs(self) -> bool:
        """Whether the function wants to know how many outputs the node asks for."""
        return "outputs" in inspect.signature(self.run).parameters


#: Operators of the standard that no row and no body of the standard serves, and why.
REFUSED = {
    (
        "ai.onnx.preview.training",
        "Gradient",
    ): "it stands for the derivative of the graph around it: models are run, not trained"
}

_TABLE: dict[tuple[str, str], list[Operator]] = {}


def op(
    *names: str,
    since: int = 1,
    until: int = NEWEST,
    domain: str = "",
    host: tuple[int, ...] = (),
    planned: bool = False,
    check: Callable[[Any], None] | None = None,
    prepare: Callable[[Any, Callable[..., Any]], Callable[..., Any] | None] | None = None,
    on_host: int = 0,
    shape: bool = False,
    codes: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for versions since..until (both included) of one or more operators."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            rows = _TABLE.setdefault((domain, name), [])
            if any(row.since <= until and since <= row.until for row in rows):
                raise ValueError(f"{domain}::{name} {since} to {until} overlaps a registered range")
            rows.append(Operator(domain, name, since, until, run, host, planned, check, prepare, on_host, shape, codes))
        return run

    return register


def load() -> None:
    """Import every family of operators, which fills the table."""
    from lut4tool.runtime import ops

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")


def find(domain: str, name: str, version: int) -> Operator | None:
    """Return the row that serves this version, or None."""
    domain = "" if domain == "ai.onnx" else domain
    return next((row for row in _TABLE.get((domain, name), ()) if row.since <= version <= row.until), None)


def operators() -> Iterator[Operator]:
    """Every row, by domain, name and version."""
    for key in sorted(_TABLE):
        yield from sorted(_TABLE[key], key=lambda row: row.since)
