"""The way back: nodes of ai.lut4tool become the chain of standard operators that decodes the same weight.

The one other file that changes a graph: nodes are put in front of each site, our bodies and imports go where nothing
uses them, and everything else keeps its bytes and its order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from lut4tool.formats import DOMAIN, DTYPE_NAME, LOOKUP4_MATMUL, QMM, VERSION
from lut4tool.recognize.proof import Refusal
from lut4tool.recognize.qmm import Grid, Types, spell, spell_nibbles
from lut4tool.recognize.walk import OPSETS, Constant, Place, Refuse, Scope, Walk
from lut4tool.rewrite.edit import RewriteError
from lut4tool.rewrite.save import Progress, check_target, data_bytes, save
from lut4tool.storage import PathLike, Tensors, read_model, subgraphs

__all__ = ["ExpandReport", "Expanded", "expand", "expand_model"]

_SITES = ((DOMAIN, LOOKUP4_MATMUL), (DOMAIN, QMM))
#: The attributes of each operator (DESIGN section 2), all of which a node must have.
_ATTRIBUTES: Mapping[str, Collection[str]] = {
    LOOKUP4_MATMUL: ("rows", "cols", "block_size", "perm", "high_nibble_first", "weight_dtype", "dtype"),
    QMM: ("K", "N", "bits", "block_size", "weight_dtype", "dtype"),
}


@dataclass(frozen=True)
class Expanded:
    """One node that became a chain; QMM: rows = N, cols = K."""

    node: str
    op: str
    rows: int
    cols: int
    block_size: int
    weight_dtype: str

    def to_json(self) -> dict[str, Any]:
        """The facts of DESIGN section 7."""
        return {
            "node": self.node,
            "op": self.op,
            "rows": self.rows,
            "cols": self.cols,
            "block_size": self.block_size,
            "weight_dtype": self.weight_dtype,
        }


@dataclass(frozen=True)
class ExpandReport:
    """What an expansion did; sizes in bytes of the proto's file, 0 where none was written, and of external data."""

    expanded: tuple[Expanded, ...]
    refused: tuple[Refusal, ...]
    input_bytes: int = 0
    output_bytes: int = 0
    notes: tuple[str, ...] = ()
    input_data_bytes: int = 0
    output_data_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The document of `expand --json` (DESIGN section 7)."""
        return {
            "expanded": [site.to_json() for site in self.expanded],
            "refused": [refusal.to_json() for refusal in self.refused],
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "input_data_bytes": self.input_data_bytes,
            "output_data_bytes": self.output_data_bytes,
            "notes": list(self.notes),
        }


def expand(
    src: PathLike,
    dst: PathLike,
    *,
    force: bool = False,
    allow_external: Iterable[PathLike] = (),
    progress: Progress | None = None,
) -> ExpandReport:
    """Expand the model file `src` to `dst`; `dst` equal to `src` means in place.

    Nothing is written where nothing is expanded. External data is kept by reference in the same folder and copied to
    another, as `rewrite` does. Raises StorageError for files, RewriteError for a place or a model.
    """
    source, target = Path(src), os.fspath(dst)
    tensors = Tensors(source.parent, allow_external)
    tensors.note(source)
    model = read_model(source)
    size = source.stat().st_size
    check_target(str(source), target, force)
    data = data_bytes(model, tensors)
    report = expand_model(model)
    written, notes = 0, tuple[str, ...]()
    if report.expanded:
        written, notes = save(model, str(source), target, tensors, progress)
    report = replace(report, input_data_bytes=data, output_data_bytes=data_bytes(model) if report.expanded else 0)
    return replace(report, input_bytes=size, output_bytes=written, notes=notes)


def expand_model(model: onnx.ModelProto) -> ExpandReport:
    """Replace in place every Lookup4MatMul and QMM whose weight is constant by the standard chain that decodes it.

    The chain gives the same weight bit for bit; sites of one scope that share a weight share its chain. Only types and
    dims are read. Bodies and imports of ai.lut4tool go where nothing uses them. A node that cannot be expanded stays
    and is refused in words. Raises RewriteError, before any change, where ai.lut4tool means something else here.
    """
    _check_meaning(model)
    walk = Walk(model, wanted=_SITES)
    bodies: dict[Scope, _Body] = {}
    taken = set(_names(model))
    expanded, refused = [], []
    for site in walk.products:
        try:
            expanded.append(_expand_site(walk, site, _body_of(site.scope, bodies, taken)))
        except Refuse as refuse:
            refused.append(Refusal(site.title, refuse.reason, refuse.at))
    for body in bodies.values():
        body.insert()
    if expanded:
        _remove_unused(model)
    return ExpandReport(tuple(expanded), tuple(refused))


def _check_meaning(model: onnx.ModelProto) -> None:
    """Raise RewriteError where the model imports or defines ai.lut4tool in another sense than ours."""
    from lut4tool.rewrite.functions import is_ours  # imports onnxscript, half a second

    for entry in (*model.opset_import, *(entry for function in model.functions for entry in function.opset_import)):
        if entry.domain == DOMAIN and entry.version != VERSION:
            raise RewriteError(f"the model imports {DOMAIN} at version {entry.version}; version {VERSION} is expected")
    for function in model.functions:
        if function.domain == DOMAIN and not is_ours(function):
            raise RewriteError(f"the model defines {DOMAIN}::{function.name} with a body that is not lut4tool's")


# -- One site


def _expand_site(walk: Walk, site: Place, body: _Body) -> Expanded:
    """Put a site's chain in front of it and make it a MatMul. Raises Refuse, before any change."""
    node = site.node
    site.require(site.scope.opset in OPSETS, f"opset {site.scope.opset}, not {OPSETS[0]} to {OPSETS[-1]}")
    site.require(len(node.input) == 4, f"{node.op_type} with {len(node.input)} inputs, not 4")
    facts = _facts(site)
    constants = [walk.constant(walk.find(site.scope, name, site), site) for name in node.input[1:]]
    check, chain = (_check_lookup4, _lookup4) if node.op_type == LOOKUP4_MATMUL else (_check_qmm, _qmm)
    check(site, facts, *constants)
    body.begin(site)
    weight = chain(body, facts, node.input[1:], constants)
    op, x = node.op_type, node.input[0]
    node.op_type, node.domain = "MatMul", ""
    for name in ("overload", "attribute", "input"):
        node.ClearField(name)
    node.input.extend((x, weight))
    rows, cols = (facts["rows"], facts["cols"]) if op == LOOKUP4_MATMUL else (facts["N"], facts["K"])
    return Expanded(site.title, op, rows, cols, facts["block_size"], DTYPE_NAME[facts["weight_dtype"]])


