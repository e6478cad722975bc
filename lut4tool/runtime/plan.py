"""What a plan is, and what a planned operator sees of its node; planning.py makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from lut4tool.runtime.backend import mx
from lut4tool.runtime.graph import Graph, Step
from lut4tool.runtime.quantized import Quantized


@dataclass(frozen=True)
class Node:
    """What a planned operator sees of its node.

    attributes: Python values, subgraphs as Graph (callables); constants: each input's NumPy array, None where it is not
    a constant; given: whether each input is there; types: of each input as ONNX writes it, None where it is not known;
    quantized: the bytes that a constant matrix of floats is made of; outputs: how many; note: records a choice in the
    plan for this node.
    """

    name: str
    op_type: str
    domain: str
    version: int
    attributes: Mapping[str, Any]
    constants: Sequence[np.ndarray | None]
    given: tuple[bool, ...]
    types: tuple[str | None, ...]
    quantized: tuple[Quantized | None, ...]
    outputs: int
    device: mx.Device
    note: Callable[[Any], None]


@dataclass(frozen=True)
class Plan:
    """A model ready to run.

    graph: the main graph, its inputs in the order of `inputs`; defaults: values of inputs that may be left out;
    subgraphs: every other graph, by its path; kernels: what planned operators chose, by node; dynamic: the slots that
    steps write; place: where operators compute, "mlx" or on a CPU "numpy".
    """

    graph: Graph
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    defaults: Mapping[str, Any]
    subgraphs: Mapping[str, Graph]
    kernels: Mapping[str, Any]
    dynamic: tuple[int, ...]
    place: str

    def clear(self) -> None:
        """Empty the frame of what a failed run left there."""
        for slot in self.dynamic:
            self.graph.frame[slot] = None

    def graphs(self) -> list[Graph]:
        """The main graph and every subgraph."""
        return [self.graph, *self.subgraphs.values()]

    def steps(self) -> list[Step]:
        """Every step of the model, the subgraphs' after the main graph's."""
        return [step for graph in self.graphs() for step in graph.steps]

    def describe(self) -> list[dict[str, str]]:
        """One row a step: node, op, where, region, and why other kernels were refused.

        where: a kernel's name; "host" for what runs on the host on any device: strings, sequences, optionals, maps,
        types that MLX lacks, images, ai.onnx.ml, shapes that depend on data; "shape" for arithmetic on shapes and small
        constants, which stays on the host; "fused into" the node whose step does its work too; else `place`.
        region: the number of the region that it is compiled in on a GPU, "" outside (see regions.py).
        """
        regions = [steps for graph in self.graphs() for steps in graph.regions()]
        numbers = {id(step): str(number) for number, steps in enumerate(regions, 1) for step in steps}
        rows = []
        for step in self.steps():
            choice = self.kernels.get(step.name)
            row = {"node": step.name, "op": f"{step.operator.domain or 'ai.onnx'}::{step.operator.name}"}
            where = "host" if step.host else "shape" if step.shape else self.place
            row["where"] = choice.name if choice is not None else where
            row["region"] = numbers.get(id(step), "")
            row["refused"] = "; ".join(f"{name}: {why}" for name, why in choice.refusals.items()) if choice else ""
            rows.append(row)
            for part in step.fused:
                kind = f"{part.operator.domain or 'ai.onnx'}::{part.operator.name}"
                where = f"fused into {step.name}"
                rows.append({"node": part.name, "op": kind, "where": where, "region": "", "refused": ""})
        return rows
