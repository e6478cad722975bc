"""What the recognizer says of each site: a proof of what its weight is, or a refusal in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

#: One step into a subgraph: (index of the node, index of its graph attribute; a name could be written twice).
Step = tuple[int, int]


@dataclass(frozen=True)
class Site:
    """Where a product stands: its function (None: the main graph), the path of subgraphs and its index there."""

    name: str  # as reported: "Layer/MatMul_3", "If_3/then_branch/MatMul:y", "function my.domain::Layer/MatMul:y"
    function: int | None  # index in model.functions
    path: tuple[Step, ...]
    index: int  # of the node in its graph or function


@dataclass(frozen=True, eq=False)
class Proof:
    """One product whose weight is a proved 4-bit chain: all that a rewrite and a witness need.

    inputs: value names of the node that will replace it, all visible at the site: (x, packed, scales, codebook).
    attributes: of that node, all of them (formats.Lookup4Weight.attributes).
    tensors: the constants of "packed", "scales" and "codebook" (for a function's formal input, those of its first
        call site); external data is not read.
    literals: the chain's other initializers, by name.
    weight: name of the chain's last value, which the product reads (through Identity nodes or not).
    chain: the producer's nodes from the constants to `weight`, in topological order; they read packed, scales and
        codebook under the names in `inputs`. Sites that share a weight share this tuple: see `key`.
    product: the node up to whose output blocks are independent (the Mul by the scales).
    """

    site: Site
    op: str
    chain_name: str  # the function of chains.py that proved it
    rows: int
    cols: int
    block_size: int
    weight_dtype: str
    dtype: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, int | list[int]]
    tensors: Mapping[str, onnx.TensorProto] = field(repr=False)
    literals: Mapping[str, onnx.TensorProto] = field(repr=False)
    weight: str
    chain: tuple[onnx.NodeProto, ...] = field(repr=False)
    product: onnx.NodeProto = field(repr=False)
    opset: int
    kept: bool = True  # the producer's bytes serve as they are

    @property
    def key(self) -> int:
        """Equal for the proofs of a report that share one weight: what a witness says of one holds for all."""
        return id(self.chain)

    def to_json(self) -> dict[str, Any]:
        """The facts of DESIGN section 7, for rewrite's and inspect's reports."""
        return {
            "node": self.site.name,
            "op": self.op,
            "rows": self.rows,
            "cols": self.cols,
            "block_size": self.block_size,
            "weight_dtype": self.weight_dtype,
            "bytes": "kept" if self.kept else "repacked",
        }


@dataclass(frozen=True)
class Refusal:
    """A product left as it was: one sentence, and the node where the walk stopped."""

    node: str
    reason: str
    at: str

    def to_json(self) -> dict[str, str]:
        """The facts of DESIGN section 7."""
        return {"node": self.node, "reason": self.reason, "at": self.at}


@dataclass(frozen=True)
class Witness:
    """How a proof was checked: elements compared, of how many; `all` where none was left out."""

    compared: int
    elements: int

    @property
    def all(self) -> bool:
        """Whether every element was compared."""
        return self.compared == self.elements

    def to_json(self) -> dict[str, Any]:
        """The facts of DESIGN section 7."""
        return {"compared": self.compared, "elements": self.elements, "all": self.all}


@dataclass(frozen=True, eq=False)
class Report:
    """Every site of a model, in graph order."""

    proofs: tuple[Proof, ...]
    refusals: tuple[Refusal, ...]