def _facts(site: Place) -> dict[str, Any]:
    """A site's attributes by name, each of the type that it is written with."""
    names, facts = _ATTRIBUTES[site.node.op_type], {}
    for written in site.node.attribute:
        site.require(written.name in names, f"{site.node.op_type} with unknown attribute '{written.name}'")
        kind = AttributeProto.INTS if written.name == "perm" else AttributeProto.INT
        site.require(
            written.type == kind and not written.ref_attr_name,
            f"{site.node.op_type} with {written.name} that is not a written {AttributeProto.AttributeType.Name(kind)}",
        )
        facts[written.name] = helper.get_attribute_value(written)
    missing = ", ".join(name for name in names if name not in facts)
    site.require(not missing, f"{site.node.op_type} without {missing}")
    for name in ("weight_dtype", "dtype"):
        site.require(facts[name] in DTYPE_NAME, f"{name} {facts[name]}, not 1, 10 or 16, a float type")
    block = facts["block_size"]
    site.require(block > 0 and block % 2 == 0, f"block_size {block}, not positive and even")
    return facts


def _check_lookup4(site: Place, facts: Mapping[str, Any], packed: Constant, scales: Constant, table: Constant) -> None:
    """Refuse constants and attributes that are not a Lookup4MatMul's."""
    rows, cols, block = facts["rows"], facts["cols"], facts["block_size"]
    site.require(rows > 0 and cols > 0, f"rows {rows} and cols {cols}, not both positive")
    site.require(list(facts["perm"]) in ([0, 1], [1, 0]), f"perm {list(facts['perm'])}, not [0, 1] or [1, 0]")
    blocks = -(-rows * cols // block)
    least, most = (rows * cols + 1) // 2, blocks * block // 2
    site.require(packed.types == {TensorProto.UINT8}, f"packed {packed} is not UINT8")
    fits = len(packed.shapes) == 1 and all(len(dims) == 1 and least <= dims[0] <= most for dims in packed.shapes)
    site.require(fits, f"packed {packed} is not one rank-1 shape of {least} to {most} bytes")
    for name, constant, count in (("scales", scales, blocks), ("codebook", table, 16)):
        site.require(constant.shapes == {(count,)}, f"{name} {constant} is not [{count}]")
        _require_float(site, name, constant)


def _check_qmm(site: Place, facts: Mapping[str, Any], packed: Constant, scales: Constant, zeros: Constant) -> None:
    """Refuse constants and attributes that are not a QMM's."""
    site.require(facts["bits"] == 4, f"QMM of {facts['bits']} bits, not 4")
    site.require(facts["K"] > 0 and facts["N"] > 0, f"K {facts['K']} and N {facts['N']}, not both positive")
    grid = (facts["N"], -(-facts["K"] // facts["block_size"]))
    site.require(packed.types == {TensorProto.UINT8}, f"packed {packed} is not UINT8")
    site.require(
        packed.shapes == {(*grid, facts["block_size"] // 2)},
        f"packed {packed} is not {[*grid, facts['block_size'] // 2]}, [N, blocks, block_size / 2]",
    )
    site.require(scales.shapes == {grid}, f"scales {scales} is not {list(grid)}, one a block")
    site.require(scales.types == {facts["weight_dtype"]}, f"scales {scales} is not of the weight's type")
    site.require(zeros.shapes in ({grid}, {(1, 1)}), f"zero_points {zeros} is not {list(grid)}, one a block, or [1, 1]")
    site.require(
        zeros.types in ({TensorProto.UINT8}, {facts["weight_dtype"]}),
        f"zero_points {zeros} is not UINT8 or of the weight's type",
    )


def _require_float(site: Place, name: str, constant: Constant) -> None:
    one_float = len(constant.types) == 1 and constant.types <= DTYPE_NAME.keys()
    site.require(one_float, f"{name} {constant} is not FLOAT, FLOAT16 or BFLOAT16")


# -- The chains


def _lookup4(body: _Body, facts: Mapping[str, Any], names: Sequence[str], constants: Sequence[Constant]) -> str:
    """The canonical chain of DESIGN section 1: its last value."""
    packed, scales, codebook = names
    rows, cols, block = facts["rows"], facts["cols"], facts["block_size"]
    whole = -(-rows * cols // block) * block // 2
    missing = whole - constants[0].tensors[0].dims[0]
    if missing:
        packed = body.node("Pad", packed, body.ints([0, missing]))
    low, high = spell_nibbles(body, packed, 1)
    pairs = body.node("Concat", *((high, low) if facts["high_nibble_first"] else (low, high)), axis=1)
    index = body.node("Reshape", pairs, body.ints([-1, block]))
    values = body.node("Gather", _as_float(body, codebook, constants[2]), index)
    column = body.node("Unsqueeze", _as_float(body, scales, constants[1]), body.ints([1]))
    flat = body.node("Reshape", body.node("Mul", values, column), body.ints([-1]))
    flat = body.node("Slice", flat, body.ints([0]), body.ints([rows * cols]), body.ints([0]))
    matrix = body.node("Reshape", flat, body.ints([rows, cols]))
    weight_dtype, dtype = facts["weight_dtype"], facts["dtype"]
    if weight_dtype != TensorProto.FLOAT:
        matrix = body.node("Cast", matrix, to=weight_dtype)
    if dtype != weight_dtype:
        matrix = body.node("Cast", matrix, to=dtype)
    return matrix if list(facts["perm"]) == [0, 1] else body.node("Transpose", matrix, perm=[1, 0])


def _qmm(body: _Body, facts: Mapping[str, Any], names: Sequence[str], constants: Sequence[Constant]) -> str:
    """The affine chain in operators that every opset has (recognize/affine.py proves it): its last value."""
    packed, scales, zeros = names
    grid = Grid(facts["K"], facts["N"], facts["block_size"], 1)
    types = Types(DTYPE_NAME[facts["weight_dtype"]], DTYPE_NAME[facts["dtype"]])
    return spell(body, grid, types, packed, scales, _as_float(body, zeros, constants[2]))


def _as_float(body: _Body, name: str, constant: Constant) -> str:
    """A constant in FLOAT, in which the operators compute."""
    is_float = constant.types == {TensorProto.FLOAT}
    return name if is_float else body.node("Cast", name, to=TensorProto.FLOAT)


# -- The graph


@dataclass(eq=False)
class _Body:
    """One graph or function that gets new nodes, each before a site.

    A node that was made before, here or in a graph around, is not made twice: sites are met in graph order, so what a
    graph around has made so far stands before its subgraph.
    """

    owner: GraphProto | FunctionProto
    parent: _Body | None
    taken: set[str]  # every name of the model
    made: dict[tuple[Any, ...], str] = field(default_factory=dict)
    added: list[tuple[int, NodeProto]] = field(default_factory=list)  # with the index of its site
    index: int = -1
    prefix: str = ""

    def begin(self, site: Place) -> None:
        """The nodes made from now on stand before this site and are named after it."""
        self.index, self.prefix = site.index, site.node.name or next(iter(site.node.output), "")

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a standard operator on these values."""
        return self._once((op, inputs, str(attributes)), lambda: helper.make_node(op, inputs, [""], **attributes))

    def ints(self, values: list[int]) -> str:
        """An INT64 literal of rank 1."""
        tensor = numpy_helper.from_array(np.array(values, np.int64))
        return self._once(("Constant", *values), lambda: helper.make_node("Constant", [], [""], value=tensor))

    def _once(self, key: tuple[Any, ...], make: Callable[[], NodeProto]) -> str:
        body: _Body | None = self
        while body is not None:
            if key in body.made:
                return body.made[key]
            body = body.parent
        node = make()
        name = wanted = f"{self.prefix}/{node.op_type}"
        number = 1
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        node.name = node.output[0] = name
        self.added.append((self.index, node))
        return self.made.setdefault(key, name)

    def insert(self) -> None:
        """Put the new nodes where they belong."""
        nodes = self.owner.node
        order = [(index, 1) for index in range(len(nodes))] + [(index, 0) for index, _ in self.added]
        nodes.extend(node for _, node in self.added)
        ranks = iter(order)
        nodes.sort(key=lambda _: next(ranks))


def _body_of(scope: Scope, bodies: dict[Scope, _Body], taken: set[str]) -> _Body:
    """The body of a scope; those around it are made first."""
    if scope not in bodies:
        parent = None if scope.parent is None else _body_of(scope.parent, bodies, taken)
        bodies[scope] = _Body(scope.body, parent, taken)
    return bodies[scope]


def _remove_unused(model: onnx.ModelProto) -> None:
    """Remove our functions that no node calls, and imports of our domain where nothing uses it."""
    owners = [model.graph, *(function for function in model.functions if function.domain != DOMAIN)]
    called = [{node.op_type for node in _nodes(owner) if node.domain == DOMAIN} for owner in owners]
    names = set[str]().union(*called)
    for index in reversed(range(len(model.functions))):
        function = model.functions[index]
        if function.domain == DOMAIN and function.name not in names:
            del model.functions[index]
    importing = [model, *owners[1:]]
    for owner, used in zip(importing, [names, *called[1:]], strict=True):
        if not used:
            for index in reversed(range(len(owner.opset_import))):
                if owner.opset_import[index].domain == DOMAIN:
                    del owner.opset_import[index]


def _nodes(owner: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Every node of a body and of its subgraphs, without recursion."""
    waiting = [owner.node]
    while waiting:
        for node in waiting.pop():
            yield node
            waiting += [graph.node for graph in subgraphs(node)]


def _names(model: onnx.ModelProto) -> Iterator[str]:
    """Every name of a value or a node in a model."""
    waiting: list[GraphProto | FunctionProto] = [model.graph, *model.functions]
    while waiting:
        body = waiting.pop()
        if isinstance(body, GraphProto):
            yield from (entry.name for entry in (*body.input, *body.output, *body.initializer))
            yield from (entry.values.name for entry in body.sparse_initializer)
        else:
            yield from (*body.input, *body.output)
        for node in body.node:
            yield from (node.name, *node.input, *node.output)
            waiting += subgraphs(node)
