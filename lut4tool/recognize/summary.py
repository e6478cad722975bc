"""What `inspect` says of a model: its chains, operators and sizes; nothing is decoded, run or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from lut4tool.formats import DOMAIN, LOOKUP4_MATMUL
from lut4tool.recognize import recognize
from lut4tool.recognize.proof import Proof, Report
from lut4tool.storage import nbytes, read_model

_FOLDING = (
    "onnxruntime decodes these weights to dense float32 when it loads the model; "
    'disabled_optimizers=["ConstantFolding"] keeps it from that'
)


@dataclass(frozen=True, eq=False)
class Summary:
    """Facts of one model; sizes in bytes, each distinct weight counted once."""

    report: Report
    operators: Mapping[str, int]
    file_bytes: int
    external_bytes: int
    packed_bytes: int
    dense_bytes: int
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The document of `inspect --json` (DESIGN section 7)."""
        return {
            "found": [proof.to_json() for proof in self.report.proofs],
            "refused": [refusal.to_json() for refusal in self.report.refusals],
            "operators": dict(self.operators),
            "file_bytes": self.file_bytes,
            "external_bytes": self.external_bytes,
            "packed_bytes": self.packed_bytes,
            "dense_bytes": self.dense_bytes,
            "advice": list(self.advice),
        }


def summarize(path: Path) -> Summary:
    """Read a model and summarize it. Raises StorageError where the file is not a model."""
    model = read_model(path)
    report = recognize(model)
    operators = Counter(
        f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for nodes in (model.graph.node, *(function.node for function in model.functions))
        for node in _all_nodes(nodes)
    )
    distinct = distinct_weights(report.proofs)
    external = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    custom = operators[f"{DOMAIN}::{LOOKUP4_MATMUL}"]
    advice = []
    if report.proofs:
        advice.append(f"`lut4tool rewrite` will keep {len(distinct)} weight(s) packed. {_FOLDING}")
    if custom:
        advice.append(f"{custom} node(s) already keep their weights packed. {_FOLDING}")
    return Summary(
        report,
        dict(operators.most_common()),
        path.stat().st_size,
        sum(map(nbytes, external)),
        sum(nbytes(proof.tensors[name]) for proof in distinct for name in ("packed", "scales", "codebook")),
        sum(4 * proof.rows * proof.cols for proof in distinct),
        tuple(advice),
    )


def distinct_weights(proofs: tuple[Proof, ...]) -> list[Proof]:
    """One proof a packed weight: several products may share it."""
    return list({id(proof.tensors["packed"]): proof for proof in reversed(proofs)}.values())[::-1]


def _all_nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    """Every node of a graph and of its subgraphs, without recursion."""
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attribute:
                waiting.extend(graph.node for graph in (attribute.g, *attribute.graphs) if graph.node)
