"""What the recognizer says of each site: a proof of what its weight is, or a refusal in words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from lut4tool import storage
from lut4tool.recognize.layout import Cut, Laid

#: One step into a subgraph: (index of the node, index of its graph attribute; a name could be written twice).
Step = tuple[int, int]


@dataclass(frozen=True)
class Site:
    """Where a product stands: its function (None: the main graph), the path of subgraphs and its index there."""

    name: str  # as reported: "Layer/MatMul_3", "If_3/then_branch/MatMul:y", "function my.domain::Layer/MatMul:y"
    function: int | None  # index in model.functions
    path: tuple[Step, ...]
    index: int  # of the node in its graph or function


@dataclass(frozen=True)
class Product:
    """What the site computes: Y = alpha * (X @ W) + beta * bias, X and Y transposed where W stood on the left.

    x, bias: value names that are visible at the site; bias is "" where there is none.
    """

    x: str
    alpha: float = 1.0
    bias: str = ""
    beta: float = 1.0
    transpose_x: bool = False
    transpose_y: bool = False


@dataclass(frozen=True, eq=False)
class Proof:
    """One product whose weight is a proved 4-bit chain: all that a rewrite and a witness need.

    product: what stands around the weight.
    attributes: of the node that will replace the site, all of them (formats.lookup4_attributes, QmmWeight).
    roles: its inputs after X, in order: packed, scales and codebook, or packed, scales and zero_points. Each is the
        name of a source that serves as it is, or what is laid out anew.
    sources: the constants that the chain reads as data, by the name that it reads (for a function's formal input, that
        of its first call site); external data is not read.
    literals: the chain's other initializers, by name.
    weight: name of the chain's last value, which the product reads (through Identity nodes or not).
    flipped: the product reads it transposed (Gemm's transB).
    chain: the nodes from the constants to `weight`, in topological order: the producer's, or for a vendor's operator
        standard nodes that say what it means. Sites that share a weight share this tuple: see `key`.
    cut: how a large weight is cut into independent units (None: it cannot be, and is run whole).
    """

    site: Site
    op: str
    chain_name: str  # the function that proved it
    rows: int
    cols: int
    block_size: int
    weight_dtype: str
    dtype: str
    product: Product
    attributes: Mapping[str, int | list[int]]
    roles: Mapping[str, str | Laid]
    sources: Mapping[str, onnx.TensorProto] = field(repr=False)
    literals: Mapping[str, onnx.TensorProto] = field(repr=False)
    weight: str
    chain: tuple[onnx.NodeProto, ...] = field(repr=False)
    cut: Cut | None
    opset: int
    flipped: bool = False

    @property
    def key(self) -> int:
        """Equal for the proofs of a report that share one weight: what a witness says of one holds for all."""
        return id(self.chain)

    @property
    def kept(self) -> bool:
        """Whether the packed bytes serve as they are."""
        packed = self.roles["packed"]
        return isinstance(packed, str) or packed.view

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the new node reads of the model as it is: X, and the sources kept."""
        return (self.product.x, *(held for held in self.roles.values() if isinstance(held, str)))

    @property
    def nbytes(self) -> int:
        """Bytes of all that the new node holds of its weight."""
        return sum(storage.nbytes(self.tensor(role)) for role in self.roles)

    def tensor(self, role: str) -> onnx.TensorProto:
        """What the new node holds as `role`; of a tensor that is laid out anew, its type and dims alone."""
        held = self.roles[role]
        if isinstance(held, str):
            return self.sources[held]
        return onnx.TensorProto(name=f"{self.op}/{role}", data_type=held.data_type, dims=held.shape)

    def tensor_key(self, role: str) -> tuple[Hashable, ...]:
        """Equal for roles that one tensor can serve."""
        held = self.roles[role]
        if isinstance(held, str):
            return (id(self.sources[held]),)
        return (held.make, held.settings, held.data_type, *(id(self.sources[name]) for name in held.sources))

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
