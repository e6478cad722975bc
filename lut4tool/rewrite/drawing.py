"""The graph around a rewritten site, before and after, as boxes and arrows in SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from lut4tool.recognize.proof import Proof, Site
from lut4tool.recognize.walk import type_name

#: Pixels: a box, the room between two, a letter of the 11 pixel monospaced face.
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _LETTER = 152, 24, 12, 20, 6.6
#: So many readers of a product are drawn; the others are counted.
_READERS = 4
#: Literals of so many elements are written in the box of the node that reads them.
_SHORT = 4


@dataclass(frozen=True)
class Box:
    """One value or node. kind: "constant", "chain", "product", "packed" (the new node) or "around"."""

    text: str
    detail: str
    kind: str


@dataclass(frozen=True)
class Drawing:
    """Boxes, and arrows as (from, to) indices of boxes; no cycles."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Surroundings:
    """What stands around a product before it is rewritten: what makes its inputs, what reads its output."""

    op: str
    name: str
    makers: Mapping[str, str]
    readers: tuple[str, ...]


def surroundings(model: onnx.ModelProto, proofs: Iterable[Proof]) -> list[Surroundings]:
    """Look around each site of a model that is not rewritten yet; linear in the graphs that hold sites."""
    known: dict[tuple[Any, ...], tuple[dict[str, NodeProto], dict[str, list[str]]]] = {}
    found = []
    for proof in proofs:
        site, owner = proof.site, _owner(model, proof.site)
        place = (site.function, *site.path)
        makers, readers = known.setdefault(place, ({}, {}))
        if not makers:
            _index(owner, makers, readers)
        node = owner.node[site.index]
        inputs = {name: _described(makers[name]) for name in node.input if name in makers}
        found.append(Surroundings(_described(node), site.name, inputs, tuple(readers.get(node.output[0], ()))))
    return found


def _owner(model: onnx.ModelProto, site: Site) -> Any:
    """The graph or function that holds a site."""
    owner: Any = model.graph if site.function is None else model.functions[site.function]
    for node, attribute in site.path:
        owner = owner.node[node].attribute[attribute].g
    return owner


def _index(owner: Any, makers: dict[str, NodeProto], readers: dict[str, list[str]]) -> None:
    """By value name: the node that makes it, and what reads it."""
    for node in owner.node:
        makers.update((name, node) for name in node.output if name)
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(_described(node))
    for output in owner.output:
        name = output if isinstance(output, str) else output.name
        readers.setdefault(name, []).append(f"output {name}")


def before(proof: Proof, around: Surroundings) -> Drawing:
    """The producer's chain, from its constants to the product and what reads that."""
    sketch = _Sketch()
    literals = dict(proof.literals)
    for node in proof.chain:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            literals[node.output[0]] = node.attribute[0].t
    short = {name: text for name, tensor in literals.items() if (text := _short(tensor))}
    roles = {held: role for role, held in proof.roles.items() if isinstance(held, str)}
    for node in proof.chain:
        if node.op_type == "Constant":
            if node.output[0] not in short:
                sketch.add(node.output[0], Box(_constant(node), node.name, "constant"))
            continue
        for name in filter(None, node.input):
            if name not in sketch and name not in short:
                tensor = literals.get(name) or proof.sources.get(name)
                text = f"{roles.get(name, 'constant')} {_typed(tensor)}" if tensor is not None else name
                sketch.add(name, Box(text, name, "constant"))
        said = " ".join(filter(None, (*(short.get(name) for name in node.input), *_attributes(node))))
        box = Box(f"{node.op_type} {said}".strip(), node.name or node.output[0], "chain")
        sketch.add(node.output[0], box, node.input)
    product = Box(around.op, around.name, "product")
    _finish(sketch, product, [proof.weight], proof.inputs[0], around)
    return sketch.drawing()


def after(proof: Proof, around: Surroundings) -> Drawing:
    """The node that takes the place of the chain and the product, with its inputs and what reads it."""
    sketch = _Sketch()
    names = []
    for role, held in proof.roles.items():
        names.append(held if isinstance(held, str) else f"{proof.op}/{role}")
        sketch.add(names[-1], Box(f"{role} {_typed(proof.tensor(role))}", names[-1], "constant"))
    product = Box(proof.op, around.name, "packed")
    _finish(sketch, product, names, proof.product.x, around)
    return sketch.drawing()


def _finish(sketch: _Sketch, product: Box, weight: Sequence[str], x: str, around: Surroundings) -> None:
    """Add x, the product and its readers below what makes the weight."""
    if x not in sketch:
        sketch.add(x, Box(around.makers.get(x, f"input {x}"), x, "around"))
    sketch.add("\0product", product, (x, *weight))
    for position, reader in enumerate(around.readers[:_READERS]):
        sketch.add(f"\0{position}", Box(reader, reader, "around"), ("\0product",))
    if len(around.readers) > _READERS:
        rest = f"{len(around.readers) - _READERS} more readers"
        sketch.add("\0rest", Box(rest, rest, "around"), ("\0product",))


