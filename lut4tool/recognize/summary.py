"""What `inspect` says of a model: its chains, operators and sizes; nothing is decoded, run or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx

from lut4tool.formats import DOMAIN, DTYPE_NAME, LOOKUP4_MATMUL, QMM
from lut4tool.recognize import recognize
from lut4tool.recognize.chains import VENDOR_CHAINS
from lut4tool.recognize.cost import Cost, cost, folds
from lut4tool.recognize.outside import outside
from lut4tool.recognize.proof import Proof, Refusal, Report
from lut4tool.recognize.walk import VENDOR_PRODUCTS
from lut4tool.storage import StorageError, Tensors, external_tensors, location, nbytes

_FOLDING = (
    "onnxruntime decodes them to dense float32 when it loads the model, "
    'unless the session has disabled_optimizers=["ConstantFolding"]'
)


@dataclass(frozen=True)
class Unreadable:
    """A file of external data that cannot be read: why, and the tensors that it lacks, of so many bytes."""

    file: str
    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Summary:
    """Facts of one model; sizes in bytes, each distinct weight counted once.

    outside: of each constant of 4-bit codes that no proof and no refusal speaks of, what reads it.
    """

    report: Report
    outside: tuple[Refusal, ...]
    operators: Mapping[str, int]
    file_bytes: int
    external_bytes: int
    packed_bytes: int
    dense_bytes: int
    advice: tuple[str, ...]
    unreadable: tuple[Unreadable, ...]

    def to_json(self) -> dict[str, Any]:
        """The document of `inspect --json` (DESIGN section 7)."""
        costs = {key: cost(proof) for key, proof in {proof.key: proof for proof in self.report.proofs}.items()}
        return {
            "found": [_found(proof, costs[proof.key]) for proof in self.report.proofs],
            "refused": [refusal.to_json() for refusal in self.report.refusals],
            "outside": [refusal.to_json() for refusal in self.outside],
            "operators": dict(self.operators),
            "file_bytes": self.file_bytes,
            "external_bytes": self.external_bytes,
            "packed_bytes": self.packed_bytes,
            "dense_bytes": self.dense_bytes,
            "onnxruntime_bytes": _folded_at_once(self.report.proofs, costs),
            "advice": list(self.advice),
            "unreadable": [vars(file) for file in self.unreadable],
        }


def summarize(model: onnx.ModelProto, file_bytes: int, tensors: Tensors, vendor: bool = False) -> Summary:
    """Summarize a model of `file_bytes`; `vendor`: MatMulBnb4 and MatMulNBits too. Its weights are not read."""
    report = recognize(model, vendor=vendor, tensors=tensors)
    distinct = distinct_weights(report.proofs)
    external = external_tensors(model)
    return Summary(
        report,
        outside(model, report),
        dict(_operators(model).most_common()),
        file_bytes,
        sum(map(nbytes, external)),
        sum(proof.nbytes for proof in distinct),
        sum(4 * proof.rows * proof.cols for proof in distinct),
        advise(model, report),
        _unreadable(external, tensors),
    )


def _unreadable(external: list[onnx.TensorProto], tensors: Tensors) -> tuple[Unreadable, ...]:
    """The files among a model's external data that are missing, cut or not to be opened."""
    found: dict[str, Unreadable] = {}
    for tensor in external:
        try:
            tensors.raw(tensor)  # a view of the file's map: no byte is read
        except StorageError as error:
            file = location(tensor)
            first = found.get(file, Unreadable(file, str(error), 0, 0))
            found[file] = replace(first, tensors=first.tensors + 1, bytes=first.bytes + nbytes(tensor))
    return tuple(found.values())


def _folded_at_once(proofs: tuple[Proof, ...], costs: Mapping[int, Cost]) -> int:
    """What onnxruntime's folding allocates for all weights: of chains over one packed tensor, it merges equal nodes."""
    largest: dict[Any, int] = {}
    for proof in proofs:
        key = proof.tensor_key("packed")
        largest[key] = max(largest.get(key, 0), costs[proof.key].onnxruntime or 0)
    return sum(largest.values())


def _found(proof: Proof, cost: Cost) -> dict[str, Any]:
    """One site: what it is, the chain and the constants that it comes from, and what it costs."""
    return proof.to_json() | {"chain": proof.chain_name, "constants": _constants(proof), **cost.to_json()}


def _constants(proof: Proof) -> list[str]:
    """The chain's constants: "name" or "name in file", where it is external data."""
    return [
        f"{name} in {entry.value}" if entry is not None else name
        for name, tensor in proof.sources.items()
        for entry in [next((e for e in tensor.external_data if e.key == "location"), None)]
    ]


def advise(model: onnx.ModelProto, report: Report) -> tuple[str, ...]:
    """Sentences on what to do with a model next, or why there is nothing to rewrite in it."""
    operators = _operators(model)
    advice = []
    if report.proofs:
        distinct = distinct_weights(report.proofs)
        folding = f"; {_FOLDING}" if any(map(folds, distinct)) else ""
        vendor = " --vendor" * any(proof.chain_name in VENDOR_CHAINS for proof in distinct)
        advice.append(f"`lut4tool rewrite{vendor}` will keep {_count(len(distinct), 'weight')} packed{folding}")
    if count := operators[f"{DOMAIN}::{LOOKUP4_MATMUL}"] + operators[f"{DOMAIN}::{QMM}"]:
        advice.append(f"packed weights already: {_count(count, 'product')}; {_FOLDING}")
    for domain, name in VENDOR_PRODUCTS:
        if count := operators[f"{domain}::{name}"]:
            advice.append(f"packed weights already: {_count(count, name + ' node')}, which `lut4tool run` serves as is")
    if not advice and not report.refusals:
        floats = _float_products(model)
        todo = "`lut4tool quantize` spells them as 4-bit chains" if floats else "it has nothing for lut4tool to do"
        advice.append(f"this model has {_count(floats, 'MatMul or Gemm node')} with float weights; {todo}")
    return tuple(advice)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _operators(model: onnx.ModelProto) -> Counter[str]:
    """How often each operator stands in the graph and the functions, our own bodies left out."""
    bodies = (function.node for function in model.functions if function.domain != DOMAIN)
    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for nodes in (model.graph.node, *bodies)
        for node in _all_nodes(nodes)
    )


def _float_products(model: onnx.ModelProto) -> int:
    """Products of the main graph by a float initializer or Constant of rank 2."""
    tensors = list(model.graph.initializer)
    for node in model.graph.node:
        if node.op_type == "Constant":
            name = "".join(node.output)
            tensors += [onnx.TensorProto(name=name, dims=a.t.dims, data_type=a.t.data_type) for a in node.attribute]
    names = {t.name for t in tensors if len(t.dims) == 2 and t.data_type in DTYPE_NAME}
    products = (node for node in model.graph.node if node.op_type in ("MatMul", "Gemm"))
    return sum(not names.isdisjoint(node.input[1:2]) for node in products)


def distinct_weights(proofs: tuple[Proof, ...]) -> list[Proof]:
    """One proof a packed weight: several products may share it."""
    return list({proof.tensor_key("packed"): proof for proof in reversed(proofs)}.values())[::-1]


def _all_nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    """Every node of a graph and of its subgraphs, without recursion."""
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    waiting.append(attribute.g.node)
                elif attribute.type == onnx.AttributeProto.GRAPHS:
                    waiting.extend(graph.node for graph in attribute.graphs)