class _Sketch:
    """Boxes by the name of the value that each stands for."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.arrows: list[tuple[str, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self.boxes

    def add(self, name: str, box: Box, inputs: Iterable[str] = ()) -> None:
        """A box; its inputs that have no box are not drawn."""
        self.arrows += [(source, name) for source in dict.fromkeys(inputs) if source in self.boxes]
        self.boxes[name] = box

    def drawing(self) -> Drawing:
        """What was added."""
        place = {name: index for index, name in enumerate(self.boxes)}
        return Drawing(tuple(self.boxes.values()), tuple((place[a], place[b]) for a, b in self.arrows))


def _described(node: NodeProto) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def _typed(tensor: TensorProto) -> str:
    return f"{type_name(tensor.data_type).lower()} {list(tensor.dims)}"


def _short(tensor: TensorProto) -> str:
    """The values of a small literal that is in the model; "" for others."""
    if tensor.data_location == TensorProto.EXTERNAL or np.prod(tensor.dims, dtype=object) > _SHORT:
        return ""
    return str(numpy_helper.to_array(tensor).tolist())


def _constant(node: NodeProto) -> str:
    held = node.attribute[0]
    return f"constant {_typed(held.t)}" if held.HasField("t") else f"{helper.get_attribute_value(held)}"


def _attributes(node: NodeProto) -> list[str]:
    """A node's attributes that are numbers, types by their names."""
    said = []
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name == "to":
            said.append(type_name(value).lower())
        elif isinstance(value, (int, float, list)) and attribute.name not in ("allowzero", "saturate"):
            said.append(f"{attribute.name} {value}")
    return said


def svg(drawing: Drawing) -> str:
    """An SVG element: ranks from top to bottom, each box below all that it reads."""
    ranks, lanes = _ranks(drawing)
    rows = _rows(ranks, lanes)
    middle = _middles(rows, lanes, len(drawing.boxes))
    left = min(middle.values()) - _WIDTH / 2 - _GAP_X
    width = max(middle.values()) + _WIDTH / 2 + _GAP_X - left
    height = len(rows) * (_HEIGHT + _GAP_Y) + _GAP_Y
    centre = {item: (x - left, _GAP_Y + ranks[item] * (_HEIGHT + _GAP_Y) + _HEIGHT / 2) for item, x in middle.items()}
    lines = [_line([centre[item] for item in lane]) for lane in lanes]
    boxes = [_box(box, *centre[index]) for index, box in enumerate(drawing.boxes)]
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return f'<svg role="img" {size}>{"".join(lines)}{"".join(boxes)}</svg>'


def _ranks(drawing: Drawing) -> tuple[dict[int, int], list[list[int]]]:
    """The rank of each box and bend, and each arrow as the boxes and bends that it passes, one a rank."""
    ranks = dict.fromkeys(range(len(drawing.boxes)), 0)
    for source, target in sorted(drawing.arrows, key=lambda arrow: arrow[1]):  # boxes come after what they read
        ranks[target] = max(ranks[target], ranks[source] + 1)
    for index in range(len(drawing.boxes)):  # a constant stands just above its first reader
        readers = [ranks[target] for source, target in drawing.arrows if source == index]
        if readers and not any(target == index for _, target in drawing.arrows):
            ranks[index] = min(readers) - 1
    lanes, bends = [], len(drawing.boxes)
    for source, target in drawing.arrows:
        between = range(ranks[source] + 1, ranks[target])
        lane = [source, *range(bends, bends + len(between)), target]
        ranks.update(zip(lane[1:-1], between, strict=True))
        bends += len(between)
        lanes.append(lane)
    return ranks, lanes


def _rows(ranks: Mapping[int, int], lanes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Boxes and bends rank by rank, in the order of what they read."""
    above = _above(lanes)
    rows: list[list[int]] = [[] for _ in range(max(ranks.values()) + 1)]
    for item, rank in ranks.items():
        rows[rank].append(item)
    place: dict[int, float] = {}
    for row in rows:
        middle = {item: float(np.mean([place[a] for a in above.get(item, [])] or [1.0])) for item in row}
        row.sort(key=lambda item: middle[item])
        place.update((item, (index + 0.5) / len(row)) for index, item in enumerate(row))
    return rows


def _above(lanes: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """What each box or bend has above it."""
    above: dict[int, list[int]] = {}
    for lane in lanes:
        for source, target in pairwise(lane):
            above.setdefault(target, []).append(source)
    return above


def _middles(rows: Sequence[Sequence[int]], lanes: Sequence[Sequence[int]], boxes: int) -> dict[int, float]:
    """The middle of each box and bend: as near to those above it as its row allows."""
    above, middle = _above(lanes), dict[int, float]()
    for row in rows:
        wanted = [float(np.mean([middle[a] for a in above.get(item, [])] or [0.0])) for item in row]
        placed, edge = [], wanted[0] - _WIDTH
        for item, near in zip(row, wanted, strict=True):
            half = (_WIDTH if item < boxes else _GAP_X) / 2
            placed.append(max(near, edge + half))
            edge = placed[-1] + half + _GAP_X
        shift = float(np.mean(np.array(wanted) - placed))
        middle.update((item, x + shift) for item, x in zip(row, placed, strict=True))
    return middle


def _line(points: Sequence[tuple[float, float]]) -> str:
    """A smooth line from the lower edge of the first box to the upper edge of the last, with a head."""
    (x, y), half = points[0], _HEIGHT / 2
    path = f"M{x:.0f} {y + half:.0f}"
    for last, (x2, y2) in enumerate(points[1:], 2 - len(points)):
        start, end = y + half, y2 - half
        bend = (start + end) / 2
        path += f"C{x:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {end:.0f}"
        if last:
            path += f"V{y2 + half:.0f}"
        x, y = x2, y2
    tip = f"M{x - 3:.0f} {y - half - 5:.0f}L{x:.0f} {y - half:.0f}L{x + 3:.0f} {y - half - 5:.0f}"
    return f'<path class="arrow" d="{path}{tip}"/>'


def _box(box: Box, x: float, y: float) -> str:
    room = int((_WIDTH - 8) / _LETTER)
    text = box.text if len(box.text) <= room else box.text[: room - 1] + "…"
    where = f'x="{x - _WIDTH / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{_WIDTH}" height="{_HEIGHT}"'
    return (
        f'<g class="{box.kind}"><title>{escape(f"{box.text} ({box.detail})")}</title><rect {where} rx="4"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}">{escape(text)}</text></g>'
    )
